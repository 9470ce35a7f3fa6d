"""Data workers end with the process that they read for."""

import multiprocessing
import os
import select
import signal
import time
from contextlib import suppress

from torch.utils.data import DataLoader, Dataset

from data.loading import leave_signals


class LongBatches(Dataset):
    """Each takes minutes, as one does whose shards come from a slow store; a worker that makes one says its number."""

    def __init__(self, said):
        self.said = said

    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.write(self.said, f"{os.getpid()}\n".encode())
        time.sleep(300)


def test_a_worker_ends_when_its_trainer_is_killed():
    """PyTorch's would read the batches that it was asked for, and fetch shards into the cache of the next run."""
    hear, said = os.pipe()

    def train():
        next(iter(DataLoader(LongBatches(said), num_workers=1, worker_init_fn=leave_signals)))

    trainer = multiprocessing.get_context("fork").Process(target=train)
    trainer.start()
    os.close(said)
    worker = int(os.read(hear, 100))
    try:
        trainer.kill()
        trainer.join()
        closed = select.poll()  # takes numbers of 1,024 and above, too, which other tests leave
        closed.register(hear)
        assert closed.poll(60_000) and os.read(hear, 100) == b"", "the worker goes on"
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        os.close(hear)
