"""The best of several candidates per caption."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from data.system.errors import WrongResult
from data.tokenizers.clip_library import open_clip
from recipes.scoring import reranking
from tests.recipes.encoders.own_words import give_tokenizer


class Scores:
    """Stands for a Reranker: an image's first byte is its score."""

    def __init__(self):
        self.sizes = []

    def scores(self, captions, images):
        assert len(captions) == len(images)
        self.sizes.append(len(images))
        return images[:, 0, 0, 0].astype(np.float32)


def generate(captions, seeds):
    """Images that say which seed and caption they are of."""
    images = np.zeros((len(captions), 1, 1, 3), np.uint8)
    images[:, 0, 0] = [(seed * 37 % 101, seed, ord(caption)) for caption, seed in zip(captions, seeds, strict=True)]
    return images


@pytest.mark.parametrize("at_once", [1, 7, 10, 4096])
@pytest.mark.parametrize("keep", [1, 3])
def test_the_best_of_each_caption(keep, at_once, monkeypatch):
    monkeypatch.setattr(reranking, "IMAGES_AT_ONCE", at_once)
    reranker = Scores()
    images, captions = reranking.draw_best(generate, list("abcd"), 5, reranker, candidates=5, keep=keep)
    assert captions == [caption for caption in "abcd" for _ in range(keep)]
    expected = []
    for i, caption in enumerate("abcd"):
        seeds = sorted(range(5 + 5 * i, 10 + 5 * i), key=lambda seed: -(seed * 37 % 101))[:keep]
        expected += [(seed * 37 % 101, seed, ord(caption)) for seed in seeds]
    assert images[:, 0, 0].tolist() == [list(pixel) for pixel in expected]
    # Memory: no more images at once than are allowed, or the candidates of one caption.
    assert sum(reranker.sizes) == 20 and max(reranker.sizes) <= max(5, at_once)


def test_without_a_reranker_all_are_kept():
    images, captions = reranking.draw_best(generate, list("ab"), 3, None, candidates=2, keep=2)
    assert captions == list("aabb") and images[:, 0, 0, 1].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("reranker", [None, Scores()])
@pytest.mark.parametrize(
    "change",
    [
        lambda images: images[:-1],
        lambda images: images / np.float32(255),
        lambda images: images.transpose(0, 3, 1, 2).repeat(2, axis=3),
        lambda images: torch.from_numpy(images),
        lambda images: images[..., 0],
    ],
)
def test_what_is_no_image_per_caption_is_an_error(change, reranker):
    """Of a family of one's own: figures were those of fewer images, or of images that are nearly black."""
    with pytest.raises(WrongResult, match="generate.. of the pipeline returns an .* for 4 captions; return an array"):
        reranking.draw_best(lambda *a, **k: change(generate(*a, **k)), list("ab"), 3, reranker, 2, 2)


def test_the_key_that_names_the_model_is_in_messages(tmp_path):
    from recipes.scoring.extractors import build_extractor

    with pytest.raises(FileNotFoundError, match="^--rerank: no file "):
        reranking.Reranker(str(tmp_path), "cpu")
    with pytest.raises(FileNotFoundError, match="^extractor.path: no file "):
        build_extractor("contrastive", str(tmp_path), "cpu")


def test_weights_and_a_model_of_another_activation(clip_folder, monkeypatch):
    """open_clip warns, and OpenAI's weights gave other scores than the published model."""
    with pytest.raises(ValueError, match="^clip: ViT-L-14 has another activation .* openai .* ViT-L-14-quickgelu$"):
        reranking.Reranker("ViT-L-14/openai", "cpu", "clip")
    small = open_clip.create_model(f"local-dir:{clip_folder}")
    monkeypatch.setattr(reranking, "load_open_clip", lambda model, tag, key: small)
    # Stored scores of one are not taken for those of the other.
    names = ("ViT-L-14-quickgelu/openai", "ViT-L-14/laion2b_s32b_b82k")
    assert len({reranking.Reranker(name, "cpu").hash() for name in names}) == 2


def test_the_hash_of_a_folder_is_of_its_weights_and_its_config(clip_folder, tmp_path):
    """By another mean of pixels, the same weights give other features than those that are stored."""
    other = tmp_path / "other"
    shutil.copytree(clip_folder, other)
    hashes = [reranking.Reranker(str(clip_folder), "cpu").hash(), reranking.Reranker(str(other), "cpu").hash()]
    config = json.loads((other / reranking.CONFIG).read_text())
    config["preprocess_cfg"]["mean"] = [0.4, 0.5, 0.5]
    (other / reranking.CONFIG).write_text(json.dumps(config))
    hashes.append(reranking.Reranker(str(other), "cpu").hash())
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_hash_of_a_folder_is_of_its_tokenizer(clip_folder, tmp_path):
    """By other numbers of words, captions have other embeddings, and stored scores were taken for those of before."""
    shutil.copytree(clip_folder, tmp_path, dirs_exist_ok=True)
    found = []
    for words in (["red", "navy"], ["navy", "red"], ["red", "navy"]):
        give_tokenizer(tmp_path, words)
        (tmp_path / "done.json").write_text(str(len(found)))  # of an export, which is no part of it
        reranker = reranking.Reranker(str(tmp_path), "cpu")
        found.append((reranker.tokenize(["red"])[0, 0].item(), reranker.hash()))
    assert found[0] == found[2] and found[0][0] != found[1][0] and found[0][1] != found[1][1]


