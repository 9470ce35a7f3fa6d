"""The encode job with a dVAE: tokens of several crops, with the same guarantees as for latents."""

import json

import numpy as np
import pytest
import torch

from data.crops import transformer_crop
from data.encoded.manifest import Manifest
from data.sources.filters import Filter
from data.sources.tars import TarSource
from data.transforms import resize
from precompute.config import TOKEN_ENCODERS, EncodeConfig
from precompute.encode import main
from precompute.encoding.writer import ShardWriter
from recipes.config.build import encoders_of
from recipes.config.components import COMPONENTS
from recipes.config.recipe import ConfigError, load_config
from recipes.encoders import base
from recipes.encoders.dvae import DVAEEncoder, dvae
from recipes.encoders.vae import KLVae
from recipes.models.dvae.files import load_dvae, save_dvae

BAD = {"00001_000", "00001_002", "00002_001"}


@pytest.fixture(scope="module")
def token_keys(dvae_folder) -> dict:
    """The keys of an encode YAML that makes tokens of three crops."""
    encoder = {"name": "dvae", "path": str(dvae_folder)}
    return {"resolutions": [32, 24], "crop": "transformer", "crops": 3, "image_encoder": encoder}


@pytest.fixture
def token_recipe(write_recipe, token_keys, tmp_path):
    """Writes an encode YAML that makes tokens, with changed keys, and returns its path."""
    return lambda **changes: write_recipe(tmp_path, **token_keys | changes)


@pytest.fixture(scope="module")
def encoded_tokens(tmp_path_factory, write_recipe, token_keys):
    """A set of tokens, encoded by one process without workers."""
    folder = tmp_path_factory.mktemp("encoded_tokens")
    main([write_recipe(folder, **token_keys)])
    return folder / "out" / "train"


def assert_same(one: list[dict], other: list[dict]) -> None:
    """The sets are equal, in the same order, tokens included: no two codes here are so close that rounding decides."""
    assert [s["key"] for s in one] == [s["key"] for s in other]
    for left, right in zip(one, other, strict=True):
        assert left.keys() == right.keys()
        assert all(np.array_equal(left[name], right[name]) for name in left)


def test_columns_hold_the_tokens_of_each_crop(encoded_tokens, read, tars, dvae_folder):
    samples = read(encoded_tokens)
    assert len(samples) == 12 and not BAD & {sample["key"] for sample in samples}
    network = load_dvae(dvae_folder)
    source = TarSource(urls=f"{tars}/*.tar")
    raw = {s.key: s for shard in source.shards() for s in source.read(shard)}
    different = 0
    for sample in samples:
        assert set(sample) == {"key", "caption", "width", "height", "crop_32", "tokens_32", "crop_24", "tokens_24"}
        decoded = Filter().decode(raw[sample["key"]])
        assert sample["caption"] == raw[sample["key"]].caption
        for resolution, side in (32, 4), (24, 3):
            tokens, boxes = sample[f"tokens_{resolution}"], sample[f"crop_{resolution}"]
            assert tokens.dtype == np.uint16 and tokens.shape == (3, side**2)
            assert boxes.dtype == np.float32 and boxes.shape == (3, 4)
            squares = [resize(decoded.image, b, resolution, decoded.original_size, area=True) for b in boxes.tolist()]
            pixels = torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).float() / 255
            expected = network.tokens(pixels).flatten(1)
            # Boxes are stored in fp32: one pixel in a thousand differs by one.
            assert (expected.numpy() == tokens).mean() > 0.9
            different += len(np.unique(boxes, axis=0))
    # Crops depend on the address of the tars, too, which is new in each run: 68.5 of the 72 differ, give or take 2.4.
    assert different > len(samples) * 2 * 2
    assert len(np.unique(np.stack([s["tokens_32"] for s in samples]))) > 8


def test_crops_are_those_of_the_paper(encoded_tokens, read):
    for sample in read(encoded_tokens):
        size = sample["width"], sample["height"]
        for left, top, right, bottom in sample["crop_32"]:
            assert 0 <= left < right <= size[0] + 1e-4 and 0 <= top < bottom <= size[1] + 1e-4
            assert right - left == pytest.approx(bottom - top, rel=1e-5)
            assert min(size) * 32 / 36 - 1e-3 <= right - left <= min(size) + 1e-3  # a side of R out of R to 9/8 R
    rng = np.random.default_rng(0)
    assert transformer_crop((49, 36), 32, rng) != transformer_crop((49, 36), 32, rng)


def test_manifest(encoded_tokens, dvae_folder):
    manifest = Manifest.read(encoded_tokens)
    encoder = dvae(path=str(dvae_folder))
    manifest.check(kind="tokens", resolution=32, side=4, codes=32, crops=3, crop="transformer", dtype="uint16")
    manifest.check(resolution=24, side=3, downsample=8, image_weights=encoder.weights_hash)
    assert manifest.text_encoder is None and manifest.latents == {} and manifest.upscaled == {"32": 0, "24": 0}
    assert manifest.rejected == {"broken_image": 1, "empty_caption": 1, "too_small": 1}
    assert not (encoded_tokens / "null_text.npy").exists()
    images, texts = encoders_of(manifest)
    assert isinstance(images, DVAEEncoder) and images.codes == 32 and texts is None
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    tokens = images.logits(pixels).argmax(1)
    assert images.decode(tokens).shape == (2, 3, 16, 16) and images.decode(tokens).min() >= 0


