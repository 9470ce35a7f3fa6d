"""precompute/verify.py on sets that the encode job made, and on copies that were damaged in one way each."""

import io
import json
import shutil
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from streaming.base.hashing import get_hash

from data.sources.tars import TarSource
from precompute.checking import verification
from precompute.checking.survey import _draw
from precompute.verify import main
from recipes.encoders.vae import KLVae, kl_vae


@pytest.fixture(scope="module")
def other_vae(tmp_path_factory, vae_folder) -> Path:
    """The same architecture with other weights."""
    import torch
    from diffusers import AutoencoderKL

    folder = tmp_path_factory.mktemp("other_vae")
    vae = AutoencoderKL.from_pretrained(vae_folder)
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    vae.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(latent_sets, tmp_path) -> Path:
    """A copy of the validation set, six samples."""
    return Path(shutil.copytree(latent_sets / "val", tmp_path / "sets" / "val"))


def verify(capsys, folder, *arguments) -> tuple[int, list[str], list[str]]:
    """(exit status, all lines, fault lines)."""
    capsys.readouterr()
    status = main([str(folder), *arguments])
    lines = capsys.readouterr().out.splitlines()
    return status, lines, [line.strip() for line in lines if line.strip().startswith("fault: ")]


def change(folder: Path, column: str, row: int, values: np.ndarray, rehash: bool) -> None:
    """Writes a column of a stored sample anew; with `rehash`, the index has the hash of the changed file."""
    from streaming.base.format import reader_from_json

    from data.encoded.column_reader import ColumnReader

    index = json.loads((folder / "index.json").read_text())
    entry = index["shards"][0]
    reader = ColumnReader(reader_from_json(str(folder), None, entry), {column: column}, ("key",))
    stored = reader.get_item(row).arrays[column].tobytes()
    path = folder / entry["raw_data"]["basename"]
    data = path.read_bytes()
    assert data.count(stored) == 1
    data = data.replace(stored, values.astype(np.float16).tobytes())
    path.write_bytes(data)
    if rehash:
        entry["raw_data"]["hashes"] = {name: get_hash(name, data) for name in entry["raw_data"]["hashes"]}
        (folder / "index.json").write_text(json.dumps(index))


def test_a_set_of_the_earlier_resampling_is_named(copy, tmp_path, capsys):
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["resampling"]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    status, _, faults = verify(capsys, copy, f"--out={tmp_path}")
    assert status == 1 and len(faults) == 1
    assert faults[0].endswith("resampling is lanczos (of an earlier version), this job has bicubic")


def test_a_set_of_latents_holds(latent_sets, tmp_path, capsys):
    status, lines, faults = verify(capsys, latent_sets / "train", "--records=12", f"--out={tmp_path}")
    assert (status, faults) == (0, []) and lines[-1] == f"  no faults; the figures are in {tmp_path}/train.json"
    values = json.loads((tmp_path / "train.json").read_text())
    assert values["samples"] == 40 and values["hashes"] == values["files"] == 4
    assert set(values["again"]) == {"batches of 1", "batches of 5", "batches of 16", "fp32"}
    for columns in values["again"].values():
        assert set(columns) == {"mean_16", "std_16", "mean_32", "std_32", "text"}
        assert all(difference["worst"] < 1e-3 for difference in columns.values())
    # Twelve pairs of 32 pixels, four pairs in a row, enlarged to 128.
    assert Image.open(tmp_path / "train.png").size[0] == 8 * (128 + 6) + 6


def test_sets_of_tokens_hold_when_the_yaml_of_their_job_is_given(token_sets, tmp_path, capsys):
    yaml = token_sets / "encode.yaml"
    status, lines, faults = verify(capsys, yaml, "--records", "5", "--out", str(tmp_path))
    assert (status, faults) == (0, [])
    for label in ("train", "val"):
        values = json.loads((tmp_path / f"{label}.json").read_text())
        assert values["again"]["fp32"]["tokens_32"]["mean"] == 0
        assert 1 < values["used"]["tokens_32"] <= 32
        assert (tmp_path / f"{label}.png").is_file()


