"""The benchmark of losses with both kinds of norms: both train, and the verdict compares with other seeds."""

import pytest

from benchmarks import norm_losses
from benchmarks.common import reporting
from benchmarks.norm_losses import FULL, LOW, verdict


def test_both_kinds_train(latent_sets, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reporting, "RESULTS", tmp_path)
    small = ["channels=[16,16]", "attention=[false,true]", "heads=[1,1]", "text_width=16", "norm_groups=4"]
    rows = norm_losses.main(
        ["--latents", str(latent_sets), "--batches", "3", "--seeds", "2", "data.resolution=16", "data.workers=0",
         "evals.val.resolution=16", "training.global_batch=8", *(f"model.denoiser.{change}" for change in small)]
    )  # fmt: skip
    for row in rows:
        for of in ("validation", "training"):
            assert row[f"{of}, {LOW}"] - row[f"{of}, {FULL}"] == row[f"{of} difference"]
            assert 0 < abs(row[f"{of} difference"]) < 0.02  # norms do differ, by bfloat16's rounding
    assert rows[0][f"validation, {FULL}"] != rows[1][f"validation, {FULL}"]
    assert "Validation loss: low-precision norms change it by" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "words"), [(0.05, ": within noise"), (0.2, ": NOT within noise")])
def test_the_verdict(change, words):
    rows = [
        {f"training, {FULL}": loss, "training difference": change + wobble}
        for loss, wobble in ((1.0, 0.01), (1.1, 0.0), (1.2, -0.01))
    ]
    text = verdict(rows, "training")
    assert words in text and f"{change:+.2e}" in text and "1.00e-01" in text


def test_one_seed_has_no_noise(tmp_path):
    with pytest.raises(SystemExit):
        norm_losses.main(["--latents", str(tmp_path), "--seeds", "1"])
