"""Networks compiled by torch.compile for training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._triton import has_triton

from data.system.log import log
from recipes.algorithms.graphs.kept_gradients import KeptGradients
from recipes.algorithms.modules.channels_last import uses_channels_last
from recipes.algorithms.sharding.shard import Unit
from recipes.training.lever import Lever
from recipes.training.run import Run

# Modes that capture CUDA graphs, and what they are without.
GRAPH_MODES = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}

# Trainers' own options, such as Composer's compile_config, are not used: they compile the whole model with its random
# draws, which compiled code makes differently, and not what validation calls.


class CompiledForward:
    """A module's forward method, compiled for training only.

    Validation, sampling and counting FLOPs run the original forward: each would need a compilation for other shapes,
    for a small part of the time. Hooks, such as those of FSDP, stay outside; names of parameters do not change.

    Attributes:
        paused: whether training runs the original forward too.
        called: whether the compiled forward has run.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        """
        Args:
            module: its forward is replaced by this object when the caller puts it there.
            options: of torch.compile.
        """
        self.module = module
        self.plain = module.forward
        self.options = options
        self.compiled: Callable[..., Any] | None = None
        self.paused = False
        self.called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.paused or not self.module.training or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        if self.compiled is None:
            # Of an object with `__call__`, PyTorch would compile a function per object; of a method, one for all.
            plain = self.plain if inspect.isroutine(self.plain) else self.plain.__call__
            self.compiled = torch.compile(plain, **self.options)
        self.called = True
        return self.compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "compiled": None}  # a copy of the module must not run with the weights of this one


def compile_forwards(modules: Iterable[nn.Module], options: dict[str, Any]) -> list[CompiledForward]:
    """Replace the forward of each module by a compiled one, which is compiled at its first call.

    Raises:
        ValueError: there is no module, or one is compiled already.
    """
    found = list(modules)
    if not found:
        raise ValueError("compile: nothing to compile, the model names no blocks; set whole: true")
    if any(isinstance(module.forward, CompiledForward) for module in found):
        raise ValueError("compile: compiled already; a run has at most one compile lever")
    forwards = [CompiledForward(module, options) for module in found]
    for module, forward in zip(found, forwards, strict=True):
        module.forward = forward
    # Where a graph breaks, functions of modules inside are compiled by themselves.
    allow_compilations(4 * sum(1 for module in found for _ in module.modules()))
    return forwards


def check_called(what: str, forwards: Iterable[Any], whole: bool) -> None:
    """Find modules that a lever changes in vain.

    Args:
        what: the beginning of the message.
        forwards: what took the place of the forward methods of modules: each has a `module`, and `called`.
        whole: whether the modules are whole networks.

    Raises:
        ValueError: a module has run without being called.
    """
    idle = [type(forward.module).__name__ for forward in forwards if not forward.called]
    if idle:
        raise ValueError(
            f"{what}, as {', '.join(dict.fromkeys(idle))} ran without being called through its forward; set whole: "
            f"{'false' if whole else 'true'}"
        )


def inductor_options(mode: str, channels_last: bool) -> dict[str, Any]:
    """Arguments of torch.compile for its backend inductor.

    Args:
        mode: of torch.compile.
        channels_last: images have this format already. In graphs with convolutions, inductor would otherwise give it to
            all tensors with four dimensions, and copy queries, keys, values and results of attention to and from it.
    """
    if not channels_last:
        return {"mode": mode}
    # torch.compile takes either a mode or options; a mode is a name of options.
    return {"options": {**torch._inductor.list_mode_options(mode), "layout_optimization": False}}


