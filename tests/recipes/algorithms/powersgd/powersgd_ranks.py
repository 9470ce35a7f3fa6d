"""Run on two ranks by test_lever.py: Composer runs with PowerSGD compared with plain ones; Adam16 on FSDP2's shards."""

import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from composer import Callback, Trainer
from composer.utils import dist as composer_dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from recipes.algorithms.gradients.clipping import ClipByNorm
from recipes.algorithms.powersgd.lever import PowerSGD
from recipes.algorithms.sharding.fsdp import Sharding
from recipes.algorithms.sharding.shard import divide_by_ranks_on_cpu
from recipes.algorithms.sharding.shards import own
from recipes.algorithms.sixteen_bit.block_scaling import scale_branch, unscale
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.engines.composer.intervals import CHECKPOINT, at_intervals
from recipes.engines.composer.model import ComposerTask
from tests.callbacks.exponent_ranks import check_exponents
from tests.recipes.algorithms.composer_levers import algorithms_of, sharded_options
from tests.recipes.algorithms.residual import WordTask, network
from tests.recipes.algorithms.sixteen_bit.adam16_ranks import check_shards

EXACT = {"rank": 100, "wire": "32-bit", "buffer": "32-bit"}
BATCHES = 6  # of a run; the gradient of batch 3 may be infinite, and checkpoints are written after half of them
HALF = BATCHES // 2


class Watch(Callback):
    """Records the weights after every batch; makes one gradient on one rank infinite in batch `bad_batch`."""

    def __init__(self, bad_batch=None, averaging=None):
        self.bad_batch = bad_batch
        self.averaging = averaging
        self.weights, self.losses = [], []
        self.errors = None  # PowerSGD's, before the first batch
        self.averaged = []  # for each backward pass, whether it left the same gradients on all ranks

    def batch_start(self, state, logger):
        if self.errors is None and self.averaging is not None:
            self.errors = {name: whole(errors) for name, errors in self.averaging.state_dict()["errors"].items()}

    def after_loss(self, state, logger):
        self.losses.append(state.loss["total"].item())

    def after_backward(self, state, logger):
        # In the first microbatch, because overlapped work takes the gradients right after the last one.
        if state.timestamp.batch.value == self.bad_batch and dist.get_rank() == 1 and len(self.losses) % 2 == 1:
            own(list(state.model.parameters())[3].grad)[0, 0] = float("inf")
        parameter = list(state.model.parameters())[3]
        if isinstance(parameter, DTensor):  # ranks have different parts
            return
        lowest, highest = parameter.grad.clone(), parameter.grad.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        self.averaged.append(torch.equal(lowest, highest))

    def batch_end(self, state, logger):
        self.weights.append(torch.cat([whole(p).flatten() for p in state.model.parameters()]))


def whole(parameter):
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()


def run(*levers, powersgd=None, scaled=False, fsdp=None, batches=BATCHES, bad_batch=None, folder=None, **options):
    """Train on batches of 16 samples, in two microbatches per process; `fsdp` holds arguments of Sharding. Checkpoints
    are saved in `folder` every `HALF` batches.

    Returns the trainer, whose `levers` begin with gradient scales and PowerSGD if there are any, and the `Watch`.
    """
    task = WordTask()
    each = 16 // dist.get_world_size()
    scaling = ResblockGradScaling(task, powersgd is not None) if scaled else None
    clips = any(isinstance(lever, ClipByNorm) for lever in levers)
    averaging = None if powersgd is None else PowerSGD(task, scaling, clips, **powersgd)
    levers = [lever for lever in (scaling, averaging, *levers) if lever is not None]
    if fsdp is not None:
        fsdp = {"full_shard": False, "by_block": True, "parameters": "fp32", "sync": "microbatch"} | fsdp
        checkpoints = fsdp.pop("checkpoints", "sharded")
        levers.append(Sharding(task, averaging=averaging, scaling=scaling, **fsdp))
        saves = {"folder": folder, "due": at_intervals(f"{HALF}ba", CHECKPOINT)}
        options |= sharded_options(levers, task, checkpoints, fsdp["full_shard"], **saves)
    else:
        options["algorithms"] = algorithms_of(levers, task)
        if folder is not None:
            options |= {"save_folder": str(folder), "save_interval": f"{HALF}ba"}
    words = torch.randint(11, (64, 6), generator=torch.Generator().manual_seed(5))
    data = [{"words": row} for row in words]
    watch = Watch(bad_batch, averaging)
    trainer = Trainer(
        model=ComposerTask(task),
        train_dataloader=DataLoader(data, batch_size=each, sampler=composer_dist.get_sampler(data)),
        max_duration=f"{batches}ba",
        optimizers=torch.optim.SGD(task.parameters(), lr=0.3, momentum=0.5),
        callbacks=[watch, *options.pop("callbacks", [])],
        device="cpu",
        device_train_microbatch_size=each // 2,
        progress_bar=False,
        seed=3,
        **options,
    )
    trainer.levers = levers
    trainer.fit()
    for weights in watch.weights:
        first = weights.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weights), "replicas differ"
    return trainer, watch


def near(a, b, tolerance):
    assert len(a.weights) == len(b.weights)
    for one, other in zip(a.weights, b.weights, strict=True):
        assert (one - other).abs().max() < tolerance, (one - other).abs().max()


def equal(a, b):
    """Two runs have the same weights after each batch, bit by bit."""
    assert len(a.weights) == len(b.weights)
    assert all(torch.equal(one, other) for one, other in zip(a.weights, b.weights, strict=True))


