"""Parameters that modules of a model share, such as tied embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn


def shared_across(model: nn.Module, parts: Sequence[nn.Module]) -> Iterator[tuple[nn.Parameter, list[str]]]:
    """Parameters that one of the parts shares with another part, or with the rest of the model.

    Args:
        model: on any device.
        parts: modules of it.

    Yields:
        Each such parameter once, with its names in the model: one alone if a part lies in another part.
    """
    owners: dict[int, set[int]] = {}  # by the id of a parameter
    for number, part in enumerate(parts):
        for parameter in part.parameters():
            owners.setdefault(id(parameter), set()).add(number)
    inside = {id(module) for part in parts for module in part.modules()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False) if id(module) not in inside else ():
            owners.setdefault(id(parameter), set()).add(len(parts))
    for parameter in model.parameters():
        if len(owners[id(parameter)]) > 1:
            every = model.named_parameters(remove_duplicate=False)
            yield parameter, [name for name, other in every if other is parameter]
