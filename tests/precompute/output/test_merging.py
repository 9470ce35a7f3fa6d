"""The index, the rejected samples and the counts of a set, from the folders of its shards."""

import json
import os
import shutil

import pytest

from data.system.ranks import Rank
from data.system.side_by_side import AHEAD, GROUP
from precompute.encoding.job import MERGING, _finish
from precompute.output.output_set import OutputSet
from precompute.output.totals import totals
from tests.locks import held_by_a_child

OPTIONS = {"crop": "center", "sizes": [1, 2]}
COLUMNS = dict.fromkeys(("column_names", "column_encodings", "column_sizes", "hashes"), [])
ENTRY = {"format": "mds", "version": 2, "compression": None, **COLUMNS}


def finish(output: OutputSet, shard: str, files: int, options: dict = OPTIONS) -> None:
    """Writes a shard as the job does, with files that hold no samples."""
    folder = output.folder(shard)
    folder.mkdir(parents=True)
    entries = []
    for number in range(files):
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(bytes(number + 16))
        raw = {"basename": name, "bytes": number + 16, "hashes": {}}
        entries.append({**ENTRY, "samples": 3, "raw_data": raw, "zip_data": None})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    (folder / "rejected.jsonl").write_text(f'{{"shard": "{shard}"}}\n')
    size = int(shard) * 0.1
    sums = {"count": 3 * files, "mean": [size, 1.0], "square": [size, 2.0], "variance": [size, 3.0]}
    done = {"shard": shard, "samples": 3 * files, "rejected": {"too_small": 1}, "reencoded": 0}
    done |= {"bytes": sum(entry["raw_data"]["bytes"] for entry in entries)}
    done |= {"upscaled": {"16": 1}, "latents": {"16": sums}, "options": options}
    (folder / "done.json").write_text(json.dumps(done, indent=1))


def test_shards_are_merged_in_their_order(tmp_path):
    shards = [f"{number:04d}" for number in range(AHEAD * GROUP + 100)]
    output = OutputSet(tmp_path, shards)
    for number, shard in enumerate(shards):
        finish(output, shard, files=number % 3)
    markers = output.join(OPTIONS, leave_out=["0004"])
    merged = [shard for shard in shards if shard != "0004"]
    entries = []
    for shard in merged:
        for entry in json.loads((output.folder(shard) / "index.json").read_text())["shards"]:
            entry["raw_data"]["basename"] = f"shards/{shard}/{entry['raw_data']['basename']}"
            entries.append(entry)
    assert (tmp_path / "index.json").read_text() == json.dumps({"version": 2, "shards": entries}) + "\n"
    lines = (tmp_path / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["shard"] for line in lines] == merged
    whole = [json.loads((output.folder(shard) / "done.json").read_text()) for shard in merged]
    assert totals(markers) == totals(whole)
    assert output.remaining() == [] and OutputSet(tmp_path, shards[1:]).unknown_shards() == 1


def test_a_shard_of_other_options_changes_nothing_of_the_set(tmp_path):
    output = OutputSet(tmp_path, ["0000", "0001"])
    finish(output, "0000", files=1)
    finish(output, "0001", files=1, options={"crop": "random", "sizes": [1, 2]})
    (tmp_path / "index.json").write_text("the one before")
    with pytest.raises(ValueError, match="holds values made with crop random, this job has center"):
        output.join(OPTIONS)
    assert (tmp_path / "index.json").read_text() == "the one before"
    assert sorted(os.listdir(tmp_path)) == ["index.json", "shards"]


def test_a_folder_of_another_shard_or_of_two_encodings_is_not_merged(tmp_path):
    output = OutputSet(tmp_path, ["0000", "0001", "0002"])
    for shard in output.shards:
        finish(output, shard, files=int(shard))
    shutil.copy(output.folder("0001") / "done.json", output.folder("0002"))
    with pytest.raises(ValueError, match=r"0002/done.json: damaged \(it is of the shard 0001\); delete .*/0002 and"):
        output.join(OPTIONS)
    shutil.rmtree(output.folder("0002"))
    finish(output, "0002", files=2)
    shutil.copy(output.folder("0001") / "index.json", output.folder("0002"))
    with pytest.raises(ValueError, match=r"0002: damaged \(3 samples in index.json, 6 in done.json\); delete"):
        output.join(OPTIONS)


def test_a_rank_that_was_slower_finds_its_folder_removed(tmp_path):
    output = OutputSet(tmp_path, ["0000"])
    finish(output, "0000", files=1)
    output.publish("0000", rank=1)  # another rank has merged the set, and removed what this one was writing
    assert output.remaining() == []


@pytest.mark.parametrize("leave_out", [False, True])
def test_of_ranks_that_end_at_the_same_time_one_merges(tmp_path, monkeypatch, capsys, leave_out):
    """With shards left out, what another rank is writing may lack some that are done by now."""
    output = OutputSet(tmp_path, ["0000"])
    finish(output, "0000", files=1)
    merged = []
    monkeypatch.setattr(OutputSet, "merge", lambda *arguments, **options: merged.append(arguments))
    monkeypatch.setattr("precompute.encoding.job._log_result", lambda *arguments: None)
    monkeypatch.setattr("precompute.encoding.job.source_options", lambda source: {})

    class Config:
        leave_out_unreadable = leave_out
        sources = {"train": None}
        out = str(tmp_path)

    arguments = Config, {"train": output}, Rank(0, 2), {"request": {}}, {"train": {}}, {}
    with held_by_a_child(tmp_path / MERGING.format("train")) as child:
        _finish(*arguments)
    assert len(merged) == leave_out
    assert (f"all shards are done; process {child} on" in capsys.readouterr().out) is not leave_out
    _finish(*arguments)
    assert len(merged) == 1 + leave_out
