"""Memory for batches that worker processes and the training process share."""

import os
import pickle

import torch

from data.encoded.shared_batches import BatchBlocks

SPECS = {"a": ((3, 5), torch.float16), "b": ((3,), torch.int64)}


def received(blocks: BatchBlocks, monkeypatch) -> dict:
    """A batch made as in a worker, and what the parent gets of it."""
    monkeypatch.setattr("data.encoded.shared_batches.get_worker_info", lambda: object())
    batch = blocks.new(SPECS)
    batch["a"].copy_(torch.arange(15).view(3, 5))
    batch["b"].copy_(torch.arange(3))
    return pickle.loads(pickle.dumps(batch))


def test_a_block_is_used_again_after_its_last_tensor(monkeypatch):
    blocks = BatchBlocks(2, 256)
    batch = received(blocks, monkeypatch)
    other = received(blocks, monkeypatch)
    assert type(batch) is dict
    assert torch.equal(batch["a"], torch.arange(15).view(3, 5).half()) and torch.equal(batch["b"], torch.arange(3))
    assert blocks._take() is None
    view = batch["b"][1:]
    del batch
    assert blocks._take() is None and view.tolist() == [1, 2]
    del view
    assert blocks._take() == 0 and blocks._take() is None
    del other
    assert blocks._take() == 1


def test_a_batch_without_a_block_has_memory_of_its_own(monkeypatch):
    monkeypatch.setattr("data.encoded.shared_batches.get_worker_info", lambda: object())
    for blocks in (BatchBlocks(0, 256), pickle.loads(pickle.dumps(BatchBlocks(2, 256)))):
        batch = blocks.new(SPECS)
        assert type(batch) is dict and batch["a"].shape == (3, 5)
    large = {"a": ((5000,), torch.int64)}
    assert BatchBlocks(2, 256).new(large)["a"].shape == (5000,)


def test_a_forked_process_does_not_free_a_block(monkeypatch):
    blocks = BatchBlocks(1, 256)
    batch = received(blocks, monkeypatch)
    child = os.fork()
    if not child:
        del batch
        os._exit(0)
    os.waitpid(child, 0)
    assert blocks._take() is None and batch["b"].tolist() == [0, 1, 2]
