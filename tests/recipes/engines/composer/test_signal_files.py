"""Machines that share a file system wait within themselves by files of their own."""

from composer.utils import dist

from recipes.engines.composer.trainer import own_signal_files


def test_machines_do_not_remove_each_others_signal_files(monkeypatch):
    theirs, names = dist.get_node_signal_file_name, []
    for machine in ("0", "1"):
        monkeypatch.setenv("NODE_RANK", machine)
        with own_signal_files():
            # The first machine's random name is what all machines get.
            monkeypatch.setattr(dist, "broadcast_object_list", lambda names, src: names.__setitem__(0, "same"))
            names.append(dist.get_node_signal_file_name())
    assert names == ["same_0", "same_1"] and dist.get_node_signal_file_name is theirs
