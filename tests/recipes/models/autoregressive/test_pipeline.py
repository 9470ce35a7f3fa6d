"""The picture whose upper rows are kept: the same pixels as training makes of the file."""

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from data.sources.base import Sample
from data.sources.filters import Filter
from data.tokenizers.bpe import Vocabulary
from recipes.models.autoregressive import pipeline
from recipes.models.autoregressive.masks import TokenLayout
from recipes.models.autoregressive.pipeline import TokenPipeline
from recipes.models.autoregressive.transformer import TokenTransformer
from tests.recipes.algorithms.graphs.emulated import EmulatedGraph


class Eye:
    """An image encoder that keeps the pixels it is shown."""

    def store(self, pixels):
        self.pixels = pixels[0, 0].numpy()
        return SimpleNamespace(arrays={"tokens": torch.zeros(1, 1, 16, dtype=torch.int16)})


def opened(vocabulary=None):
    network = SimpleNamespace(layout=SimpleNamespace(side=4, text=3))
    return TokenPipeline(network, Eye(), vocabulary, resolution=32, device="cpu", precision="fp32")


def seen(file):
    tokens = opened()
    tokens._given(file, 2)
    return tokens.image_encoder.pixels


@pytest.mark.parametrize("kind", ["transparent", "palette", "16 bits", "turned"])
def test_the_given_picture_is_read_as_in_training(tmp_path, kind):
    rng = np.random.default_rng(0)
    pixels, file, options = rng.integers(0, 256, (32, 32, 4), dtype=np.uint8), tmp_path / "picture.png", {}
    image = Image.fromarray(pixels)
    if kind == "palette":
        image, options = Image.fromarray(pixels[..., 0]).convert("P"), {"transparency": 0}
    elif kind == "16 bits":
        image = Image.fromarray(rng.integers(0, 2**16, (32, 32), dtype=np.uint16))
    elif kind == "turned":
        options = {"exif": image.getexif()}
        options["exif"][0x0112] = 6
    image.save(file, **options)
    trained = Filter().decode(Sample("0", file.read_bytes(), "a picture"))
    assert (seen(file) == np.asarray(trained.image)).all()


def test_a_picture_of_unknown_range_is_named(tmp_path):
    Image.fromarray(np.zeros((32, 32), np.float32)).save(tmp_path / "depth.tiff")
    with pytest.raises(ValueError, match=r"--picture: .*depth.tiff .*pixels of type F"):
        seen(tmp_path / "depth.tiff")


@pytest.mark.timeout(20)  # a pipe that nobody writes never ends
@pytest.mark.parametrize("kind", ["no such file", "no regular file: folder", "no regular file: pipe"])
def test_a_picture_that_is_not_there_is_one_line(tmp_path, kind):
    if "folder" in kind:
        (tmp_path / "none.png").mkdir()
    if "pipe" in kind:
        os.mkfifo(tmp_path / "none.png")
    message = rf"(?i)--picture: .*none.png is not readable as a picture \(.*{kind.split(':')[0]}"
    with pytest.raises(ValueError, match=message) as error:
        seen(tmp_path / "none.png")
    assert "\n" not in str(error.value)


def test_tokens_that_the_text_positions_do_not_hold(token_sets):
    vocabulary = Vocabulary.read(token_sets / "vocabulary.json")
    captions = ["", "on", "on a wall, 17 stars and no dots"]
    lost = opened(vocabulary).lost_tokens(captions)
    assert lost == [0, 0, len(vocabulary.encode(captions[2])) - 3]


class Codes:
    """An image encoder whose images are their tokens."""

    def decode(self, grid):
        return (grid[:, None] / 9).expand(-1, 3, -1, -1)


def test_images_of_logits_that_are_not_finite_are_refused(token_sets):
    """They would be images of any tokens."""
    vocabulary, layout = Vocabulary.read(token_sets / "vocabulary.json"), TokenLayout(3, 4, 3)
    network = TokenTransformer(layout=layout, layers=2, width=8, heads=2, text_vocabulary=vocabulary.size, codes=9)
    torch.nn.init.constant_(network.unembedding.weight, torch.inf)
    drawn = TokenPipeline(network, Codes(), vocabulary, resolution=32, device="cpu", precision="bf16")
    with pytest.raises(ValueError, match="^2 of 2 images are not finite in bf16; use precision fp32"):
        drawn.generate(["on", "a wall"], seeds=[1, 2])


def test_tokens_are_drawn_with_a_graph_of_its_own_per_batch(token_sets, monkeypatch):
    """On a GPU, unless `cuda_graph` is false. Here graphs are emulated, and give the same images."""
    vocabulary, layout = Vocabulary.read(token_sets / "vocabulary.json"), TokenLayout(3, 4, 3)
    torch.manual_seed(0)
    network = TokenTransformer(layout=layout, layers=2, width=8, heads=2, text_vocabulary=vocabulary.size, codes=9)
    torch.nn.init.normal_(network.unembedding.weight)
    drawn = TokenPipeline(network, Codes(), vocabulary, resolution=32, device="cpu", precision="bf16")
    captions, seeds, graphs = ["on", "on", "a wall"], [1, 2, 3], []
    plain = drawn.generate(captions, seeds=seeds, batch=2)
    monkeypatch.setattr(pipeline, "has_graphs", lambda device: device.type == "cpu")
    monkeypatch.setattr(pipeline, "memory_pool", lambda: None)
    monkeypatch.setattr(pipeline, "DeviceGraph", lambda pool: graphs.append(EmulatedGraph(pool)) or graphs[-1])
    assert (drawn.generate(captions, seeds=seeds, batch=2) == plain).all()
    assert len(graphs) == 2 and all(graph.operators for graph in graphs)
    assert (drawn.generate(captions, seeds=seeds, batch=2, cuda_graph=False) == plain).all()
    assert len(graphs) == 2
    assert len(np.unique(plain)) > 3


def test_another_vocabulary_beside_the_transformer_is_named(token_sets, tmp_path, monkeypatch):
    """Captions had tokens beyond its table, of which a GPU names nothing, or other ones."""
    shutil.copy(token_sets / "vocabulary.json", tmp_path)
    sizes = {"layout": TokenLayout(3, 4, 3), "layers": 1, "width": 8, "heads": 2, "codes": 9}
    network = TokenTransformer(text_vocabulary=270, **sizes)
    monkeypatch.setattr(pipeline, "load_transformer", lambda folder: network)
    encoder = SimpleNamespace(need_decoder=lambda: None, to=lambda device: None)
    parts = SimpleNamespace(network=tmp_path, image_encoder=encoder, precision="fp32", folder=tmp_path, device="cpu")
    parts.record = {"resolution": 32}
    line = f"^{tmp_path}/vocabulary.json: 280 entries, and the transformer beside it has 270 text tokens; copy the"
    with pytest.raises(ValueError, match=line):
        pipeline.load(parts)
    network = TokenTransformer(text_vocabulary=280, **sizes)
    assert pipeline.load(parts).vocabulary.size == 280
