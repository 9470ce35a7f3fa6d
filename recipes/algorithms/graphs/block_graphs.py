"""The forward and the backward pass of a module as one CUDA graph each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from recipes.algorithms.graphs.fixed_memory import GraphMemory, Inputs
from recipes.models.kernels.device_graph import DeviceGraph, for_graph

WARM_UPS = 3  # what a first pass changes, such as a count of a hook, may let a second one be compiled once more


class Nested:
    """Tensors in nested tuples, lists and dicts, and what else is in these.

    Attributes:
        tensors: in the order in which `torch.utils._pytree` visits them.
    """

    def __init__(self, value: Any) -> None:
        leaves, self.structure = tree_flatten(value)
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: list[Tensor] = [leaves[place] for place in self.places]
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Any:
        """The same with other tensors."""
        leaves = list(self.others)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.structure)


class Call:
    """The arguments of a call of a module, and under which autocast it is made.

    Attributes:
        arguments: the arguments.
        kind: equal for calls of which one graph can run both.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments = Nested((args, kwargs))
        self.device = self.arguments.tensors[0].device
        kind = self.device.type
        self.precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        tensors = [(t.shape, t.dtype, t.requires_grad) for t in self.arguments.tensors]
        self.kind = tensors, self.arguments.places, self.arguments.others, self.arguments.structure, self.precision

    def autocast(self) -> AbstractContextManager[None]:
        """Autocast of the call. It converts weights each time: in a graph, those of later batches are other ones."""
        enabled = self.precision is not None
        return torch.autocast(self.device.type, dtype=self.precision, enabled=enabled, cache_enabled=False)


