"""CUDA graphs on a CPU: what is captured is recorded, and run again on the same memory."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipes.algorithms.graphs import block_graphs, cuda_graphs


def storages(value):
    """Address -> a tensor there."""
    return {t.untyped_storage().data_ptr(): t for t in tree_leaves(value) if isinstance(t, torch.Tensor) and t.numel()}


class Recorder(TorchDispatchMode):
    """Keeps operators with the tensors that they read and wrote, and what they changed in place."""

    def __init__(self, operators):
        super().__init__()
        self.operators = operators
        self.made, self.changed = {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = storages((args, kwargs))
        if func._schema.is_mutable:
            for address, tensor in given.items():
                if address not in self.made and address not in self.changed:
                    self.changed[address] = whole(tensor), whole(tensor).clone()
        result = func(*args, **kwargs)
        self.made |= {a: t for a, t in storages(result).items() if a not in given and a not in self.changed}
        self.operators.append((func, args, kwargs, result))
        return result


def whole(tensor):
    """All values of the memory that a tensor is a part of."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


class EmulatedGraph:
    """Has the methods of `DeviceGraph`.

    While it is captured nothing is computed, as on a GPU: what operators have written afterwards is not a number, or
    for integers a wrong one, what they have changed is as before, and no random number was drawn.
    """

    def __init__(self, pool):
        self.operators = []

    @contextmanager
    def capture(self):
        state = torch.get_rng_state()
        recorder = Recorder(self.operators)
        with recorder:
            yield
        torch.set_rng_state(state)
        with torch.no_grad():
            for tensor in recorder.made.values():
                whole(tensor).fill_(torch.nan if tensor.is_floating_point() else 99)
            for tensor, before in recorder.changed.values():
                tensor.copy_(before)

    @torch.no_grad()
    @torch.autocast("cpu", enabled=False)  # which has cast before operators were recorded
    def replay(self):
        for func, args, kwargs, result in self.operators:
            tensors = tuple(t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor))
            # Views of what earlier operators wrote are there already, as are results of operators that work in place.
            given = storages((args, kwargs))
            # Autograd does not see what a graph changes.
            with torch.autograd._unsafe_preserve_version_counter(tensors):
                again = func(*args, **kwargs)
                for to, values in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(to, torch.Tensor) and to.numel() and to.untyped_storage().data_ptr() not in given:
                        to.copy_(values)


def emulate(monkeypatch):
    """Let `cuda_graphs` work on a CPU."""
    monkeypatch.setattr(block_graphs, "DeviceGraph", EmulatedGraph)
    monkeypatch.setattr(cuda_graphs, "memory_pool", lambda: None)
    monkeypatch.setattr(cuda_graphs, "has_graphs", lambda device: True)
