"""The encode job as a command: what it writes, and what interruptions, ranks and changed options do to it."""

import json
import shutil
import threading

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image

from benchmarks.killing import digests
from data.encoded.manifest import Manifest
from data.sources.dalle_filter import dalle
from data.sources.filters import Filter
from data.sources.tars import TarSource
from data.transforms import crop_box, resize_and_crop
from precompute.encode import main
from precompute.encoding import job as job_module
from precompute.encoding.writer import ShardWriter
from precompute.output.output_set import OutputSet
from precompute.output.upload import Uploads
from recipes.encoders import base
from recipes.encoders.vae import KLVae
from tests.precompute.encode_checks import ULP, assert_same, expect_error
from tests.recipes.encoders.own_words import give_tokenizer


def by_key(samples: list[dict]) -> dict[str, dict]:
    return {sample["key"]: sample for sample in samples}


def test_columns_hold_the_output_of_the_encoders(encoded, read, vae_folder, encoders, tars):
    samples = read(encoded)
    bad = {"00001_000", "00001_002", "00002_001"}
    keys = [f"{shard:05d}_{number:03d}" for shard in range(3) for number in range(5)]
    assert [s["key"] for s in samples] == [key for key in keys if key not in bad]

    vae = AutoencoderKL.from_pretrained(vae_folder)
    source = TarSource(urls=f"{tars}/*.tar")
    raw = {s.key: s for shard in source.shards() for s in source.read(shard)}
    sample = samples[3]
    assert set(sample) == {"key", "caption", "width", "height", "text"} | {
        f"{name}_{resolution}" for name in ("crop", "mean", "std") for resolution in (16, 32)
    }
    decoded = Filter().decode(raw[sample["key"]])
    assert sample["caption"] == "a picture of 3 things in box 0"
    assert (sample["width"], sample["height"]) == decoded.original_size == (49, 36)
    for resolution in (16, 32):
        pixels, box = resize_and_crop(decoded.image, resolution), crop_box(decoded.original_size, resolution, "center")
        assert sample[f"crop_{resolution}"].dtype == np.int32 and tuple(sample[f"crop_{resolution}"]) == box
        x = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        with torch.no_grad():
            posterior = vae.encode(x).latent_dist
        for name, expected in (("mean", (posterior.mean - 0.25) * 0.5), ("std", posterior.std * 0.5)):
            stored = sample[f"{name}_{resolution}"]
            assert stored.dtype == np.float16 and stored.shape == (4, resolution // 2, resolution // 2)
            np.testing.assert_allclose(stored, expected[0].numpy(), atol=ULP)
    assert sample["text"].dtype == np.float16 and sample["text"].shape == (12, 16)
    np.testing.assert_allclose(sample["text"], encoders[1].encode([sample["caption"]])[0].numpy(), atol=ULP)
    assert np.abs(sample["text"] - samples[4]["text"]).max() > 0.1  # captions differ, and so do their embeddings


def test_null_caption_is_the_empty_text(encoded, encoders):
    null = np.load(encoded / "null_text.npy", allow_pickle=False)
    assert null.dtype == np.float16
    np.testing.assert_allclose(null, encoders[1].encode([""])[0].numpy(), atol=ULP)
    assert np.abs(null).max() > 0.1  # not zeros


def test_manifest_and_rejected(encoded, read, encoders, clip_folder):
    manifest = Manifest.read(encoded)
    manifest.check(resolution=16, channels=4, downsample=2, text_width=16, text_length=12, scaling_factor=0.5)
    manifest.check(image_weights=encoders[0].weights_hash, text_weights=encoders[1].weights_hash, dtype="float16")
    assert manifest.latent_shape(32) == (4, 16, 16) and manifest.text_shape == (12, 16)
    assert manifest.image_encoder["component"]["name"] == "kl_vae"
    assert manifest.text_encoder["component"]["path"] == str(clip_folder)
    assert (manifest.samples, manifest.shards, manifest.reencoded) == (12, 3, 0)
    assert manifest.upscaled == {"16": 0, "32": 0}
    assert manifest.rejected == {"broken_image": 1, "empty_caption": 1, "too_small": 1}
    assert manifest.bytes == sum(file.stat().st_size for file in encoded.glob("shards/*/*.mds"))
    rows = [json.loads(line) for line in (encoded / "rejected.jsonl").read_text().splitlines()]
    assert [(row["key"], row["reason"]) for row in rows] == [
        ("00001_000", "too_small"), ("00001_002", "empty_caption"), ("00002_001", "broken_image"),
    ]  # fmt: skip
    samples = read(encoded)
    for resolution in (16, 32):
        mean = np.stack([s[f"mean_{resolution}"] for s in samples]).astype(float).swapaxes(0, 1).reshape(4, -1)
        std = np.stack([s[f"std_{resolution}"] for s in samples]).astype(float).swapaxes(0, 1).reshape(4, -1)
        found = manifest.latents[str(resolution)]
        np.testing.assert_allclose(found["mean"], mean.mean(1), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found["std"], mean.std(1), rtol=1e-6)
        np.testing.assert_allclose(found["sample_std"], np.sqrt(mean.var(1) + (std**2).mean(1)), rtol=1e-6)


def test_batches_workers_and_compression_change_nothing(encoded, read, recipe, tmp_path):
    main([recipe(batch=5, workers=2, compression="zstd", hashes=["xxh64"], size_limit="8kb")])
    out = tmp_path / "out" / "train"
    assert len(list(out.glob("shards/*/*.mds.zstd"))) > 3 and not list(out.glob("shards/*/*.mds"))
    assert_same(read(encoded), read(out))
    assert Manifest.read(out).latents.keys() == {"16", "32"}


def test_more_workers_than_shards_keep_the_order(encoded, read, recipe, tmp_path, tars):
    one = {"train": {"name": "tars", "urls": f"{tars}/00001.tar"}}
    main([recipe(sources=one, workers=2, batch=2, resolutions=[16, 32])])
    assert_same([s for s in read(encoded) if s["key"].startswith("00001")], read(tmp_path / "out" / "train"))


def test_interrupted_job_continues_where_it_stopped(encoded, read, recipe, tmp_path, tars, monkeypatch, capsys):
    path = recipe()
    out = tmp_path / "out" / "train"
    finish = ShardWriter.finish

    def killed(self):
        if self.shard.startswith("00001"):
            raise KeyboardInterrupt
        return finish(self)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "finish", killed)
        with pytest.raises(SystemExit) as end:
            main([path])
    assert end.value.code == 130 and "encode: interrupted; start it again" in capsys.readouterr().out
    done = {file.parent.name: file.stat().st_mtime_ns for file in out.glob("shards/*/done.json")}
    assert done and all(name.startswith("00000") for name in done)
    assert not (out / "index.json").exists() and not (out / "manifest.json").exists()
    # The job can also be started again after its process was killed, when nothing removes the unfinished folder.
    partial = out / "shards" / f"{TarSource(urls=f'{tars}/00001.tar').shards()[0]}.tmp-0"
    partial.mkdir(exist_ok=True)
    (partial / "shard.00000.mds").write_bytes(b"half")
    main([path])
    now = {file.parent.name: file.stat().st_mtime_ns for file in out.glob("shards/*/done.json")}
    assert done.items() <= now.items() and len(now) == 3
    assert_same(read(encoded), read(out))
    assert not list(out.glob("shards/*.tmp-*"))
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file()}
    capsys.readouterr()
    main([path])
    assert "already complete" in capsys.readouterr().out
    assert before == {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file()}


