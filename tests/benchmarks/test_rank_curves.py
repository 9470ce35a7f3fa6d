"""Training curves by rank: a real run on two ranks, running means of losses, and refusals."""

import json
from pathlib import Path

import pytest

from benchmarks import rank_curves
from benchmarks.rank_curves import OTHER_SEED, PLAIN, smoothed
from recipes.config.recipe import to_yaml
from tests.ranks import launch

RANKS = Path(__file__).with_name("rank_curves_ranks.py")
SMALL = [
    "model={layers: 2, width: 32, heads: 2, text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3}",
    *(f"{data}={{resolution: 32, positions: 16, workers: 0}}" for data in ("data", "evals.val")),
    "optimizer.lr=3e-3",
    "schedule.warmup=2ba",
    "training.global_batch=8",
]


@pytest.mark.slow
def test_curves_of_two_ranks(token_sets, small_recipe, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(small_recipe(tmp_path / "run")))
    paths = ["--tokens", str(token_sets), "--vocabulary", str(token_sets / "vocabulary.json")]
    sizes = ["--ranks", "32", "1", "--batches", "12", "--window", "4"]
    done = launch(2, RANKS, tmp_path / "results", recipe, *paths, *sizes, *SMALL)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    # `overhead.py` compares with Composer alone, which has every sample on every rank.
    one, other = (json.loads((tmp_path / "results" / f"in_memory-{rank}.json").read_text()) for rank in range(2))
    assert one == other and len(one) == len(set(one)) == 40
    record = json.loads((tmp_path / "results" / "rank_curves-openmoji-cpu.json").read_text())
    rows = {row["averaging"]: row for row in record["rows"]}
    assert list(rows) == [PLAIN, OTHER_SEED, "rank 32", "rank 1"]
    sent = {name: row["relative to plain"] for name, row in rows.items()}
    assert sent["rank 1"] < sent["rank 32"] and sent[PLAIN] == 1
    for loss in ("training loss", "validation loss"):
        away = {name: abs(row[loss] - rows[PLAIN][loss]) for name, row in rows.items()}
        assert away["rank 32"] < away["rank 1"]  # full rank is plain averaging up to rounding to 1-6-9
        assert away[OTHER_SEED] > 0
    assert (tmp_path / "results" / "rank_curves-openmoji-cpu.png").read_bytes().startswith(b"\x89PNG")


def test_windows():
    assert smoothed([1.0, 2.0, 3.0, 7.0], 2) == [1.5, 2.5, 5.0]
    assert smoothed([1.0, 2.0], 2) == [1.5]


def test_what_is_not_there_is_named(tmp_path, capsys):
    (tmp_path / "vocabulary.json").write_text("{}")
    for arguments, words in (
        (["--tokens", str(tmp_path / "no")], "no is not there; run make quickstart-tokens"),
        (["--batches", "3", "--window", "4"], "--window: 4; give 1 to 3"),
        (["--tokens", str(tmp_path), "--vocabulary", str(tmp_path / "vocabulary.json")], "composer -n 2"),
    ):
        with pytest.raises(SystemExit):
            rank_curves.main(arguments)
        assert words in capsys.readouterr().err
