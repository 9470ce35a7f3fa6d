"""Run on two ranks by tests/recipes/algorithms/powersgd/powersgd_ranks.py: exponents are counted over all ranks."""

import json
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from callbacks.exponents import Exponents
from recipes.algorithms.powersgd.lever import PowerSGD
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.training.lever import Lever
from tests.callbacks.exponent_reference import counts_of, naive, run
from tests.recipes.algorithms.residual import WordTask
from tests.recipes.training.fake_run import FakeRun


def check_exponents(folder: Path) -> None:
    """Each rank's own gradients are counted, whoever averages them; shards are counted once."""
    for name, levers in {
        "averaged": lambda task: [],
        "low_rank": lambda task: [PowerSGD(task, rank=2)],
        "scaled": scaled,
    }.items():
        with mock.patch("callbacks.exponents.write_chart"):  # which takes most of a second
            reference, _ = run(folder / name, levers, duration="4ba")
        counts = torch.tensor(reference.counts[2])
        own = counts.clone()
        dist.all_reduce(counts)
        assert not torch.equal(counts, 2 * own), "the ranks have the same batch"
        if dist.get_rank() == 0:
            (file,) = (folder / name / "exponents").glob("*.json")
            assert counts_of(json.loads(file.read_text())) == counts.tolist(), name
        dist.barrier()  # the next run's first collective would not wait for the file
    check_shards()


def scaled(task: WordTask) -> list[Lever]:
    scaling = ResblockGradScaling(task, low_rank=True, start=11.3)
    return [scaling, PowerSGD(task, scaling, rank=2)]


def check_shards() -> None:
    """The counts of FSDP2's shards add up to those of the whole averaged gradient, after the second of two passes."""
    task = WordTask()
    for block in task.blocks():
        fully_shard(block)
    fully_shard(task)
    callback = Exponents(task, "nowhere")
    run = FakeRun(task)
    callback.loaded(run)
    callback.counting = True
    words = torch.randint(11, (2, 4, 6), generator=torch.Generator().manual_seed(dist.get_rank()))
    for batch in words:
        callback.before_backward(run)
        task({"words": batch})["total"].backward()
    counts = callback.counts.clone()
    assert counts.sum() == 2 * 16 * 32, "a rank holds half of two matrices in each of two blocks"
    dist.all_reduce(counts)
    for block, found in zip(task.blocks(), counts.tolist(), strict=True):
        whole = [p.grad.full_tensor().numpy() for p in block.parameters() if p.ndim == 2]
        assert found == naive(whole)