def test_the_next_shard_is_encoded_while_one_is_published(recipe, tmp_path, monkeypatch):
    """Its way to the disk takes a while."""
    publish, add = OutputSet.publish, ShardWriter.add
    encoded, events = threading.Event(), []

    def slow(self, shard, rank):
        if shard.startswith("00000"):
            events.append(encoded.wait(20))
        publish(self, shard, rank)
        events.append(shard[:5])

    def noted(self, number, sample):
        add(self, number, sample)
        if self.shard.startswith("00001") and number == 4:
            encoded.set()

    monkeypatch.setattr(OutputSet, "publish", slow)
    monkeypatch.setattr(ShardWriter, "add", noted)
    main([recipe(batch=2)])
    assert events == [True, "00000", "00001", "00002"]
    assert Manifest.read(tmp_path / "out" / "train").shards == 3


def test_ranks_share_the_shards(encoded, read, recipe, tmp_path, monkeypatch, capsys):
    path = recipe(take_over=False)
    out = tmp_path / "out" / "train"
    with monkeypatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("RANK", "2")
        assert "RANK is 2 of WORLD_SIZE 2" in expect_error([path], capsys)
        patch.setenv("RANK", "0")
        main([path])
        assert len(list(out.glob("shards/*/done.json"))) == 2 and not (out / "manifest.json").exists()
        assert "1 of 3 shards are left to other ranks" in capsys.readouterr().out
        patch.setenv("RANK", "1")
        main([path])
    assert_same(read(encoded), read(out))
    first, second = Manifest.read(encoded), Manifest.read(out)
    assert (first.samples, first.rejected) == (second.samples, second.rejected)
    for resolution, moments in first.latents.items():
        for name, values in moments.items():
            np.testing.assert_allclose(second.latents[resolution][name], values, atol=ULP)