def test_batches_and_workers_change_nothing(encoded_tokens, read, token_recipe, tmp_path):
    main([token_recipe(batch=5, workers=2, compression="zstd", filter={"name": "pictures", "boilerplate": ["never"]})])
    assert_same(read(encoded_tokens), read(tmp_path / "out" / "train"))


def test_captions_are_rejected_with_their_reason(token_recipe, tmp_path):
    rules = {"min_caption_words": 3, "boilerplate": [r"a picture of [0-2] \w+"], "max_boilerplate": 0.4}
    main([token_recipe(resolutions=[32], workers=1, filter={"name": "pictures", **rules})])
    out = tmp_path / "out" / "train"
    manifest = Manifest.read(out)
    # The caption is judged before the image. Two of the images are also too small or broken.
    assert manifest.rejected == {"boilerplate": 8, "empty_caption": 1}
    rows = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [row["key"] for row in rows if row["reason"] == "boilerplate"][0] == "00000_000"
    assert rows[0]["detail"] == "0.70 of the characters"
    assert manifest.filter == {"name": "pictures", **rules}


def test_more_crops_begin_with_the_same(encoded_tokens, read, token_recipe, tmp_path):
    main([token_recipe(crops=4, resolutions=[32])])
    for few, many in zip(read(encoded_tokens), read(tmp_path / "out" / "train"), strict=True):
        np.testing.assert_array_equal(few["tokens_32"], many["tokens_32"][:3])


@pytest.mark.parametrize(("crop", "crops"), [("random", 2), ("center", 1), ("dvae", 2)])
def test_other_crops(read, token_recipe, tmp_path, crop, crops):
    main([token_recipe(resolutions=[32], crop=crop, crops=crops, upscale=True)])
    samples = read(tmp_path / "out" / "train")
    boxes = np.stack([sample["crop_32"] for sample in samples])
    assert boxes.shape == (13, crops, 4) and samples[0]["tokens_32"].shape == (crops, 16)
    assert Manifest.read(tmp_path / "out" / "train").upscaled == {"32": 1}
    side, short = boxes[:, :, 2] - boxes[:, :, 0], np.array([[min(s["width"], s["height"])] for s in samples])
    assert (side == short).all() if crop != "dvae" else (side <= short + 1e-3).all()
    assert crops == 1 or (boxes[:, 0] != boxes[:, 1]).any()


def test_interrupted_job_goes_on_where_it_stopped(encoded_tokens, read, token_recipe, tmp_path, monkeypatch, capsys):
    path, out = token_recipe(), tmp_path / "out" / "train"
    finish = ShardWriter.finish

    def killed(self):
        if self.shard.startswith("00001"):
            raise KeyboardInterrupt
        return finish(self)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", killed)
        with pytest.raises(SystemExit):
            main([path])
    done = {file.parent.name: file.stat().st_mtime_ns for file in out.glob("shards/*/done.json")}
    assert len(done) == 1 and not (out / "manifest.json").exists()
    main([path])
    now = {file.parent.name: file.stat().st_mtime_ns for file in out.glob("shards/*/done.json")}
    assert done.items() <= now.items() and len(now) == 3
    assert_same(read(encoded_tokens), read(out))
    capsys.readouterr()
    main([path])
    assert "already complete" in capsys.readouterr().out


def test_ranks_share_the_shards(encoded_tokens, read, token_recipe, tmp_path, monkeypatch):
    path = token_recipe()
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        for rank in "01":
            patch.setenv("RANK", rank)
            main([path])
    assert_same(read(encoded_tokens), read(tmp_path / "out" / "train"))


@pytest.mark.parametrize(
    ("field", "override"),
    [("crops", "crops=2"), ("crop", "crop=dvae"), ("seed", "seed=18"), ("resolutions", "resolutions=[32]")],
)
def test_a_folder_of_other_options_is_refused(encoded_tokens, capsys, field, override):
    with pytest.raises(SystemExit):
        main([str(encoded_tokens.parents[1] / "encode.yaml"), override])
    error = capsys.readouterr().err
    assert f"made with {field} " in error and "give another `out`" in error and len(error.splitlines()) == 1


def test_another_dvae_is_refused(encoded_tokens, dvae_folder, tmp_path, capsys):
    network = load_dvae(dvae_folder)
    with torch.no_grad():
        network.encoder.blocks.output.conv.b += 0.1
    save_dvae(network, tmp_path / "retrained")
    with pytest.raises(SystemExit):
        main([str(encoded_tokens.parents[1] / "encode.yaml"), f"image_encoder.path={tmp_path / 'retrained'}"])
    assert "made with image_weights" in capsys.readouterr().err