def check_runs(folder: Path) -> None:
    _, plain = run()
    moved = (plain.weights[-1] - plain.weights[0]).abs().max()
    _, exact = run(powersgd=EXACT)
    near(plain, exact, 1e-5 * moved)  # rounding in each step
    assert moved > 0.05
    # DistributedDataParallel averages in the last pass of each batch, and nothing where PowerSGD does.
    assert plain.averaged == [False, True] * BATCHES and not any(exact.averaged)

    _, clipped = run(ClipByNorm(0.3))
    _, ours = run(powersgd={**EXACT, "clip": 0.3})
    near(clipped, ours, 1e-5 * moved)
    assert (clipped.weights[-1] - plain.weights[-1]).abs().max() > 0.01

    trainer, low = run(powersgd={"rank": 2}, batches=30)
    assert low.losses[-1] < 0.7 * low.losses[0]
    assert (low.weights[BATCHES - 1] - plain.weights[-1]).abs().max() > 1e-3  # it is not plain averaging
    assert trainer.levers[0].skipped == 0

    # An infinite gradient of one process: no process changes its weights at that batch, and all go on.
    trainer, broken = run(powersgd={"rank": 2}, bad_batch=3)
    same = [torch.equal(a, b) for a, b in zip(broken.weights, broken.weights[1:], strict=False)]
    assert same == [number == 2 for number in range(BATCHES - 1)]
    assert trainer.levers[0].skipped == 1
    assert torch.isfinite(broken.weights[-1]).all()

    # The sum of errors is shared equally when it is saved, and when it is loaded: bit-equal, also in 1-6-9.
    low_rank = {**EXACT, "rank": 2}
    _, whole = run(powersgd=low_rank, folder=folder)
    saved = str(next(folder.glob(f"*-ba{HALF}-rank0.pt")))
    _, resumed = run(powersgd=low_rank, load_path=saved)
    assert len(resumed.weights) == HALF
    resumed.weights[:0] = whole.weights[:HALF]
    equal(whole, resumed)
    with mock.patch.object(PowerSGD, "load_state_dict"):  # without the errors, the run is another one
        _, forgot = run(powersgd=low_rank, load_path=saved)
    assert (forgot.weights[-1] - whole.weights[-1]).abs().max() > 1e-2 * moved
    # Four ranks go on from these checkpoints in powersgd_shards_ranks.py.
    rounded = folder / "rounded"
    trainer, low = run(powersgd={"rank": 2}, folder=rounded)
    half = str(next(rounded.glob(f"*-ba{HALF}-rank0.pt")))
    _, resumed = run(powersgd={"rank": 2}, load_path=half)
    resumed.weights[:0] = low.weights[:HALF]
    equal(low, resumed)
    two = {
        "exact": {"saved": saved, "weights": torch.stack(whole.weights)},
        "rounded": {
            "saved": half,
            "weights": torch.stack(low.weights),
            "projections": [q for state in trainer.levers[0].states for q in state.projections],
        },
    }
    if dist.get_rank() == 0:
        torch.save(two, folder / "two.pt")
    for change, message in (({"rank": 3}, "written with rank 2"), ({"seed": 1}, "written with seed 0")):
        try:
            run(powersgd={**low_rank, **change}, load_path=saved)
        except ValueError as error:
            assert message in str(error)
        else:
            raise AssertionError("another Q was taken")
    try:
        run(ClipByNorm(1.0), powersgd={"rank": 2, "clip": 1.0})
    except ValueError as error:
        assert "would both clip" in str(error)
    else:
        raise AssertionError("gradients were clipped twice")


def check_scaled_runs() -> None:
    """Gradient scales with PowerSGD: equal to 32-bit averaging up to fp16 rounding; both skip the same updates."""
    _, plain = run()
    for powersgd in (None, EXACT):
        trainer, scaled = run(powersgd=powersgd, scaled=True)
        moved = (plain.weights[-1] - plain.weights[0]).abs().max()
        near(plain, scaled, 0.05 * moved)
        assert trainer.levers[0].skipped == 0
        trainer, broken = run(powersgd=powersgd, scaled=True, bad_batch=3)
        same = [torch.equal(a, b) for a, b in zip(broken.weights, broken.weights[1:], strict=False)]
        assert same == [number == 2 for number in range(BATCHES - 1)]
        assert {algorithm.skipped for algorithm in trainer.levers} == {1}
        exponents = trainer.levers[0].scales.exponents
        assert (exponents < 13).tolist() == [True, False]  # the third parameter is the first block's


def check_scaled_shards() -> None:
    """Scaled branches in blocks that FSDP2 shards have the gradients of the unsharded model."""
    models = network(), fully_shard_blocks(network())
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([2.0 ** (8 + i) for i in range(6)])
    for model in models:
        for block, scale, filtered in zip(model, scales, torch.zeros(6, dtype=torch.int64), strict=True):
            scale_branch(block.branch, scale, filtered)
        model(x).square().mean().backward()
        for block, scale in zip(model, scales, strict=True):
            assert unscale([own(p.grad) for p in block.parameters()], scale)
    for whole, part in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-8)


def fully_shard_blocks(model):
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def main() -> None:
    os.environ.setdefault("NODE_RANK", "0")  # Composer asks for it
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    check_shards()
    divide_by_ranks_on_cpu()
    check_scaled_shards()
    check_scaled_runs()
    check_runs(Path(sys.argv[1]))
    check_exponents(Path(sys.argv[1]))
    print("all as it should be", flush=True)
    dist.barrier()
    os._exit(0)  # Composer's threads


if __name__ == "__main__":
    main()