@pytest.mark.parametrize(
    ("field", "override"),
    [
        ("resolutions", "resolutions=[32]"),
        ("text_layer", "text_encoder.layer=last"),
        ("filter", "filter={name: pictures, min_side: 30}"),
        ("image_precision", "image_encoder.precision=bf16"),
        ("source", "sources.train.caption=json:n"),
    ],
)
def test_a_folder_of_other_options_is_refused(encoded, capsys, field, override):
    arguments = [str(encoded.parents[1] / "encode.yaml"), override]
    before = (encoded / "index.json").read_bytes()
    error = expect_error(arguments, capsys)
    assert f"made with {field} " in error and "give another `out`" in error
    dry = field in ("resolutions", "filter", "source")  # what is known without the encoders
    assert not dry or expect_error([*arguments, "--dry-run"], capsys) == error
    (encoded / "options.json").rename(encoded / "kept.json")  # the finished shards hold the options too
    try:
        assert f"made with {field} " in expect_error(arguments, capsys)
        assert not dry or expect_error([*arguments, "--dry-run"], capsys) == error
        assert not (encoded / "options.json").exists()
    finally:
        (encoded / "kept.json").rename(encoded / "options.json")
    assert (encoded / "index.json").read_bytes() == before


def test_all_sets_of_other_options_are_named_at_once(recipe, tmp_path, tars, capsys):
    """Each deleted folder was followed by the refusal of the next one."""
    files = {"train": "00000.tar", "val": "00001.tar", "more": "00002.tar"}
    sources = {label: {"name": "tars", "urls": f"{tars}/{file}"} for label, file in files.items()}
    main([recipe(resolutions=[16], sources=sources)])
    changed = {label: {**keys, "caption": "json:n"} for label, keys in sources.items() if label != "more"}
    path = recipe(resolutions=[16], sources=sources | changed)
    error = expect_error([path], capsys)
    assert [f"{tmp_path}/out/{label}: holds values" in error for label in sources] == [True, True, False]
    assert expect_error([path, "--dry-run"], capsys) == error


def test_other_rules_of_the_filter_are_refused_while_a_set_is_incomplete(recipe, tmp_path, capsys, monkeypatch):
    path, out = recipe(resolutions=[16], filter={"name": "dalle", "min_side": 16}), tmp_path / "out" / "train"
    main([path])
    monkeypatch.setattr(dalle, "version", "new")
    main([path])
    assert "already complete" in capsys.readouterr().out
    main([path, "--dry-run"])
    assert "3 done, 0 to do" in capsys.readouterr().out
    (out / "index.json").unlink()
    error = expect_error([path], capsys)
    assert "made with filter_version 1, this job has new" in error and "give another `out`" in error
    assert expect_error([path, "--dry-run"], capsys) == error
    options = json.loads((out / "options.json").read_text())  # of a version that did not write it down
    (out / "options.json").write_text(json.dumps({k: v for k, v in options.items() if k != "filter_version"}))
    main([path, "--dry-run"])


def test_another_tokenizer_is_refused_while_a_set_is_incomplete(recipe, tmp_path, clip_folder, capsys):
    """The shards that were left had other tokens for the same captions than those that were done."""
    shutil.copytree(clip_folder, tmp_path / "clip")
    give_tokenizer(tmp_path / "clip", ["a", "red", "navy"])
    path = recipe(resolutions=[16], text_encoder={"name": "open_clip_text", "path": str(tmp_path / "clip")})
    main([path])
    (tmp_path / "out" / "train" / "index.json").unlink()
    main([path, "--dry-run"])
    give_tokenizer(tmp_path / "clip", ["a", "navy", "red"])
    error = expect_error([path], capsys)
    assert "made with tokenizer_files " in error and "give another `out`" in error
    assert expect_error([path, "--dry-run"], capsys) == error


def test_changed_weights_are_refused(recipe, tmp_path, vae_folder, capsys):
    path = recipe(resolutions=[16])
    main([path])
    vae = AutoencoderKL.from_pretrained(vae_folder)
    with torch.no_grad():
        vae.quant_conv.bias += 0.1
    vae.save_pretrained(tmp_path / "retrained")
    assert "made with image_weights" in expect_error([path, f"image_encoder.path={tmp_path / 'retrained'}"], capsys)
    # Weights that open_clip puts into a model of another activation.
    text = "text_encoder={path: null, model: ViT-L-14, pretrained: openai}"
    assert "text_encoder: ViT-L-14 has another activation" in expect_error([path, text], capsys)


