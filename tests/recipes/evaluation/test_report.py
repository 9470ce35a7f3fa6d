"""The report of an evaluation: its tables and curves."""

from PIL import Image

from recipes.evaluation.report import curves, markdown, write_report


def test_a_report(tmp_path):
    rows = [
        {"label": f"blur {radius}", "varied": {"blur": radius}, "figures": {"fid": 10.5 - radius, "kid": 0.1}}
        for radius in (0, 2, 1)
    ]
    rows += [{"label": "sampler ddim", "varied": {"sampler": "ddim"}, "figures": {"fid": 3.0, "kid": 0.2}}]
    result = {"export": "a|b", "sampling": {"steps": 3}, "rows": rows}
    assert [value for value, _ in curves(result)["blur"]] == [0, 1, 2] and "sampler" not in curves(result)
    text = markdown(result)
    assert "| blur 1 | 9.5 | 0.1 |" in text and "| export | a\\|b |" in text and "| sampling | steps 3 |" in text
    write_report(result, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["blur.png", "report.json", "report.md"]
    assert Image.open(tmp_path / "blur.png").size[0] > 200