@pytest.mark.parametrize("of_index", [False, True])
def test_a_flipped_byte_is_found(copy, tmp_path, capsys, of_index):
    path = next(copy.glob("shards/*/shard.*.mds"))
    changed = copy / "index.json" if of_index else path
    data = bytearray(changed.read_bytes())
    data[data.index(b'"xxh3_64": ') + 4 if of_index else len(data) // 2] ^= 1  # of the index: the name of a hash
    changed.write_bytes(data)
    status, _, (fault,) = verify(capsys, copy, f"--out={tmp_path / 'out'}")
    assert status == 1 and str(path) in fault and ("xxh2_64" if of_index else "xxh3_64") in fault


def test_a_lost_and_a_shortened_file_are_found(copy, tmp_path, capsys):
    path = next(copy.glob("shards/*/shard.*.mds"))
    path.write_bytes(path.read_bytes()[:-1])
    assert "the index says" in verify(capsys, copy, f"--out={tmp_path / 'out'}")[2][0]
    path.unlink()
    assert "missing" in verify(capsys, copy, f"--out={tmp_path / 'out'}")[2][0]


def test_weights_of_another_vae_are_found(copy, other_vae, tmp_path, capsys):
    status, _, (fault,) = verify(capsys, copy, f"image_encoder.path={other_vae}", f"--out={tmp_path / 'out'}")
    assert status == 1 and "image_encoder.weights_hash" in fault


def test_latents_of_another_vae_are_found_where_the_manifest_hides_it(copy, other_vae, tmp_path, capsys):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["image_encoder"]["weights_hash"] = kl_vae(path=str(other_vae)).weights_hash
    (copy / "manifest.json").write_text(json.dumps(manifest))
    status, _, faults = verify(capsys, copy, f"image_encoder.path={other_vae}", f"--out={tmp_path / 'out'}")
    ways = 4  # three batch sizes, and fp32; of four columns, those of captions are the same
    assert status == 1 and len(faults) == 4 * ways and all("relative error" in fault for fault in faults)


def test_values_that_are_not_finite_are_found(copy, tmp_path, capsys):
    change(copy, "mean_32", 2, np.full((4, 16, 16), np.nan), rehash=True)
    status, _, faults = verify(capsys, copy, f"--out={tmp_path / 'out'}")
    assert status == 1 and faults == ["fault: column mean_32: 1,024 values are not finite"]


def test_values_at_the_largest_fp16_are_found(copy, tmp_path, capsys):
    stored = np.zeros((12, 16))
    stored[3] = -65504
    change(copy, "text", 3, stored, rehash=True)
    status, _, faults = verify(capsys, copy, "--records=1", f"--out={tmp_path / 'out'}")
    assert status == 1 and faults[:1] == ["fault: column text: 16 values are at the largest fp16, 65504"]


def test_changed_latents_are_found_by_their_statistics(copy, tmp_path, capsys):
    change(copy, "mean_16", 1, np.zeros((4, 8, 8)), rehash=True)
    status, _, faults = verify(capsys, copy, f"--out={tmp_path / 'out'}")
    assert status == 1 and len(faults) == 3 and "mean of the latents at 16" in faults[0]


def test_a_changed_record_is_found_by_encoding_it_again(copy, tmp_path, capsys):
    stored = np.zeros((12, 16))
    change(copy, "text", 3, stored, rehash=True)  # the manifest has no statistics of embeddings
    status, _, faults = verify(capsys, copy, f"--out={tmp_path / 'out'}")
    assert status == 1 and len(faults) == 4 and all("column text" in fault for fault in faults)


def test_another_embedding_of_the_empty_caption_is_found(copy, tmp_path, capsys):
    null = np.load(copy / "null_text.npy")
    np.save(copy / "null_text.npy", np.zeros_like(null))
    status, _, (fault,) = verify(capsys, copy, f"--out={tmp_path / 'out'}")
    assert status == 1 and f"{copy}/null_text.npy: relative error of the empty caption's embedding" in fault


@pytest.mark.parametrize(
    "content, fault",
    [(b"no array", "the embedding of the empty caption cannot be read"), (None, "float32 (12, 16), expected finite")],
)
def test_an_embedding_of_the_empty_caption_that_is_none_is_found(copy, tmp_path, capsys, content, fault):
    path = copy / "null_text.npy"
    np.save(path, np.load(path).astype(np.float32)) if content is None else path.write_bytes(content)
    status, _, (found, *_) = verify(capsys, copy, "--records=1", f"--out={tmp_path / 'out'}")
    assert status == 1 and str(path) in found and fault in found


def test_an_archive_in_the_place_of_the_embedding_is_found(copy, tmp_path, capsys):
    with (copy / "null_text.npy").open("wb") as file:
        np.savez(file, a=np.ones(3))
    status, _, (found, *_) = verify(capsys, copy, "--records=1", f"--out={tmp_path / 'out'}")
    assert status == 1 and "the embedding of the empty caption cannot be read" in found


def test_samples_that_an_index_invents_take_no_memory():
    samples = [3_000_000, 0, 2, 3_000_000]
    entries = [{"samples": n, "raw_data": {"basename": f"shards/{i}/a.mds"}} for i, n in enumerate(samples)]
    tracemalloc.start()
    try:
        drawn = _draw(entries, 50, np.random.default_rng(0))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert sum(map(len, drawn.values())) == 50
    assert all(0 <= row < samples[number] for number, rows in drawn.items() for row in rows)
    assert _draw(entries[2:3], 50, np.random.default_rng(0)) == {0: {0, 1}}
    assert _draw(entries[1:2], 50, np.random.default_rng(0)) == _draw([], 50, np.random.default_rng(0)) == {}


def resized(image: bytes) -> bytes:
    file = io.BytesIO()
    Image.open(io.BytesIO(image)).resize((48, 32)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    "suffix, changed, fault",
    [
        (".txt", lambda caption: b"other words", "the source has 'other words'"),
        (".png", resized, "the source gives"),
        (".png", lambda image: b"no image", "rejected now as broken_image"),
    ],
)
def test_other_images_and_captions_of_the_same_keys_are_found(copy, drawings, tmp_path, capsys, suffix, changed, fault):
    (path,) = (drawings / "val").iterdir()
    (tmp_path / "moved").mkdir()
    with tarfile.open(path) as old, tarfile.open(tmp_path / "moved" / path.name, "w") as new:
        for member in old.getmembers():
            data = old.extractfile(member).read()
            if member.name.endswith(suffix):
                data = changed(data)
                member.size = len(data)
            new.addfile(member, io.BytesIO(data))
    source = f"sources.val.urls={tmp_path}/moved/*.tar"
    status, _, faults = verify(capsys, copy, source, "--records=2", f"--out={tmp_path / 'out'}")
    assert status == 1 and any(fault in line for line in faults)


def test_a_set_whose_source_has_changed_is_found(copy, drawings, tmp_path, capsys):
    source = f"sources.val.urls={drawings}/train/00000.tar"
    status, _, faults = verify(capsys, copy, source, "--records=2", f"--out={tmp_path / 'out'}")
    assert status == 1 and len(faults) == 2 and all("does not give it" in fault for fault in faults)


def test_a_source_that_cannot_be_read_any_more_is_a_fault(copy, drawings, tmp_path, capsys, monkeypatch):
    read, moved = TarSource.read, Path(shutil.copytree(drawings / "val", tmp_path / "moved"))

    def gone(self, shard):
        shutil.rmtree(moved)
        yield from read(self, shard)

    monkeypatch.setattr(TarSource, "read", gone)
    status, _, faults = verify(capsys, copy, f"sources.val.urls={moved}/*.tar", f"--out={tmp_path / 'out'}")
    assert status == 1 and len(faults) == 1 and f"cannot be read: no file {moved}/00000.tar" in faults[0]


def test_a_manifest_of_another_number_of_samples_is_found(copy, tmp_path, capsys):
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps(manifest | {"samples": manifest["samples"] + 1}))
    status, _, faults = verify(capsys, copy, f"--out={tmp_path}")
    assert (status, faults) == (1, [f"fault: {copy}/index.json: 6 samples, the manifest says 7"])


