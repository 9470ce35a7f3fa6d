"""What a process holds of a sharded checkpoint while it reads it."""

import weakref

from recipes.engines.checkpoints.sharded_files import Sharded


def memory_of_tensors(patch):
    """Two lists that grow while sharded checkpoints are read: the bytes of each tensor, and of those alive after it.

    Args:
        patch: pytest's monkeypatch.
    """
    alive, sizes, held, read = [], [], [], Sharded._tensor

    def tensor(self, name, kind, places):
        found = read(self, name, kind, places)
        alive.append((weakref.ref(found), found.nbytes))
        sizes.append(found.nbytes)
        held.append(sum(size for reference, size in alive if reference() is not None))
        return found

    patch.setattr(Sharded, "_tensor", tensor)
    return sizes, held
