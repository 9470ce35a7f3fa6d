"""precompute/verify.py on packed texts, and on copies that were damaged in one way each."""

import json
import shutil
from pathlib import Path

import pytest
from streaming.base.compression import decompress
from streaming.base.hashing import get_hash

from precompute import pack
from precompute.verify import main


@pytest.fixture
def copy(text_sets, tmp_path):
    return shutil.copytree(text_sets / "captions", tmp_path / "captions")


@pytest.fixture
def faults(copy, capsys):
    """() -> the faults of the copy, each of which is a line of the report and in captions.json."""

    def check():
        capsys.readouterr()
        status = main([str(copy)])
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        found = [line.removeprefix("fault: ") for line in lines if line.startswith("fault: ")]
        values = json.loads((copy.parent / "verified" / "captions.json").read_text())
        assert values["faults"] == found and values["holds"] == (not found) == (status == 0)
        return found

    return check


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_packed_texts_hold(text_sets, tmp_path, capsys):
    assert main([str(text_sets / "captions"), f"--out={tmp_path}", "--workers=2"]) == 0
    manifest = json.loads((text_sets / "captions" / "text.json").read_text())
    values = json.loads((tmp_path / "captions.json").read_text())
    assert (values["samples"], values["files"], values["hashes"]) == (manifest["samples"], 4, 4)
    assert 1 < values["used"] <= 301 and [path.name for path in tmp_path.iterdir()] == ["captions.json"]
    assert "captions: {:,} rows in 4 files".format(manifest["samples"]) in capsys.readouterr().out


def test_damaged_files_are_found(copy, faults):
    first, second, *_ = sorted(copy.glob("shards/*/*.mds"))
    data = first.read_bytes()
    first.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    second.unlink()
    assert faults() == [
        f"{first}: its xxh3_64 is not the one in the index; the file or the index is damaged",
        f"{second}: missing",
    ]
    first.write_bytes(data[:-2])
    assert f"{first}: {len(data) - 2:,} bytes, the index says {len(data):,}" in faults()


def test_rows_that_are_not_those_of_the_manifest_are_found(copy, faults):
    manifest = json.loads((copy / "text.json").read_text())
    rewrite(copy / "text.json", samples=manifest["samples"] + 1, shards=1, vocabulary_hash="0")
    samples, shards, vocabulary = faults()
    assert samples.endswith(f": {manifest['samples']:,} samples, text.json says {manifest['samples'] + 1:,}")
    assert shards.endswith(": files of 4 input shards, text.json says 1")
    assert vocabulary.startswith(f"{copy / 'vocabulary.json'}: its sha256 is not the one in text.json")
    (copy / "vocabulary.json").unlink()
    rewrite(copy / "text.json", **manifest | {"positions": 15})
    *rows, vocabulary = faults()
    assert all("column tokens has torch.uint16 (17,) by the index, and uint16 (16,) by the man" in row for row in rows)
    assert len(rows) == 4 and vocabulary.startswith(f"{copy / 'vocabulary.json'}: missing")


def test_tokens_that_the_vocabulary_lacks_are_found(copy, faults):
    index = json.loads((copy / "index.json").read_text())
    entry = index["shards"][0]["raw_data"]
    path = copy / entry["basename"]
    data = path.read_bytes()[:-2] + (301).to_bytes(2, "little")  # the last token of the last row
    path.write_bytes(data)
    entry["hashes"] = {name: get_hash(name, data) for name in entry["hashes"]}
    (copy / "index.json").write_text(json.dumps(index))
    assert faults() == ["column tokens: 1 are not below 301, as text.json says"]


def test_faults_of_compressed_files_name_them(text_sets, tmp_path, capsys):
    job = [f"out={tmp_path}", "sources={docs: null, docs_val: null}", "compression=zstd"]
    pack.main([str(text_sets / "captions" / "config.yaml"), *job])
    first, second, *_ = sorted(tmp_path.glob("captions/shards/*/*.zstd"))
    second.unlink()
    index = json.loads((tmp_path / "captions" / "index.json").read_text())
    index["shards"][0]["samples"] += 1
    (tmp_path / "captions" / "index.json").write_text(json.dumps(index))
    capsys.readouterr()
    assert main([str(tmp_path / "captions")]) == 1
    said = capsys.readouterr().out
    assert f"  fault: {first}: sample 6 is damaged" in said and f"  fault: {second}: missing\n" in said
    raw = first.with_suffix("")  # as training decompresses it
    raw.write_bytes(decompress("zstd", first.read_bytes()))
    assert main([str(tmp_path / "captions")]) == 1
    assert f"  fault: {raw}: sample 6 is damaged" in capsys.readouterr().out


def test_a_damaged_copy_of_the_vocabulary_is_written_again(text_sets, tmp_path):
    """Exports would take it from the set, and a job that was started again left it."""
    job = [str(text_sets / "captions" / "config.yaml"), f"out={tmp_path}", "sources={docs: null, captions: null}"]
    pack.main(job)
    copy = tmp_path / "docs_val" / "vocabulary.json"
    whole = copy.read_bytes()
    copy.write_bytes(whole[:-9])
    pack.main(job)
    assert copy.read_bytes() == whole


def test_what_packed_texts_cannot_be_asked_is_said(text_sets, capsys):
    for arguments, line in [
        ([text_sets], f"not an encoded set, or not finished: it has no manifest.json; give {text_sets}/captions"),
        ([text_sets / "docs" / "config.yaml"], "a job of precompute/pack.py; give the folder of one of its sets"),
        ([text_sets / "docs", "--records=3"], f"--records: {text_sets}/docs is a set of packed texts"),
        ([text_sets / "docs", "--seed=0"], f"--seed: {text_sets}/docs is a set of packed texts"),
        ([text_sets / "docs", "seed=1"], f"seed=1: {text_sets}/docs is a set of packed texts, which are checked with"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(list(map(str, arguments)))
        assert line in capsys.readouterr().err


def test_results_that_cannot_be_written_name_the_option(copy, tmp_path, capsys, monkeypatch):
    """The check of the files came first, and the error named the folder alone."""
    folder = copy.parent
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != folder)
    with pytest.raises(SystemExit, match="2"):
        main([str(copy)])
    line = f"error: {folder}/verified: the results cannot be written there; give another folder by --out=FOLDER\n"
    assert capsys.readouterr().err == line
