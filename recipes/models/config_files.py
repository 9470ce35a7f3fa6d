"""Networks that are built again by the JSON files of exports, in which wrong numbers must not take all memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from data.system.errors import one_line
from data.system.memory import NotEnoughMemory, memory_to_read
from recipes.models.json_files import read_object

Built = TypeVar("Built")
LARGEST = 10_000  # number that a config may hold, whatever the weights
SPARE = 1_000_000  # values that a network may have for a while, besides those of its weights
SPARE_TENSORS = 1000  # and tensors: thousands of small modules would take a minute


def build_from(
    file: Path, build: Callable[[dict[str, Any]], Built], tensors: Mapping[str, Tensor] | None = None
) -> Built:
    """What `build` makes of the JSON object in a file.

    Args:
        file: of an export.
        build: takes the object.
        tensors: the weights beside the file. No network is built that is larger than they are, by far: a wrong number
            must not take all memory.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not a JSON object, or nothing can be built of it.
        NotEnoughMemory: there is none for a network of such weights.
    """
    values, tensors = read_object(file), tensors or {}
    most = max([LARGEST, *(size for tensor in tensors.values() for size in tensor.shape)])
    for number in _integers(values):
        if abs(number) > most:
            raise ValueError(f"{file}: {number} is more than any size of the weights beside it")
    try:
        # Twice, because modules may share parameters, which are counted in each: open_clip's CLIP has some in two.
        values_most = 2 * sum(tensor.numel() for tensor in tensors.values()) + SPARE
        with memory_to_read(file.parent, 4 * values_most), _at_most(values_most, 2 * len(tensors) + SPARE_TENSORS):
            return build(values)
    except NotEnoughMemory:
        raise
    except Exception as error:  # networks raise nearly anything for sizes of other types or signs
        text = one_line(error)
        if isinstance(error, ValueError | FileNotFoundError) and str(file.parent) in text:
            raise (FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError)(text) from None
        raise ValueError(f"{file}: nothing can be built of it ({text})") from error


def _integers(values: Any) -> Iterator[int]:
    if isinstance(values, int):
        yield values
    for inner in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from _integers(inner)


@contextmanager
def _at_most(values: int, tensors: int) -> Iterator[None]:
    """A context in which modules get up to `tensors` parameters of up to `values` values, replaced ones not counted."""
    found = found_tensors = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal found, found_tensors
        replaced = module._parameters.get(name)  # from_pretrained puts what it reads in the place of new parameters
        for sign, p in ((1, parameter), (-1, replaced)):
            if p is not None:
                found += sign * p.numel()
                found_tensors += sign
        if found > values or found_tensors > tensors:
            raise ValueError("a network that is larger than the weights beside it")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()