def test_values_that_are_not_finite_are_encoded_again_in_fp32(encoded, read, recipe, vae_folder, tmp_path, monkeypatch):
    """The bf16 results of two images are not finite; those of a third image are not finite in fp32 either."""
    encode = KLVae.encode

    def spoilt(self, images, exact=False):
        mean, std = encode(self, images, exact)
        for row, image in enumerate(images):
            brightness = image[:, 0, 0].sum().item()
            if brightness in never or (brightness in once and not exact):
                mean[row, 0, 0, 0] = float("nan") if row % 2 else 1e6  # 1e6 is finite, but not in float16
        return mean, std

    corners = {}
    good = read(encoded)

    def record(self, images, exact=False):
        for image in images:
            corners.setdefault(len(corners), image[:, 0, 0].sum().item())
        return encode(self, images, exact)

    monkeypatch.setattr(KLVae, "encode", record)
    main([recipe(resolutions=[32], out=str(tmp_path / "plain"))])
    assert len(set(corners.values())) == len(corners) == 12
    once, never = {corners[2], corners[3]}, {corners[7]}
    monkeypatch.setattr(KLVae, "encode", spoilt)
    image_encoder = {"name": "kl_vae", "path": str(vae_folder), "precision": "bf16"}
    main([recipe(resolutions=[32], image_encoder=image_encoder)])
    out = tmp_path / "out" / "train"
    manifest = Manifest.read(out)
    assert (manifest.samples, manifest.reencoded, manifest.rejected["nonfinite_latent"]) == (11, 2, 1)
    found = by_key(read(out))
    assert good[7]["key"] not in found
    for sample in good[2], good[3]:
        np.testing.assert_allclose(found[sample["key"]]["mean_32"], sample["mean_32"], atol=ULP)
    assert all(np.isfinite(s[name]).all() for s in found.values() for name in ("mean_32", "std_32", "text"))
    assert np.isfinite(manifest.latents["32"]["sample_std"]).all()
    rows = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert {"key": good[7]["key"], "reason": "nonfinite_latent"}.items() <= next(
        row for row in rows if row["reason"] == "nonfinite_latent"
    ).items()


def test_encoders_get_as_many_rows_in_every_batch_of_every_start(recipe, tmp_path, monkeypatch):
    """Kernels, and with them the last bits, depend on that number."""
    encode, shapes = KLVae.encode, set()

    def record(self, images, exact=False):
        shapes.add(tuple(images.shape))
        return encode(self, images, exact)

    monkeypatch.setattr(KLVae, "encode", record)
    out = tmp_path / "out"
    main([recipe(batch=8, workers=0)])  # 12 images
    whole = digests(out)
    for shard in sorted((out / "train" / "shards").iterdir())[1:2]:  # as after a kill
        shutil.rmtree(shard)
    (out / "train" / "index.json").unlink()
    main([recipe(batch=8, workers=0)])
    assert shapes == {(8, 3, 16, 16), (8, 3, 32, 32)}
    assert digests(out) == whole


def test_a_weight_beyond_float16_is_encoded_in_fp32(vae_folder, tmp_path, monkeypatch):
    vae = AutoencoderKL.from_pretrained(vae_folder)
    with torch.no_grad():
        vae.quant_conv.bias[0] = 1e5  # infinite in float16; the normalised latent, 5e4, is not
    vae.save_pretrained(tmp_path / "vae")
    monkeypatch.setitem(base.DTYPES, "bf16", torch.float16)  # fp16 proper falls back to fp32 on a CPU
    from precompute.encoding.encodings import encode
    from recipes.encoders.vae import kl_vae

    class Texts:
        device = torch.device("cpu")

        def embed(self, tokens, exact):
            return torch.zeros(len(tokens), 1, 1)

    images = kl_vae(path=str(tmp_path / "vae"), precision="bf16").to("cpu")
    pixels = {16: torch.randint(0, 256, (2, 1, 16, 16, 3), dtype=torch.uint8)}
    half = encode(pixels, torch.zeros(2, 1, dtype=torch.int64), images, Texts())
    assert next(images.module.parameters()).dtype == torch.float16 and not half.image_ok.any()
    exact = encode(pixels, torch.zeros(2, 1, dtype=torch.int64), images, Texts(), exact=True)
    assert exact.image_ok.all() and 4e4 < exact.images[16].arrays["mean"][:, 0].min() < 6e4