def test_scores_are_the_similarities_of_open_clips_own_embeddings(clip_folder):
    """Of each image and its own caption, also where captions come twice, in any order, and in several batches."""
    reranker = reranking.Reranker(str(clip_folder), "cpu")
    network, _, prepare = open_clip.create_model_and_transforms(f"local-dir:{clip_folder}")
    network.eval()
    images = np.random.default_rng(0).integers(0, 256, (5, *reranker.size, 3), dtype=np.uint8)
    captions = ["a star", "a dot", "a star", "a line", "a dot"]
    with torch.no_grad():
        seen = network.encode_image(torch.stack([prepare(Image.fromarray(image)) for image in images]), normalize=True)
        said = network.encode_text(reranker.tokenize(captions), normalize=True)
    expected = (seen * said).sum(1).numpy()
    assert np.ptp(expected) > 0.01
    for batch in (2, 64):
        np.testing.assert_allclose(reranker.scores(captions, images, batch), expected, atol=1e-5)


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", None])
def test_images_are_resized_by_the_filter_of_the_model(clip_folder, tmp_path, filter):
    """As open_clip's own transform does, which rounds to 8 bits in between: the values differ by at most one of 255
    steps. The two filters differ by more than 10 here."""
    shutil.copytree(clip_folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / reranking.CONFIG).read_text())
    config["preprocess_cfg"] = {"std": [1.0, 1.0, 1.0]} | ({} if filter is None else {"interpolation": filter})
    (tmp_path / reranking.CONFIG).write_text(json.dumps(config))
    reranker = reranking.Reranker(str(tmp_path), "cpu")
    _, _, prepare = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    image = np.random.default_rng(0).integers(0, 256, (3 * reranker.size[0], 3 * reranker.size[1], 3), dtype=np.uint8)
    prepared = reranker._prepare(torch.from_numpy(image[None]))[0]
    torch.testing.assert_close(prepared, prepare(Image.fromarray(image)), atol=1.01 / 255, rtol=0)


def test_the_hash_of_a_known_model_is_of_its_filter(clip_folder, monkeypatch):
    """Stored scores by the bicubic filter are not taken for those by the bilinear one."""
    small = open_clip.create_model(f"local-dir:{clip_folder}")
    monkeypatch.setattr(reranking, "load_open_clip", lambda model, tag, key: small)
    hashes = []
    for filter in ("bicubic", "bilinear"):
        small.visual.preprocess_cfg["interpolation"] = filter
        hashes.append(reranking.Reranker("ViT-L-14/laion2b_s32b_b82k", "cpu").hash())
    assert hashes[0] != hashes[1]


def test_embeddings_that_are_not_finite_are_refused(clip_folder, tmp_path):
    """By their similarities, which compare as false, each image would find its own caption."""
    shutil.copytree(clip_folder, tmp_path, dirs_exist_ok=True)
    (weights,) = tmp_path.glob("*.safetensors")
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(weights).items()}, weights)
    reranker = reranking.Reranker(str(tmp_path), "cpu", "--retrieval")
    says = re.escape(f"--retrieval: {tmp_path}: gives embeddings that are not finite; check its weights")
    with pytest.raises(ValueError, match=says):
        reranker.embed_captions(["a star"])
    with pytest.raises(ValueError, match=says):
        reranker.embed_images(np.zeros((1, *reranker.size, 3), np.uint8))


def test_images_of_another_size_are_resized_as_pillow_does_it(clip_folder):
    """Bicubic, of all pixels and not of every third one, and with no value beyond black or white."""
    reranker = reranking.Reranker(str(clip_folder), "cpu")
    side = reranker.size[0]

    def resized(pixels):
        found = reranker._prepare(torch.from_numpy(pixels)[None])[0] * reranker.std + reranker.mean
        return 255 * found.permute(1, 2, 0).numpy()

    grey = np.random.default_rng(0).integers(64, 192, (3 * side, 3 * side, 3), dtype=np.uint8)
    expected = np.asarray(Image.fromarray(grey).resize((side, side), Image.Resampling.BICUBIC))
    assert abs(resized(grey) - expected).max() < 1.5  # Pillow rounds rows, then columns
    edges = 255 * np.random.default_rng(0).integers(0, 2, (side - 3, side - 3, 3), dtype=np.uint8)
    assert -0.01 < resized(edges).min() < 0.01 and 254.99 < resized(edges).max() < 255.01
