from recipes.planning.link_checks import link_checks


def test_two_ranks(two_ranks):
    two_ranks("links")


def test_one_process_has_no_links(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert list(link_checks()) == []
