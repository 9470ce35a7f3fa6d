"""Which machines are left out of a run."""

from cluster.check import gpus, main, writable


def found(tmp_path, lines, wanted):
    program = tmp_path / "smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    program.chmod(0o755)
    return [(finding.level, finding.text) for finding in gpus(wanted, (str(program),))]


def test_gpus_that_are_missing_or_broken(tmp_path):
    assert found(tmp_path, ["0, 0", "1, [N/A]"], 2) == [("ok", "2")]
    assert found(tmp_path, ["0, 0"], 2) == [("error", "the driver shows 1 of 2")]
    for problem in "[GPU is lost]", "[GPU requires reset]":
        assert found(tmp_path, ["0, 0", f"1, {problem}"], 2) == [("error", "the driver shows 1 of 2")]
    ((level, text),) = found(tmp_path, ["0, 0", "1, 7"], 2)
    assert level == "error" and "in the memory of 1:" in text
    assert [finding.level for finding in gpus(1, (str(tmp_path / "nowhere"),))] == ["error"]


def test_a_driver_that_hangs(monkeypatch):
    monkeypatch.setattr("cluster.check.SECONDS", 0.1)
    assert ["sleep hangs" in finding.text for finding in gpus(1, ("sleep", "60"))] == [True]


def test_a_folder_that_cannot_be_written(tmp_path):
    assert writable(tmp_path / "new").level == "ok" and not list((tmp_path / "new").iterdir())
    (tmp_path / "file").touch()
    assert writable(tmp_path / "file" / "inside").level == "error"


def test_the_last_line_says_why_a_machine_is_left_out(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--output", str(tmp_path / "file" / "inside")]) == 1
    assert "cannot be used" in capsys.readouterr().out.splitlines()[-1]