def test_random_crops_are_reproducible_and_small_images_can_be_enlarged(read, recipe, tmp_path):
    for name, workers, batch in ("one", 0, 4), ("two", 2, 3):
        main([recipe(out=str(tmp_path / name), crop="random", upscale=True, workers=workers, batch=batch)])
    one, two = read(tmp_path / "one" / "train"), read(tmp_path / "two" / "train")
    assert_same(one, two)
    assert len(one) == 13 and Manifest.read(tmp_path / "one" / "train").upscaled == {"16": 0, "32": 1}
    assert any(s["crop_32"][0] != (s["width"] - min(s["width"], s["height"])) // 2 for s in one)
    for sample in one:
        left, top, right, bottom = sample["crop_16"]
        assert 0 <= left < right <= sample["width"] and 0 <= top < bottom <= sample["height"]
        assert (sample["crop_16"] == sample["crop_32"]).all()


def test_several_sources_make_several_sets(read, recipe, tmp_path, tars, monkeypatch):
    monkeypatch.setattr(Uploads, "add", lambda *_: pytest.fail("no copy of these sets is made"))
    urls = {"train": f"{tars}/{{00000..00001}}.tar", "val": f"{tars}/00002.tar"}
    sources = {label: {"name": "tars", "urls": url} for label, url in urls.items()}
    main([recipe(sources=sources, resolutions=[32])])
    assert len(read(tmp_path / "out" / "train")) == 8 and len(read(tmp_path / "out" / "val")) == 4


def test_captions_that_are_too_long_are_counted(recipe, tmp_path, capsys):
    """The text encoder reads 12 tokens, of which two mark the begin and the end."""
    for number, words in enumerate((1, 9, 10, 500)):
        Image.new("RGB", (40, 40)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(" ".join(["a"] * words))
    main([recipe(sources={"train": {"name": "folder", "path": str(tmp_path)}}, batch=3)])
    said = "encode: rank 0: 2 captions fill the 12 tokens of the text encoder, or were cut to them\n"
    assert said in capsys.readouterr().out


def test_a_set_without_an_image_is_an_error(recipe, capsys):
    error = expect_error([recipe(filter={"name": "pictures", "min_side": 5000})], capsys)
    assert "nothing was encoded (empty_caption 1, too_small 14)" in error
    assert "delete this folder before you encode again" in error  # what was rejected is not read again


def test_who_is_told_to_delete_a_set_is_told_to_keep_its_scores(recipe, tmp_path, capsys):
    """They lie in its folder by default, and the job that leaves pairs out by them needs them."""
    main([recipe()])
    scores = tmp_path / "out" / "train" / "scores"
    scores.mkdir()
    assert expect_error([recipe(resolutions=[32])], capsys).endswith(
        f"or delete the folder to encode again, but keep {scores}"
    )
    main([recipe()])
    assert f"delete it to encode again, but keep {scores}\n" in capsys.readouterr().out


def test_a_set_without_an_image_does_not_hold_up_the_others(read, recipe, tmp_path, tars, capsys):
    (tmp_path / "broken").mkdir()
    for name in ("0.png", "0.txt"):
        (tmp_path / "broken" / name).write_text("no picture")
    sources = {
        "broken": {"name": "folder", "path": str(tmp_path / "broken")},
        "train": {"name": "tars", "urls": f"{tars}/00002.tar"},
    }
    error = expect_error([recipe(sources=sources, resolutions=[32])], capsys)
    assert "broken: nothing was encoded (broken_image 1)" in error
    assert len(read(tmp_path / "out" / "train")) == 4


def test_a_resolution_that_the_encoder_does_not_divide(recipe, capsys):
    assert "resolutions: 17 is not a multiple of 2" in expect_error([recipe(resolutions=[17])], capsys)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert job_module.pick_device("auto", 3) == torch.device("cpu")
    with pytest.raises(ValueError, match="device: gpu was asked for, and PyTorch sees none"):
        job_module.pick_device("gpu", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="device: process 2 of .* has no GPU, as PyTorch sees 2 GPUs there"):
        job_module.pick_device("auto", 2)


def test_images_of_one_colour(encoders):
    """[0, 255] is mapped to [-1, 1] and back."""
    images = encoders[0]
    white = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    vae = images.module
    with torch.no_grad():
        direct = vae.encode(torch.ones(1, 3, 8, 8)).latent_dist.mean
        image = (vae.decode(direct).sample + 1).div(2).clamp(0, 1)
    mean, _ = images.encode(white)
    torch.testing.assert_close(mean, (direct - 0.25) * 0.5)
    torch.testing.assert_close(images.decode(mean), image)
    assert Image.fromarray((image[0].permute(1, 2, 0).numpy() * 255).astype(np.uint8)).size == (8, 8)
