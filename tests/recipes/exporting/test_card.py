"""The model card of an export."""

import json

from recipes.exporting.card import model_card


def test_names_of_an_export_are_text(tmp_path):
    """A card is published: an export of somebody else must not put headings, code or HTML into it."""
    name = "nice\n\n# Official\n<img src=x onerror=alert(1)> | b"
    record = {"run_name": name, "batches": 1, "samples": 2, "denoiser": "<script>"}
    (tmp_path / "export.json").write_text(json.dumps(record))
    card = model_card(tmp_path, "native", "out", None)
    shown = r"nice # Official &lt;img src=x onerror=alert(1)&gt; \| b"
    assert card.startswith(f"# {shown}\n\n| | |\n") and f"| Run | {shown} |\n" in card
    assert "<" not in card and "| Denoiser | &lt;script&gt; |\n" in card


def test_packages_that_the_lines_need_are_named(tmp_path):
    record = {"run_name": "a", "batches": 1, "samples": 2, "denoiser": "mine.net", "objective": "mine.flow"}
    (tmp_path / "export.json").write_text(json.dumps(record))
    said = "in a checkout of Precompose, which trained the model. There, mine must be installed, too.\n"
    assert said in model_card(tmp_path, "native", "out", 3.0)
    (tmp_path / "export.json").write_text(json.dumps(record | {"denoiser": "unet", "objective": "ddpm"}))
    assert "installed" not in model_card(tmp_path, "native", "out", 3.0)