@pytest.mark.parametrize("twice", [False, True])
def test_a_source_that_was_moved_is_found_by_its_names(copy, drawings, tmp_path, capsys, twice):
    """A second sample of a key is no fault: the job rejects it."""
    shutil.copytree(drawings / "val", tmp_path / "moved")
    if twice:
        (path,) = (tmp_path / "moved").iterdir()
        with tarfile.open(path) as tar:
            members = [(member, tar.extractfile(member)) for member in tar.getmembers()]
            with tarfile.open(path, "a") as longer:
                for member, file in members:
                    longer.addfile(member, file)
    source = f"sources.val.urls={tmp_path}/moved/*.tar"
    assert verify(capsys, copy, source, "--records=2", f"--out={tmp_path / 'out'}")[0] == 0


def test_sources_of_other_sets_may_be_gone(copy, tmp_path, capsys):
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["sources"]["train"] = {"name": "folder", "path": str(tmp_path / "gone")}
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    moved = copy.parent.rename(tmp_path / "date=1: a #b, ü") / copy.name  # signs that YAML would take for its own
    assert verify(capsys, moved, "--records=2", f"--out={tmp_path / 'out'}")[0] == 0


def test_an_interrupted_check_says_what_to_do(copy, tmp_path, capsys, monkeypatch):
    """What was read is kept until the check is complete."""

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(verification, "encode_again", interrupt)
        with pytest.raises(SystemExit) as end:
            verify(capsys, copy, f"--out={tmp_path / 'out'}")
    assert end.value.code == 130 and "the same command goes on where it stopped" in capsys.readouterr().out
    (progress,) = (tmp_path / "out").iterdir()
    status, lines, _ = verify(capsys, copy, f"--out={tmp_path / 'out'}")
    assert status == 0 and "goes on behind" in lines[0] and not progress.exists()


