"""Files that are written tensor by tensor: the bytes of safetensors' own writer, for whatever it can write."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from recipes.models.tensor_file import TensorFile


def can_be_saved(dtype):
    """Whether safetensors' own writer takes a format of numbers."""
    try:
        return bool(save({"": torch.empty(1, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)}))
    except (KeyError, ValueError, RuntimeError):
        return False


FOUR_BITS = getattr(torch, "float4_e2m1fn_x2", None)  # of later versions: two numbers in each element
EVERY = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - {FOUR_BITS}
DTYPES = sorted(filter(can_be_saved, EVERY), key=str)


def written(path, tensors):
    with TensorFile(path, {name: tensor.to("meta") for name, tensor in tensors.items()}) as file:
        for name in file.names:
            file.write(name, tensors[name])
    return path.read_bytes()


@st.composite
def a_tensor(draw):
    """Of any dtype, with 0 to 4 dimensions, of which some may be empty; its memory may be in another order, or larger,
    and it may be trained."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 4), max_size=4))
    sizes = (*shape, dtype.itemsize)
    bits = (torch.arange(math.prod(sizes)) * draw(st.integers(1, 255))).to(torch.uint8).view(sizes)  # NaN, too
    tensor = (bits[..., 0] > 127) if dtype == torch.bool else bits.view(dtype).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        cut = draw(st.booleans()) or not len(tensor)
        tensor = tensor[1:] if cut else tensor[:1].expand(3, *tensor.shape[1:])
    return tensor.requires_grad_(draw(st.booleans()) and (dtype.is_floating_point or dtype.is_complex))


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), a_tensor(), max_size=6))
def test_the_bytes_are_those_of_safetensors(tmp_path_factory, tensors):
    path = tmp_path_factory.getbasetemp() / "weights.safetensors"  # replaced by each example
    found = written(path, tensors)
    tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for name, tensor in tensors.items()}
    assert found == save({name: tensor.detach() for name, tensor in tensors.items()})
    if "__metadata__" in tensors:  # which no reader of safetensors takes for a tensor
        return
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert read[name].view(-1).view(torch.uint8).equal(tensor.detach().view(-1).view(torch.uint8)), name


def test_a_file_whose_header_cannot_be_written_is_closed():
    with pytest.raises(OSError, match="No space left") as raised:
        TensorFile(Path("/dev/full"), {"a": torch.ones(2)})
    file = raised.traceback[1].locals["self"]._file
    assert file.closed


def test_a_format_that_files_cannot_hold_is_named(tmp_path):
    tensors = {"a": torch.ones(2), "b.weight": torch.ones(2, dtype=torch.complex128)}
    with pytest.raises(ValueError, match=r"^b\.weight is of torch\.complex128, which no safetensors file can hold"):
        TensorFile(tmp_path / "x", tensors)
    assert not (tmp_path / "x").exists()


def test_tensors_must_be_those_of_the_header(tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    for name, tensor in (("b", tensors["b"]), ("a", tensors["b"]), ("a", tensors["a"].double())):
        with pytest.raises(AssertionError, match="but .*'?a'? is next"), TensorFile(tmp_path / "x", tensors) as file:
            file.write(name, tensor)
    unfinished = pytest.raises(AssertionError, match="1 tensors have not been written")
    with unfinished, TensorFile(tmp_path / "x", tensors) as file:
        file.write("a", tensors["a"])
