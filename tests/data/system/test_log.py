"""The first rank speaks, the others do not."""

import sys

import pytest

from data.system.log import log
from recipes.config.command_line import fail


def test_only_the_first_rank_speaks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    log.info("second")
    monkeypatch.setenv("RANK", "0")
    log.info("first")
    log.debug("detail")
    assert capsys.readouterr().out == "first\n"


def test_a_text_of_a_file_does_not_command_the_terminal(capsys):
    """As the name of a column, of a member of a tar, or of what a checkpoint asks for."""
    text = "\x1b[2J\x1b]0;title\x07\r\u202eok\x9b2J"
    log.warning(f"{text}\n\tcaf\xe9")
    with pytest.raises(SystemExit):
        fail([text])
    visible = r"\x1b[2J\x1b]0;title\x07\r\u202eok\x9b2J"
    found = capsys.readouterr()
    assert (found.out, found.err) == (f"{visible}\n\tcaf\xe9\n", f"error: {visible}\n")


def test_without_a_standard_output_lines_are_lost(monkeypatch, capsys):
    """As of a process that was started with >&-."""
    monkeypatch.setattr(sys, "stdout", None)
    log.info("a line")
    assert capsys.readouterr().err == ""