class BlockGraphs:
    """The graphs of a module for calls of one kind.

    Autograd sees one operation on the inputs. Gradients of parameters are added here: autograd would visit each
    parameter in both passes, which takes the host longer than all else.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], call: Call, memory: GraphMemory) -> None:
        """Captures the forward pass. The backward pass is captured when it runs first.

        Args:
            module: its trained parameters get gradients.
            forward: its forward method.
            call: the graphs run calls of this kind, this one first.
            memory: shared by all modules of a model.

        Raises:
            RuntimeError: the forward pass cannot be captured.
            ValueError: it needs gradients of something that is neither an argument nor a parameter of the module, or
                replaces a buffer.
        """
        self.forward = forward
        self.call = call
        self.memory = memory
        self.inputs = Inputs(call.arguments.tensors, memory)
        # Tensors of their own: what autograd records for one module must not go on in another.
        fixed = zip(self.inputs.fixed, call.arguments.tensors, strict=True)
        self.leaves = [values.detach().requires_grad_(tensor.requires_grad) for values, tensor in fixed]
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.forward_graph = DeviceGraph(memory.pool)
        with for_graph():
            self._warm_up(module)
            before = dict(module.named_buffers())
            with call.autocast(), self.forward_graph.capture():
                self.recorded = self._forward()
        check_buffers(before, dict(module.named_buffers()))
        self.outputs = [output.detach() for output in self.recorded.tensors]
        self.follows = [output.requires_grad for output in self.recorded.tensors]
        self.backward_graph: DeviceGraph | None = None

    def run(self, call: Call) -> Any:
        """What the module returns. Its tensors are valid until the next call. The call is used up."""
        # Without an input that needs a gradient, autograd would leave out the backward pass.
        anchor = torch.empty(0, requires_grad=True)
        tensors, call.arguments.tensors = call.arguments.tensors, []  # this keeps the first call, but not its tensors
        outputs = Replay.apply(self, anchor, *tensors)
        for output, fixed in zip(outputs, self.outputs, strict=True):
            self.memory.add(output, fixed)
        return self.recorded.with_tensors(outputs)

    def replay_forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Outputs for inputs."""
        self.inputs.fill(tensors)
        self.forward_graph.replay()
        return [output.detach() for output in self.outputs]

    def replay_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Adds to the gradients of parameters.

        Args:
            gradients: those of the outputs; None for an output on which the loss does not depend.

        Returns:
            Those of the inputs.

        Raises:
            RuntimeError: the backward pass cannot be captured; or other outputs have gradients than when it was.
        """
        given = [gradient for gradient in gradients if gradient is not None]
        present = [gradient is not None for gradient in gradients]
        if self.backward_graph is None:
            self._capture_backward(given, present)
        elif present != self.present:
            raise RuntimeError("cuda_graphs: the loss depends on other outputs than before; remove the lever")
        else:
            self.gradient_inputs.fill(given)
        self.backward_graph.replay()
        add_gradients(self.parameters, self.parameter_gradients)
        results = [None if gradient is None else gradient.detach() for gradient in self.input_gradients]
        for result, fixed in zip(results, self.input_gradients, strict=True):
            if result is not None:
                self.memory.add(result, fixed)
        return results

    def _forward(self) -> Nested:
        args, kwargs = self.call.arguments.with_tensors(self.leaves)
        return Nested(self.forward(*args, **kwargs))

    def _warm_up(self, module: nn.Module) -> None:
        """Run both passes uncaptured, without effect: kernels are chosen or compiled, and libraries set up, by this."""
        trained = [t for t in (*self.leaves, *self.parameters) if t.requires_grad]
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        with torch.random.fork_rng([self.call.device] if self.call.device.type == "cuda" else []):
            for _ in range(WARM_UPS):
                with self.call.autocast():
                    outputs = [output for output in self._forward().tensors if output.requires_grad]
                check_sources(outputs, trained)
                with torch.autocast(self.call.device.type, enabled=False):
                    torch.autograd.grad(outputs, trained, [torch.zeros_like(o) for o in outputs], allow_unused=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def _capture_backward(self, given: Sequence[Tensor], present: Sequence[bool]) -> None:
        self.present = present
        self.gradient_inputs = Inputs(given, self.memory)
        outputs = [output for output, is_there in zip(self.recorded.tensors, present, strict=True) if is_there]
        inputs = [leaf for leaf in self.leaves if leaf.requires_grad]
        self.backward_graph = DeviceGraph(self.memory.pool)
        with self.backward_graph.capture():
            found = torch.autograd.grad(
                outputs, [*inputs, *self.parameters], self.gradient_inputs.fixed, allow_unused=True
            )
            of_parameters = found[len(inputs) :]
            self.parameter_gradients = with_own_memory(
                of_parameters, self.parameters, [*self.gradient_inputs.fixed, *found[: len(inputs)]]
            )
        of_inputs = iter(found)
        self.input_gradients = [next(of_inputs) if leaf.requires_grad else None for leaf in self.leaves]
        self.recorded.tensors = []  # what autograd has recorded with them is used up


class Replay(torch.autograd.Function):
    """Both passes of a module, for autograd."""

    @staticmethod
    def forward(ctx: Any, graphs: BlockGraphs, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.graphs = graphs
        ctx.set_materialize_grads(False)
        outputs = graphs.replay_forward(inputs)
        ctx.mark_non_differentiable(*[o for o, follows in zip(outputs, graphs.follows, strict=True) if not follows])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.graphs.replay_backward(gradients)


def with_own_memory(
    gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter], others: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients that may be changed in place one by one, in the memory format of their parameters.

    The gradient of a parameter with a `main_grad` is written there. `block_all_reduce` sends what is there, so that
    gradients need no other memory.

    Args:
        gradients: as autograd has found them. That of `x + bias`, for one, is the gradient of the sum.
        parameters: one per gradient.
        others: tensors whose memory they may be part of.
    """
    taken = {t.untyped_storage().data_ptr() for t in others if t is not None}
    results: list[Tensor | None] = []
    copied: list[tuple[Tensor, Tensor]] = []
    for gradient, parameter in zip(gradients, parameters, strict=True):
        if gradient is not None:
            address = gradient.untyped_storage().data_ptr()
            given = getattr(parameter, "main_grad", None)
            if given is None and address not in taken and gradient.stride() == parameter.stride():
                taken.add(address)
            else:
                copied.append((torch.empty_like(parameter) if given is None else given, gradient))
                gradient = copied[-1][0]
        results.append(gradient)
    together = [(to, source) for to, source in copied if to.stride() == source.stride()]
    if together:  # in a few kernels, which other strides would prevent for all
        torch._foreach_copy_([to for to, _ in together], [source for _, source in together])
    for to, source in copied:
        if to.stride() != source.stride():
            to.copy_(source)
    return results


@torch.no_grad()
def add_gradients(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """What autograd does at the end of a backward pass: parameters get gradients, or these are added to theirs."""
    sums, added = [], []
    found = [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
    for parameter, gradient in found:
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            sums.append(parameter.grad)
            added.append(gradient)
    if sums:
        torch._foreach_add_(sums, added)
    for parameter, _ in found:
        # These are called when a gradient is complete, which only autograd does by itself.
        for hook in (parameter._post_accumulate_grad_hooks or {}).values():
            hook(parameter)


def check_buffers(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Find buffers that a pass replaces by others. A graph would read the first one each time.

    Raises:
        ValueError: there is one.
    """
    for name, buffer in before.items():
        if after.get(name) is not buffer:
            raise ValueError(f"each call puts another tensor in the place of its buffer {name}; write into it by copy_")


def check_sources(outputs: Sequence[Tensor], known: Sequence[Tensor]) -> None:
    """Find gradients that would be lost, as nobody would ask for them.

    Raises:
        ValueError: outputs depend on a leaf of autograd that is not known.
    """
    ids = {id(tensor) for tensor in known}
    nodes = [output.grad_fn for output in outputs]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # nodes of leaves have one
        if variable is not None and id(variable) not in ids:
            raise ValueError("it trains a tensor that is neither one of its parameters nor one of its arguments")
        nodes += [following for following, _ in node.next_functions]