def test_logits_that_are_not_finite_are_encoded_again_in_fp32(
    encoded_tokens, read, token_recipe, dvae_folder, tmp_path, monkeypatch
):
    """The logits of one image are NaN in the precision in use, those of another also in fp32."""
    logits, seen = DVAEEncoder.logits, {}

    def spoilt(self, images, exact=False):
        found = logits(self, images, exact)
        for row, image in enumerate(images):
            number = seen.setdefault(image.sum().item(), len(seen))
            if number == 9 or (number == 2 and not exact):
                found[row, 5, 0, 0] = float("nan")
        return found

    monkeypatch.setattr(DVAEEncoder, "logits", spoilt)
    monkeypatch.setitem(base.DTYPES, "bf16", torch.float32)  # a different name for the same number format
    encoder = {"name": "dvae", "path": str(dvae_folder), "precision": "bf16"}
    main([token_recipe(resolutions=[32], crops=1, image_encoder=encoder)])
    out = tmp_path / "out" / "train"
    manifest = Manifest.read(out)
    assert (manifest.samples, manifest.reencoded, manifest.rejected["nonfinite_latent"]) == (11, 1, 1)
    rows = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    (lost,) = [row["key"] for row in rows if row["reason"] == "nonfinite_latent"]
    kept = {s["key"]: s for s in read(encoded_tokens) if s["key"] != lost}
    for sample in read(out):
        np.testing.assert_array_equal(sample["tokens_32"], kept.pop(sample["key"])["tokens_32"][:1])
    assert not kept


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precisions(dvae_folder, precision):
    encoder = dvae(path=str(dvae_folder), precision=precision).to("cpu")
    pixels = torch.randint(0, 256, (1, 2, 16, 16, 3), dtype=torch.uint8)
    head = load_dvae(dvae_folder).encoder.blocks.output.conv.w
    assert torch.equal(encoder.module.encoder.blocks.output.conv.w, head)  # fp32 in every precision
    assert encoder.module.encoder.blocks.input.w.dtype == base.DTYPES[precision]
    stored = encoder.store(pixels)
    assert stored.arrays["tokens"].shape == (1, 2, 4) and stored.finite.all() and stored.sums is None
    exact = encoder.store(pixels, exact=True)
    network = load_dvae(dvae_folder)
    expected = network.tokens(pixels[0].permute(0, 3, 1, 2).float() / 255).flatten(1)
    assert (exact.arrays["tokens"][0] == expected).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gpu_gives_nearly_the_same_tokens(dvae_folder, precision):
    torch.backends.cudnn.allow_tf32 = False
    pixels = torch.randint(0, 256, (8, 2, 32, 32, 3), dtype=torch.uint8)
    expected = dvae(path=str(dvae_folder)).store(pixels).arrays["tokens"]
    found = dvae(path=str(dvae_folder), precision=precision).to("cuda").store(pixels.cuda())
    share = (found.arrays["tokens"].cpu() == expected).float().mean()
    assert found.finite.all()
    assert share > (0.99 if precision == "fp32" else 0.9)  # rounding can choose the other of two close codes


def test_too_many_codes(dvae_folder, monkeypatch):
    network = load_dvae(dvae_folder)
    network.codes = 70_000
    monkeypatch.setattr("recipes.encoders.dvae.load_dvae", lambda folder: network)
    with pytest.raises(ValueError, match="70000 codes; the stored format, uint16, holds at most 65,536"):
        dvae(path=str(dvae_folder))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["text_encoder={name: open_clip_text}"], "text_encoder: `dvae` makes tokens, whose captions are encoded"),
        (["crops=0"], "crops: 0; give 1 or more"),
        (["crop=center"], "crop: center is the same square for all 3 crops"),
        (["image_encoder={name: kl_vae, path: a/b}"], "text_encoder: missing; `kl_vae` makes latents, which need"),
        (["image_encoder={name: kl_vae, path: a/b}"], "crop: transformer is for tokens, `kl_vae` makes latents"),
        (["image_encoder={name: kl_vae, path: a/b}"], "crops: 3; `kl_vae` makes latents, of one crop per image"),
    ],
)
def test_what_does_not_go_together_is_named(token_recipe, overrides, message):
    with pytest.raises(ConfigError) as error:
        load_config(token_recipe(), overrides, EncodeConfig)
    assert any(message in line for line in error.value.lines)


def test_kinds_of_encoders_are_known_before_they_are_imported():
    from recipes.config.build import import_builder
    from recipes.config.values import Component

    kinds = {"kl_vae": KLVae.kind, "dvae": DVAEEncoder.kind}
    assert kinds.keys() == COMPONENTS["image_encoder"].keys()
    for name, target in COMPONENTS["image_encoder"].items():
        assert (kinds[name] == "tokens") == (name in TOKEN_ENCODERS)
        assert callable(import_builder(Component("image_encoder", name, {}, target, "")))
