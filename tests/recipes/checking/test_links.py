import os

from recipes.checking import links as checks
from recipes.checking.finding import Finding
from recipes.checking.links import link_checks, of_other_machines


def test_two_ranks(two_ranks):
    two_ranks("links")


def test_one_process_has_no_links(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert list(link_checks([])) == []


def test_what_is_wrong_on_other_machines_is_told_once_with_their_names():
    here, there = Finding("warning", "packages", "old"), Finding("error", "shared memory", "not there")
    ok, load = Finding("ok", "GPU", "H200"), Finding("warning", "load", "5.0")
    told = [("a", [here]), ("a", [here, load]), ("b", [there, here, ok]), ("b", [there, load]), ("c", [there])]
    assert list(of_other_machines(told)) == [Finding("error", "shared memory", "on b, c: not there")]


def test_what_is_wrong_with_another_gpu_of_the_first_machine_is_told():
    ok, wrong, load = Finding("ok", "GPU", ""), Finding("error", "attention", "wrong"), Finding("warning", "load", "5")
    told = [("a", [ok]), ("a", [wrong, load]), ("b", [wrong])]
    assert list(of_other_machines(told)) == [Finding("error", "attention", "on a: wrong")]


def test_machines_that_do_not_reach_each_other_speak_for_themselves(monkeypatch, capsys):
    def unreachable(*arguments, **keywords):
        raise RuntimeError("timed out\nstack")

    monkeypatch.setattr(checks.dist, "init_process_group", unreachable)
    monkeypatch.setattr(checks.platform, "node", lambda: "b")
    own = [Finding("error", "shared memory", "not there"), Finding("warning", "load", "5.0")]
    for name, value in {"WORLD_SIZE": 4, "RANK": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "a", "MASTER_PORT": 1}.items():
        monkeypatch.setitem(os.environ, name, str(value))
    (found,) = link_checks(own)
    assert found == Finding("error", "links", "b does not reach the other processes at a:1 (timed out)")
    assert capsys.readouterr().out == "error:   shared memory: on b: not there\n"