def test_what_is_not_finite_is_encoded_in_fp32_as_in_the_job(copy, tmp_path, capsys, monkeypatch):
    encode = KLVae.encode

    def spoilt(self, images, exact=False):
        mean, std = encode(self, images, exact)
        mean[0] += 0 if exact else float("inf")
        return mean, std

    monkeypatch.setattr(KLVae, "encode", spoilt)
    assert verify(capsys, copy, f"--out={tmp_path / 'out'}")[0] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--records=0"], "--records=0; give 1 or more"),
        (["--seed=-1"], "--seed=-1; give 0 or more"),
        (["--workers=0"], "--workers=0; give 1 or more"),
        (["--dry-run"], "nothing to try"),
    ],
)
def test_wrong_arguments_cost_one_line(arguments, message, copy, capsys):
    with pytest.raises(SystemExit) as end:
        main([str(copy), *arguments])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_a_folder_that_is_no_set_says_what_to_give(copy, tmp_path, capsys):
    for folder, text in ((tmp_path, "manifest.json"), (copy.parent, f"manifest.json; give {copy}")):
        (folder / "config.yaml").write_text("run_name: of a training run")
        with pytest.raises(SystemExit):
            main([str(folder)])
        assert capsys.readouterr().err == f"error: {folder}: not an encoded set, or not finished: it has no {text}\n"
    (copy / "config.yaml").unlink()
    with pytest.raises(SystemExit):
        main([f"{folder}/trian"])
    assert capsys.readouterr().err == f"error: {folder}/trian: no such folder\n"
    with pytest.raises(SystemExit):
        main(["s3://bucket/latents/train"])
    assert "s3://bucket/latents/train: remote; copy the set to this machine" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(copy)])
    assert "give the YAML of the job" in capsys.readouterr().err


def test_results_that_cannot_be_written_name_the_option(copy, tmp_path, capsys, monkeypatch):
    """The check of the files came first, and the error named the folder alone."""
    folder = copy.parent
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != folder)
    with pytest.raises(SystemExit, match="2"):
        main([str(copy)])
    line = f"error: {folder}/verified: the results cannot be written there; give another folder by --out=FOLDER\n"
    assert capsys.readouterr().err == line
