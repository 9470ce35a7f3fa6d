"""Launches the passes of a model's blocks as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from data.system.log import log
from recipes.algorithms.graphs.fixed_memory import GraphMemory
from recipes.algorithms.graphs.graphed_forward import GraphedForward
from recipes.algorithms.graphs.kept_gradients import KeptGradients
from recipes.algorithms.modules.compile import GRAPH_MODES, Compile, check_called
from recipes.models.kernels.device_graph import has_graphs, memory_pool
from recipes.models.shared_parameters import shared_across
from recipes.training.lever import Lever
from recipes.training.run import Run


class CudaGraphs(Lever):
    """Captures the forward and the backward pass of each block as a CUDA graph: one launch instead of one per kernel.

    It pays if the device waits for the host, as with few samples per microbatch. With `compile`, the compiled kernels
    are captured; without it, PyTorch's own.

    A graph repeats kernels: numbers that a block computes on the host are those of the first batch. Graphs write
    gradients to the same memory in each microbatch. In batches of several microbatches, gradients are therefore summed
    in separate buffers.
    """

    def __init__(self, task: nn.Module, *, whole: bool = False) -> None:
        """
        Args:
            task: the model; its `blocks()` are captured.
            whole: capture the task's `networks()` instead: fewer launches, but gradients are averaged over ranks only
                after the backward pass.

        Raises:
            ValueError: there is nothing to capture.
        """
        self.task = task
        self.whole = whole
        self.modules = task.networks() if whole else list(task.blocks())
        if not self.modules:
            raise ValueError("cuda_graphs: nothing to capture, the model names no blocks; set whole: true")
        self.forwards: list[GraphedForward] = []
        self.addresses: list[int] = []
        self.to_check = True

    def check_divided(self) -> None:
        """Find what cannot work where `training.fsdp` or `training.tensor_parallel` divides the model.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "cuda_graphs: parameters must keep their addresses, and training.fsdp gathers them at new ones; with "
            "training.tensor_parallel it has not been tried; remove the lever"
        )

    def check_levers(self, compiled: Compile | None, recomputes: bool, averaged: bool, replicas: int) -> None:
        """Find other levers with which this one cannot work.

        Args:
            compiled: the lever that compiles; None: the run has none.
            recomputes: whether `activation_checkpointing` computes blocks again in the backward pass.
            averaged: whether `block_all_reduce` averages gradients.
            replicas: copies of the model.

        Raises:
            ValueError: blocks are computed again; the compiler works around what is captured here, or captures graphs,
                too; or DistributedDataParallel averages gradients.
        """
        if recomputes:
            raise ValueError(
                "cuda_graphs: activation_checkpointing reads the state of random numbers in the backward pass, which "
                "cannot be captured; remove one of them"
            )
        if compiled is not None and compiled.graphs:
            raise ValueError(
                f"cuda_graphs: compile captures graphs, too, with mode {compiled.mode}; use mode "
                f"{GRAPH_MODES[compiled.mode]}"
            )
        if compiled is not None and compiled.whole and not self.whole:
            raise ValueError("cuda_graphs: blocks inside of a compiled network cannot be captured; set whole: true")
        if replicas > 1 and not averaged:
            raise ValueError(
                "cuda_graphs: DistributedDataParallel does not see the gradients of graphs; add "
                "algorithms.averages.name=block_all_reduce, or remove the lever"
            )

    def begin(self, run: Run) -> None:
        """Here other levers have changed and compiled modules, and a checkpoint has been loaded."""
        if self.forwards:  # the same trainer may fit a second time
            return
        if not has_graphs(run.device):
            log.info("cuda_graphs: not used, there is no GPU")
            return
        check_shared(self.task, self.modules)
        self.memory = GraphMemory(memory_pool)
        self.forwards = [GraphedForward(module, self.memory) for module in self.modules]
        for module, forward in zip(self.modules, self.forwards, strict=True):
            module.forward = forward
        everything = nn.ModuleList(self.modules)
        self.tensors = [*everything.parameters(), *everything.buffers()]
        self.gradients = KeptGradients(everything.parameters())
        kind = "networks" if self.whole else "blocks"
        log.info(f"cuda_graphs: {len(self.forwards)} {kind}, captured in the first batch")
        run.log_settings({"cuda_graphs": len(self.forwards)})

    def before_forward(self, run: Run) -> None:
        if not self.forwards:
            return
        self.gradients.before_forward()
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        if addresses != self.addresses:  # graphs would go on with the memory that weights have left
            self._clear()
            self.addresses = addresses
        self.memory.forget()  # also where a microbatch had no backward pass
        for forward in self.forwards:
            forward.microbatch_begins()

    def after_backward(self, run: Run) -> None:
        if self.forwards:
            self.memory.forget()

    def before_step(self, run: Run) -> None:
        if self.to_check and self.forwards and not any(forward.paused for forward in self.forwards):
            self.check()

    def check(self) -> None:
        """After the backward passes of the first batch, check that every block has been captured.

        Raises:
            ValueError: a module was not called through its forward.
        """
        self.to_check = False
        check_called("cuda_graphs: nothing was captured", self.forwards, self.whole)

    def _clear(self) -> None:
        if self.addresses:
            log.info("cuda_graphs: parameters have other addresses than before; blocks are captured again")
        self.memory = GraphMemory(memory_pool)
        for forward in self.forwards:
            forward.clear(self.memory)

    # --- for the search of a microbatch --------------------------------------------------------

    def pause(self, paused: bool) -> None:
        """Train without graphs, as a size that is tried once is not worth capturing; or with new ones."""
        for forward in self.forwards:
            forward.paused = paused
        if not paused:
            self.addresses = []


def check_shared(task: nn.Module, captured: Sequence[nn.Module]) -> None:
    """Find parameters whose gradients are not complete when the backward pass of a module is.

    Raises:
        ValueError: a captured module shares a trained parameter with another module.
    """
    for parameter, names in shared_across(task, captured):
        if parameter.requires_grad:
            raise ValueError(
                f"cuda_graphs: {' and '.join(names)} are one parameter of modules that are captured apart; capture "
                "them together with whole: true, or remove the lever"
            )