def allow_compilations(count: int) -> None:
    """Let a function be compiled a number of times, and raise an error instead of running it uncompiled after that.

    Compilations of a function are counted over all blocks that share it. Each needs one per size, and the last
    microbatch may be smaller. The limits are settings of the process, which this only raises.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)
    config.fail_on_recompile_limit_hit = True


def why_no_compiler(on_gpu: bool) -> str | None:
    """Why inductor cannot compile here, or None if it can."""
    if on_gpu:
        return None if has_triton() else "Triton is missing or does not know this GPU"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # its class depends on the version
        return f"no C++ compiler ({type(error).__name__}); install g++ or name one in CXX"
    return None


class Compile(Lever):
    """Compiles the blocks of a network, or whole networks, for training with batches of one shape.

    The mode reduce-overhead captures CUDA graphs: one launch per block instead of one per kernel. It pays if the device
    waits for the host, as with small grids and microbatches (256 x 256 pixels and a few samples); with long kernels it
    only takes more memory. Graphs write gradients to the same memory in each microbatch. In batches of several
    microbatches, gradients are therefore summed in separate buffers.
    """

    def __init__(
        self,
        task: nn.Module,
        *,
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default",
        whole: bool = False,
        fullgraph: bool = False,
        backend: Literal["inductor", "aot_eager", "eager"] = "inductor",
    ) -> None:
        """
        Args:
            task: the model; its `blocks()` are compiled.
            mode: mode of torch.compile. default: fused kernels; reduce-overhead: CUDA graphs too; max-autotune: also
                times kernels for convolutions and matrix products, which takes minutes; max-autotune-no-cudagraphs:
                the same without CUDA graphs.
            whole: compile the task's `networks()` instead of its blocks: more to fuse, longer to compile.
            fullgraph: raise an error where a block or network cannot be compiled as one graph, instead of running a
                part of it uncompiled.
            backend: inductor generates kernels. To see which part of the compiler causes an error: aot_eager traces the
                forward and the backward pass and runs PyTorch's own kernels, eager traces the forward pass alone.
        """
        self.task = task
        self.mode = mode
        self.whole = whole
        self.fullgraph = fullgraph
        self.backend = backend
        self.graphs = mode in GRAPH_MODES
        self.forwards: list[CompiledForward] = []
        self.to_check = True

    def check_machine(self, run: Run) -> None:
        reason = why_no_compiler(run.on_gpu) if self.backend == "inductor" else None
        if reason:
            raise ValueError(f"compile: {reason}; or remove the lever")

    def check_divided(self) -> None:
        """Find what cannot work where `training.fsdp` or `training.tensor_parallel` divides the model.

        Raises:
            ValueError: CUDA graphs.
        """
        if self.graphs:
            raise ValueError(
                f"compile: mode {self.mode} captures CUDA graphs, for which parameters must keep their addresses, and "
                "training.fsdp gathers them at new ones; with training.tensor_parallel they have not been tried; use "
                f"mode {GRAPH_MODES[self.mode]}"
            )

    def check_units(self, units: Iterable[Unit]) -> None:
        """Find what cannot be one graph.

        Args:
            units: of FSDP2, with which the model is sharded next.

        Raises:
            ValueError: `fullgraph`, and one of them begins inside of a compiled module.
        """
        found = {id(module) for unit in units for module in unit.modules}
        inside = [m for part in self._parts() for m in part.modules() if m is not part and id(m) in found]
        if self.fullgraph and inside:
            raise ValueError(
                f"compile: fullgraph: true, and training.fsdp gathers {type(inside[0]).__name__} inside of a compiled "
                "module, which ends its graph there; use fullgraph: false, or compile blocks with "
                "training.fsdp.wrap: blocks"
            )

    def _parts(self) -> list[nn.Module]:
        # A model that calls a block several times may name it as often.
        return list(dict.fromkeys(self.task.networks() if self.whole else self.task.blocks()))

    def compile(self, run: Run) -> None:
        """See `Lever.compile`: everything that changes modules has run, wherever the recipe names this lever."""
        parts = self._parts()
        # Only inductor has modes.
        inductor = self.backend == "inductor"
        options = inductor_options(self.mode, uses_channels_last(self.task)) if inductor else {}
        options |= {"backend": self.backend, "dynamic": False, "fullgraph": self.fullgraph}
        self.forwards = compile_forwards(parts, options)
        self.gradients = KeptGradients(nn.ModuleList(parts).parameters())
        if not self.whole:
            # Under DDP, Dynamo would divide blocks at the ends of buckets of 25 MB, so that buckets are averaged during
            # the backward pass. They are with one graph per block, too, and small graphs cost more than they gain.
            torch._dynamo.config.optimize_ddp = False
        kind = "networks" if self.whole else "blocks"
        log.info(f"compile: {len(self.forwards)} {kind}, mode {self.mode}, in the first batch")
        run.log_settings({"compile": self.mode, "compiled": len(self.forwards)})

    def before_forward(self, run: Run) -> None:
        if self.graphs and run.on_gpu:
            self.gradients.before_forward()
            torch.compiler.cudagraph_mark_step_begin()

    def before_step(self, run: Run) -> None:
        if self.to_check and not any(forward.paused for forward in self.forwards):
            self.check()

    def check(self) -> None:
        """After the backward passes of the first batch, check that every compiled forward has run.

        Raises:
            ValueError: a module was not called through its forward.
        """
        self.to_check = False
        check_called("compile: nothing was compiled", self.forwards, self.whole)

    # --- for the search of a microbatch --------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Train without compiled forwards, or with them again: a size that is tried once is not worth a compilation."""
        for forward in self.forwards:
            forward.paused = paused
