"""Folders of exported networks."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from recipes.models.language.transformer import TextTransformer
from recipes.models.network_folder import TransformerTask, load_network, save_network

SIZES = {"layers": 1, "width": 8, "heads": 2, "positions": 6, "vocabulary": 10, "dropout": 0.0}


def test_opening_draws_no_weights_and_gives_a_network_of_its_own(tmp_path):
    """At 12 billion parameters, new weights take minutes and a second network's memory on each rank."""
    torch.manual_seed(0)
    network = TextTransformer(**SIZES)
    save_network(tmp_path, network, SIZES)
    tensors = load_file(tmp_path / "model.safetensors")
    before = torch.get_rng_state()
    # Stored in 16 bits by others, and cut out of larger tensors by what upgrades earlier versions' files.
    save_file({name: tensor.half() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    columns = lambda tensor: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor  # noqa: E731
    opened = load_network(tmp_path, TextTransformer, lambda found: {n: columns(t) for n, t in found.items()})
    assert torch.equal(torch.get_rng_state(), before)
    assert json.loads((tmp_path / "config.json").read_text()) == SIZES
    for name, parameter in opened.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.is_contiguous() and parameter.requires_grad, name
        assert torch.equal(parameter, tensors[name].half().float()), name
    tokens = torch.arange(6)[None]
    opened(tokens).sum().backward()
    torch.testing.assert_close(opened(tokens), network(tokens), atol=1e-2, rtol=1e-2)


class Tables(torch.nn.Module):
    """Has tensors that its state dict lacks."""

    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width))
        self.register_buffer("table", torch.arange(width).float(), persistent=False)
        self.mask = torch.ones(width)
        self.several = [torch.full((width,), 2.0)]

    def forward(self):
        return self.weight * self.table + self.mask * self.several[0]


class Reads(Tables):
    """Reads a value as it is built."""

    def __init__(self, width):
        super().__init__(width)
        self.several = [torch.linspace(0, width, width)[-1].item()]

    def forward(self):
        return self.weight * self.several[0]


@pytest.mark.parametrize("kind", [Tables, Reads])
def test_tables_that_are_in_no_file_have_values_in_an_opened_network(tmp_path, kind):
    """They had none, so that a denoiser that was trained to the end could not generate."""
    network = kind(4)
    save_network(tmp_path, network, {"width": 4})
    before = torch.get_rng_state()
    assert torch.equal(load_network(tmp_path, kind)(), network())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_task_with_an_export_of_its_own_is_not_written_tensor_by_tensor():
    """Of a model on several devices, the files of the class that it inherits from would be written otherwise."""

    class Learns(TransformerTask):
        def eval_total(self):
            return None

    class Converts(Learns):
        def export(self, folder):
            (folder / "converted").touch()

    class Averages(Learns):
        def export_average(self, folder):
            (folder / "average").touch()

    class Mixin:
        def export(self, folder):
            (folder / "mixed").touch()

    class Mixed(Mixin, Learns):
        pass

    class Replaced(Learns, Mixin):
        pass

    class Both(Converts):
        def export(self, folder):
            super().export(folder)

        def export_config(self, folder, averaged):
            return folder / "weights.safetensors"

        exported = "network"

    assert {c.exported for c in (TransformerTask, Learns, Both, Replaced)} == {"network"}
    assert {c.exported for c in (Converts, Averages, Mixed)} == {None}
