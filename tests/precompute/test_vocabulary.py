"""The vocabulary job as a command: what it reads, writes and refuses."""

import json
from functools import partial

import pytest

from data.sources.filters import Filter
from data.sources.tars import TarSource
from data.tokenizers.bpe import Vocabulary
from data.tokenizers.vocabulary_files import manifest_path
from precompute.texts.vocabulary_job import Captions
from precompute.vocabulary import main
from tests.precompute.encode_checks import error_of

expect_error = partial(error_of, main)


@pytest.fixture
def arguments(drawings, tmp_path):
    """Returns the command line of a job that trains a vocabulary on the drawings' captions."""
    path = tmp_path / "vocabulary.yaml"
    path.write_text(
        f"out: {tmp_path}/new/words.json\nentries: 270\nsources:\n  a: {{name: tars, urls: {drawings}/train/*.tar}}\n"
    )

    def words(*overrides: str) -> list[str]:
        return [str(path), *overrides]

    return words


def test_it_is_written_once_with_its_manifest(arguments, tmp_path, capsys):
    out = tmp_path / "new" / "words.json"
    main(arguments())
    assert f"wrote {out}: 270 entries from 40 texts; rejected: none" in capsys.readouterr().out
    made = json.loads(manifest_path(out).read_text())
    assert (made["entries"], made["captions"], made["rejected"]) == (270, 40, {})
    assert {path.name for path in out.parent.iterdir()} == {"words.json", "words.manifest.json"}
    assert Vocabulary.read(out).size == 270
    data = out.read_bytes()
    main(arguments())
    assert "already complete" in capsys.readouterr().out and out.read_bytes() == data
    main(arguments(f"out={tmp_path}/again.json"))
    assert (tmp_path / "again.json").read_bytes() == data
    out.unlink()  # as if the job had been killed between writing the two files
    main(arguments())
    assert out.read_bytes() == data


def test_what_it_refuses(arguments, tmp_path, capsys):
    error = expect_error(arguments("entries=16384"), capsys)
    assert "error: entries: the texts give 282 entries, 16,384 were asked for; read more of them" in error
    assert not (tmp_path / "new").exists()
    assert "entries: 256; give more than 256" in expect_error(arguments("entries=256"), capsys)
    assert "ends in .json" in expect_error(arguments("out=words"), capsys)
    assert "limit: 0" in expect_error(arguments("limit=0"), capsys)
    main(arguments())
    capsys.readouterr()
    error = expect_error(arguments("entries=271"), capsys)
    assert "was made with entries 270, this job has 271; give another `out`" in error
    assert expect_error(arguments("entries=271", "--dry-run"), capsys) == error
    manifest_path(tmp_path / "new" / "words.json").unlink()
    assert "exists without its manifest" in expect_error(arguments(), capsys)


def test_filters_and_limits(arguments, tmp_path, capsys):
    rules = "filter={name: pictures, boilerplate: [drawing of . stars.*]}"
    main(arguments(rules, "entries=265"))
    assert "from 35 texts; rejected: boilerplate 5" in capsys.readouterr().out  # 0, 2, 4, 6, 8
    main(arguments("entries=265", "limit=12", f"out={tmp_path}/few.json"))
    assert "from 12 texts" in capsys.readouterr().out


def test_a_limit_reads_shards_in_random_order(drawings):
    sources = {"a": TarSource(urls=f"{drawings}/train/*.tar"), "b": TarSource(urls=f"{drawings}/val/*.tar")}
    everything = list(Captions(sources, Filter(), None, 1))
    assert len(everything) == 46
    one, other = (list(Captions(sources, Filter(), 12, seed)) for seed in (1, 3))
    assert len(one) == len(other) == 12 and set(one) | set(other) < set(everything)
    assert one != other and one == list(Captions(sources, Filter(), 12, 1))


def test_an_interrupted_job_leaves_nothing(arguments, tmp_path, monkeypatch, capsys):
    def interrupted(self, sample):
        raise KeyboardInterrupt

    monkeypatch.setattr(Filter, "caption", interrupted)
    with pytest.raises(SystemExit) as end:
        main(arguments())
    assert end.value.code == 130 and "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_dry_run(arguments, tmp_path, capsys):
    main(arguments("--dry-run"))
    said = capsys.readouterr().out
    assert "a: 4 input shards" in said and f"into {tmp_path}/new/words.json: 270 entries" in said
    assert not (tmp_path / "new").exists()
