"""What every training data component returns: a loader, and what is still to be done to a batch on the device."""

from __future__ import annotations

import atexit
import multiprocessing.util
import signal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor
from torch.utils.data import DataLoader

from data.encoded.manifest import Manifest
from data.system.helper_process import end_with_parent
from data.tokenizers.vocabulary_files import VocabularyFile
from data.workers.stacks import give_stacks

Batch = dict[str, Tensor]
WEIGHT = "weight"  # entry of validation batches, (B,) float32: how much each sample counts in means over the set
REMEMBERED_POSITIONS = 64  # batches; the most that a trainer may fetch ahead of what it trains on
Position = TypeVar("Position")


@dataclass(frozen=True)
class Placement:
    """The part of a data set that a process reads.

    Attributes:
        batch: number of samples per batch and device.
        training: whether samples are shuffled and the loader goes on to the next epoch, rather than reading a
            validation set once in order.
        rank: number of this process among those that read different samples.
        world: number of those processes.
        seed: seed of the order.
        pin: put batches into page-locked memory, for a GPU.
        copies: number of neighbouring processes that read the same samples, and share `rank`.
        output: folder of the run, in which a component may keep what the next start must know; None: there is none.
    """

    batch: int
    training: bool
    rank: int = 0
    world: int = 1
    seed: int = 17
    pin: bool = False
    copies: int = 1
    output: Path | None = None


@dataclass(frozen=True)
class Loading:
    """Batches of a data set.

    A trainer reads an epoch by iterating over `loader` until it ends, or has given `len(loader)` batches, which is not
    always their number, since some orders repeat samples so that all ranks get equally many. It then asks for no
    further batch of this epoch, and the next iteration may begin by ending it, without a batch. To resume, a trainer
    saves `loader.state_dict()` in its checkpoint and gives it to a new loader's `load_state_dict` before the first
    iteration:

        for batch in loading.loader:
            train(batch)
            checkpoint["data"] = loading.loader.state_dict()
        ...
        resumed.loader.load_state_dict(checkpoint["data"])  # the next iteration gives the rest of the epoch

    Every rank calls both methods, because ranks may have to exchange their positions. The state holds JSON-compatible
    values, the same on all ranks. The position counts batches that left the loader, whatever its workers have
    prefetched. A trainer that itself takes batches from the loader before it trains on them passes the number of these:
    `loader.state_dict(ahead=1)`. If `loader.dataset` has methods of the same names that take Composer's arguments, its
    count of samples and `from_beginning`, it calls these instead. The states are interchangeable: `load_state_dict`
    also takes what Composer's checkpoints hold under `dataset_state`, `train`.

    In validation all ranks have equally many batches of equal sizes, because sharded models exchange weights in each.
    Where samples therefore repeat, or blank ones are added, the batches' entry `weight` (B,) float32 says how much each
    sample counts, so that means over the set do not depend on the number of ranks.

    Attributes:
        loader: yields dicts of CPU tensors; in training it has `state_dict` and `load_state_dict`.
        on_device: applied to each (micro)batch after it was moved to the device. It returns as many samples, and
            changes no tensor in place, as on a CPU it may be the data set's own. Entries that the loader did not make,
            such as means over the whole batch (`recipes.training.microbatches`), stay as they are.
        samples: number of samples per epoch, over all ranks; None if the stream has no end.
        images: number of images in all encoded sets; None if they are not encoded, or it is not known.
        manifest: what encoded the samples, of the first set; None if they are not encoded.
        resolution: side of the images in pixels; None if they are not encoded.
        null_text: (L, D) float16, the embedding of the empty caption; None if text is not encoded.
        vocabulary: the one that captions are encoded with; None if training does not encode them.
    """

    loader: DataLoader
    on_device: Callable[[Batch], Batch] | None = None
    samples: int | None = None
    images: int | None = None
    manifest: Manifest | None = None
    resolution: int | None = None
    null_text: Tensor | None = None
    vocabulary: VocabularyFile | None = None


def position(positions: deque[Position], ahead: int) -> Position:
    """The position `ahead` batches before the last one of a loader's recent positions.

    Raises:
        ValueError: the loader does not remember it.
    """
    if not 0 <= ahead < len(positions):
        raise ValueError(
            f"a loader's position {ahead} batches ago was asked for, and it remembers {len(positions)}; fetch fewer "
            "batches ahead"
        )
    return positions[-1 - ahead]


def leave_signals(worker: int) -> None:
    """For worker processes: signals that stop a run are left to the trainer, which still needs batches when they come.
    Another one asks for stacks.

    Clusters and containers send them to all processes, and a terminal does so with Ctrl-C. A worker ends when its
    trainer does, also when that is killed: PyTorch's would first read the batches that it was asked for, and fetch for
    minutes into a cache whose lock has ended with the trainer.
    """
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    give_stacks()


def let_workers_leave_signals(loader: DataLoader) -> None:
    """`leave_signals` in each worker process that a loader starts from now on, before its own `worker_init_fn`."""
    if not isinstance(loader, DataLoader):  # that of a validation set may be another iterable
        return
    own = loader.worker_init_fn
    if own is None:
        loader.worker_init_fn = leave_signals
    elif own is not leave_signals:
        loader.worker_init_fn = partial(_leave_signals_first, own)


def _leave_signals_first(own: Callable[[int], None], worker: int) -> None:
    leave_signals(worker)
    own(worker)


def end_idle_workers(loader: DataLoader) -> None:
    """End the worker processes that a loader keeps from one epoch to the next. Another iteration starts new ones.

    Do not call it while an iterator of the loader is in use.
    """
    iterator, loader._iterator = loader._iterator, None
    if iterator is None:
        return
    iterator._shutdown_workers()
    kill_workers(iterator)


def kill_workers(iterator: Iterator[Batch]) -> None:
    """End the worker processes of a DataLoader's iterator at once. PyTorch asks by SIGTERM, which they ignore.

    Args:
        iterator: what `iter` of a DataLoader with workers returned.
    """
    for worker in iterator._workers:
        worker.kill()
    for worker in iterator._workers:
        worker.join()


@atexit.register
def end_workers() -> None:
    """End the data workers of this process, when it ends with an error or a signal while an iterator is in use.

    multiprocessing would ask them by SIGTERM, which they ignore, and then wait for them for ever. It is imported before
    this file, so that this comes first.
    """
    workers = [worker for worker in multiprocessing.active_children() if worker.daemon]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler raises an error for each
    for worker in workers:
        worker.kill()
