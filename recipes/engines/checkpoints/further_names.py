"""Weights of modules that a model has under several names. PyTorch divides those of a full checkpoint under the first
name alone, and does not load the whole ones of the other names into parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict as theirs


@contextmanager
def loaded_under_each_name() -> Iterator[None]:
    """A context in which PyTorch loads weights under all names that a model's `state_dict` has for them."""
    first_names = theirs._iterate_valid_model_state

    def all_names(model: nn.Module, *arguments: Any) -> Iterator[tuple[str, Any]]:
        known = set()
        for name, value in first_names(model, *arguments):
            known.add(name)
            yield name, value
        saved = model.state_dict().keys() - known
        every = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        yield from ((name, value) for name, value in chain(*every) if name in saved)

    theirs._iterate_valid_model_state = all_names
    try:
        yield
    finally:
        theirs._iterate_valid_model_state = first_names
