"""The lines of progress of a generation."""

from recipes.models.sampling import SamplingProgress


def test_the_rate_and_what_is_left(monkeypatch, capsys):
    monkeypatch.setattr("recipes.models.sampling.time.monotonic", lambda: 108.0)
    SamplingProgress(10, began=100.0).say(4)
    assert capsys.readouterr().err == "generate: 4/10 images, 0.5/s, 12 s left\n"
