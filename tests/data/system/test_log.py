"""The first rank speaks, the others do not."""

from data.system.log import log


def test_only_the_first_rank_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    log.info("second")
    monkeypatch.setenv("RANK", "0")
    log.info("first")
    log.debug("detail")
    assert capsys.readouterr().out == "first\n"
