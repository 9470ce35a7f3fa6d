"""Training data whose workers get a signal that is to stop the run, as all processes of a job do."""

import os
import signal

import torch
from torch.utils.data import DataLoader, Dataset

from data.loading import Loading, Placement


class Signalled(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, number):
        os.kill(os.getpid(), signal.SIGUSR1)
        return {"begun": torch.tensor(begun)}


begun = False


def begin(worker):
    global begun
    begun = True


def signalled(placement: Placement, *, begins: bool) -> Loading:
    """
    Args:
        begins: whether the workers call a function of its own at their start.
    """
    init = begin if begins else None
    return Loading(DataLoader(Signalled(), placement.batch, num_workers=1, worker_init_fn=init), samples=24)
