"""A module's forward method, run by CUDA graphs in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from data.system.errors import first_line
from data.system.log import log
from recipes.algorithms.graphs.block_graphs import BlockGraphs, Call
from recipes.algorithms.graphs.fixed_memory import GraphMemory


class GraphedForward:
    """Takes the place of a module's forward method, so that each pass of the module is one launch in training.

    The graphs are captured in the first call, and run calls that differ in the values of tensors alone. Other calls run
    the method itself, as do validation, sampling and counting FLOPs. Hooks stay outside; names of parameters do not
    change.

    Attributes:
        paused: whether training runs the method itself, too.
        called: whether graphs have run.
    """

    def __init__(self, module: nn.Module, memory: GraphMemory) -> None:
        """
        Args:
            module: its forward is replaced by this object when the caller puts it there.
            memory: shared by all modules of a model.
        """
        self.module = module
        self.plain = module.forward
        self.paused = False
        self.called = False
        self.clear(memory)

    def clear(self, memory: GraphMemory) -> None:
        """Forget the graphs; the next call captures others."""
        self.memory = memory
        self.graphs: BlockGraphs | None = None
        self.ran = False
        self.told = False

    def microbatch_begins(self) -> None:
        """The graphs may run again: what they have left in memory is not needed any more."""
        self.ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the method returns. Tensors are valid until the next microbatch.

        Raises:
            RuntimeError: the module cannot be captured, or is called twice in a microbatch.
        """
        if self.paused or not self.module.training or not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        name = type(self.module).__name__
        call = Call(args, kwargs)
        if self.graphs is None:
            try:
                self.graphs = BlockGraphs(self.module, self.plain, call, self.memory)
            except Exception as error:
                why = first_line(error)
                raise RuntimeError(f"cuda_graphs: {name} cannot be captured: {why}; remove the lever") from error
        elif call.kind != self.graphs.call.kind:
            if not self.told:
                log.info(f"cuda_graphs: {name} runs without graphs where its inputs have other shapes")
                self.told = True
            return self.plain(*args, **kwargs)
        if self.ran:
            raise RuntimeError(f"cuda_graphs: {name} is called twice in a forward pass; remove the lever")
        self.ran = self.called = True
        return self.graphs.run(call)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the module must not run with the weights of this one.
        return {**self.__dict__, "graphs": None, "memory": None, "paused": True}
