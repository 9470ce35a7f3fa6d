"""Run on four ranks by test_lever.py: two machines of two devices, PowerSGD between them, FSDP2 within.

argv: a folder for checkpoints, and that of powersgd_ranks.py.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from composer import Callback
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import Shard

from recipes.algorithms.powersgd.block_gradients import blocks_of, placements
from recipes.algorithms.powersgd.lever import PowerSGD
from recipes.algorithms.powersgd.overlap import Overlap
from recipes.algorithms.sharding.shard import shard
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.models.autoregressive.task import Autoregressive
from tests.recipes.algorithms.powersgd import powersgd_ranks
from tests.recipes.algorithms.powersgd.low_rank_ranks import check_compressor
from tests.recipes.algorithms.powersgd.powersgd_ranks import BATCHES, EXACT, HALF, equal, near, run
from tests.recipes.algorithms.residual import WordTask

MACHINES = {"replicas": 2}


def check_parts():
    """The transformer's matrices are sharded as square as possible."""
    torch.manual_seed(0)
    task = Autoregressive(layers=1, width=16, heads=2, text_positions=5, text_vocabulary=10, side=4, codes=8, kernel=3)
    names = {id(p): name for name, p in task.named_parameters()}
    cuts = {names[key].split("branch.")[1]: value for key, value in placements(task, 2).items()}
    square = dict.fromkeys(("q.weight", "k.weight", "v.weight", "out.weight"), Shard(0))
    assert cuts == {**square, "up.weight": Shard(0), "down.weight": Shard(1)}
    weights = {name: p.detach().clone() for name, p in task.named_parameters()}
    for p in task.parameters():
        p.grad = torch.randn_like(p)
        dist.broadcast(p.grad, 0)
    gradients = {name: p.grad for name, p in task.named_parameters()}
    of_machine = placements(task, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    shard(task, mesh["shard"], dimensions=of_machine)
    part = mesh.get_local_rank("shard")
    for matrix in (m for block in blocks_of(task) for m in block):
        whole = gradients[matrix.name]
        piece = matrix.part_of(whole)
        dimension = 1 if matrix.name.endswith("down.weight") else 0
        assert torch.equal(piece, whole.chunk(2, dim=dimension)[part]) and piece.shape == matrix.shape
        lesser_first = piece.T if piece.shape[0] > piece.shape[1] else piece
        assert torch.equal(matrix.in_shape(lesser_first).full_tensor(), whole)
        assert torch.equal(matrix.parameter.full_tensor(), weights[matrix.name])


def check_full_rank(plain):
    """Full rank on a 32-bit wire is plain averaging: sharded, clipped or not, overlapped or not."""
    moved = (plain.weights[-1] - plain.weights[0]).abs().max()
    for overlap in (False, True):
        _, exact = run(powersgd={**EXACT, "overlap": overlap}, fsdp=MACHINES)
        near(plain, exact, 1e-5 * moved)  # rounding in each step
    assert moved > 0.05
    _, ddp = run(powersgd={**EXACT, "clip": 0.3})
    _, clipped = run(powersgd={**EXACT, "clip": 0.3, "overlap": True}, fsdp={**MACHINES, "full_shard": True})
    near(ddp, clipped, 1e-5 * moved)
    assert (clipped.weights[-1] - plain.weights[-1]).abs().max() > 0.01


def check_drivers(plain):
    """Overlapped or not, results are equal, also if blocks overflow; and they differ from plain averaging."""
    runs = [run(powersgd={"rank": 4, "overlap": o}, fsdp=MACHINES, batches=8)[1] for o in (False, True)]
    equal(*runs)
    assert runs[0].losses[-1] < 0.2 * runs[0].losses[0]
    assert (runs[0].weights[BATCHES - 1] - plain.weights[-1]).abs().max() > 1e-3

    for scaled, fsdp in ((False, MACHINES), (True, MACHINES), (True, {**MACHINES, "parameters": "auto"})):
        made = [run(powersgd={"rank": 4, "overlap": o}, fsdp=fsdp, scaled=scaled, bad_batch=3) for o in (False, True)]
        equal(*(watch for _, watch in made))
        for trainer, watch in made:
            same = [torch.equal(a, b) for a, b in zip(watch.weights, watch.weights[1:], strict=False)]
            assert same == [number == 2 for number in range(BATCHES - 1)]
            assert trainer.levers[-2].compressor.rank == 2  # of 4 over the two devices of a machine
            # The sharding lever comes last, and has no count.
            assert {a.skipped for a in trainer.levers[:-1]} == {1}
            if scaled:
                exponents = trainer.levers[0].scales.exponents
                assert (exponents < 13).tolist() == [True, False]  # the third parameter is the first block's


def check_overlap():
    """Blocks are compressed in the backward pass, the last one first, before the gradients come of what is outside of
    them: in fp16 these are with those of norms."""
    order, start, begin = [], Overlap._start, Overlap.begin

    def begin_and_watch(overlap, passes):
        if not order:
            embedding = next(p for p in tasks[-1].parameters())
            embedding.register_post_accumulate_grad_hook(lambda _: order.append("outside"))
        begin(overlap, passes)

    def note_and_start(overlap, number):
        order.append(number)
        start(overlap, number)

    tasks = []
    for parameters in ("fp32", "auto"):
        with (
            mock.patch.object(powersgd_ranks, "WordTask", lambda: tasks.append(WordTask()) or tasks[-1]),
            mock.patch.object(Overlap, "begin", begin_and_watch),
            mock.patch.object(Overlap, "_start", note_and_start),
        ):
            fsdp = {**MACHINES, "parameters": parameters}
            run(powersgd={"rank": 4, "overlap": True}, fsdp=fsdp, scaled=True)
        assert order == ["outside", 1, 0, "outside"] * BATCHES, (parameters, order)  # of two microbatches
        order.clear()


class Filters(Callback):
    """As if the first block had overflowed on one rank where it is entered: a filter hides that from its gradients."""

    def after_loss(self, state, logger):
        (scaling,) = (lever for lever in state.algorithms[0].levers if isinstance(lever, ResblockGradScaling))
        scaling.filtered[0] = int(dist.get_rank() == 1)


def check_overflows():
    """Such batches are skipped, and leave the same errors with and without overlap."""
    errors = []
    for overlap in (False, True):
        options = {"powersgd": {"rank": 4, "overlap": overlap}, "fsdp": {**MACHINES, "parameters": "auto"}}
        trainer, _ = run(scaled=True, batches=2, callbacks=[Filters()], **options)
        scaling, averaging = trainer.levers[:2]
        assert scaling.skipped == averaging.skipped == 2
        errors.append([error for state in averaging.states for error in state.errors])
    assert all(torch.equal(one, other) for one, other in zip(*errors, strict=True))


def check_once_per_batch(plain):
    """Gradients that are summed over shards once per batch are the same, also with PowerSGD."""
    moved = (plain.weights[-1] - plain.weights[0]).abs().max()
    # Three units; of two microbatches, twice in each. The root of torch 2.7 is not freed before the backward pass.
    for full_shard, gathers in ((False, 3), (True, 10 if torch.__version__ < (2, 8) else 12)):
        fsdp = {"replicas": 1, "sync": "batch", "full_shard": full_shard}
        with (
            mock.patch.object(_fsdp_param_group, "foreach_reduce", wraps=_fsdp_param_group.foreach_reduce) as sums,
            mock.patch.object(
                _fsdp_param_group, "foreach_all_gather", wraps=_fsdp_param_group.foreach_all_gather
            ) as all_,
        ):
            _, once = run(fsdp=fsdp)
        near(plain, once, 1e-5 * moved)
        assert sums.call_count == BATCHES * 3
        assert all_.call_count <= BATCHES * gathers, (full_shard, all_.call_count)
    begun, finish = [], Overlap.finish

    def look_and_finish(overlap):
        begun.append(None not in overlap.results)
        return finish(overlap)

    with mock.patch.object(Overlap, "finish", look_and_finish):
        _, exact = run(powersgd={**EXACT, "overlap": True}, fsdp={**MACHINES, "sync": "batch"})
    near(plain, exact, 1e-5 * moved)
    assert begun == [True] * BATCHES  # each block in the backward pass
    if torch.__version__ >= (2, 8):  # before, FSDP2 averages over no replicas on a CPU
        _, replicated = run(fsdp={**MACHINES})
        near(plain, replicated, 1e-5 * moved)


def check_formats():
    """Blocks with gradient scales are gathered in fp16, in which they compute, so that no number changes."""
    low, whole = (
        run(scaled=True, fsdp={"replicas": 1, "parameters": parameters, "full_shard": True})
        for parameters in ("auto", "fp32")
    )
    equal(low[1], whole[1])
    seen = {}
    for trainer, name in ((low[0], "low"), (whole[0], "whole")):
        task = trainer.state.model.task
        for part in ("layers.0.branch.1", "layers.0.branch.0", "head"):
            module = task.get_submodule(part)
            module.register_forward_pre_hook(lambda m, _, k=(name, part): seen.__setitem__(k, m.weight.dtype))
        task(next(iter(trainer.state.train_dataloader)))
    assert seen == {
        (name, part): torch.float32 for name in ("low", "whole") for part in ("layers.0.branch.0", "head")
    } | {
        ("low", "layers.0.branch.1"): torch.float16,
        ("whole", "layers.0.branch.1"): torch.float32,
    }
    refused("resblock_grad_scaling computes in fp16", scaled=True, fsdp={"replicas": 1, "parameters": "bf16"})


def check_resumption(folder: Path):
    """Errors continue from both kinds of checkpoint, also on four machines of one device, or without sharding."""
    low_rank = {**EXACT, "rank": 4}
    for kind, name in (("sharded", f"ep0-ba{HALF}"), ("full", f"ep0-ba{HALF}-rank0.pt")):
        fsdp = {**MACHINES, "checkpoints": kind}
        _, whole = run(powersgd={**low_rank, "overlap": True}, fsdp=fsdp, folder=folder / kind)
        saved = str(folder / kind / name)
        _, resumed = run(powersgd=low_rank, fsdp=fsdp, load_path=saved)
        assert len(resumed.weights) == HALF
        resumed.weights[:0] = whole.weights[:HALF]
        equal(whole, resumed)
        # Machines of one device, and runs without sharding (which need a full checkpoint), take over the same errors.
        for other in ({**fsdp, "replicas": 4}, None)[: 1 if kind == "sharded" else 2]:
            _, moved_on = run(powersgd=low_rank, fsdp=other, load_path=saved)
            assert len(resumed.errors) == 4
            assert len(moved_on.errors) == (0 if other is None and dist.get_rank() else 4)
            for key, total in moved_on.errors.items():
                assert total.abs().max() > 1e-4
                torch.testing.assert_close(resumed.errors[key], total, rtol=1e-5, atol=1e-7)


def check_more_ranks(folder: Path):
    """Four ranks go on from a checkpoint of two. What is sent is linear in the sum of gradients and errors over ranks,
    and batches are the same, so nothing but the order of additions differs."""
    two = torch.load(folder / "two.pt", weights_only=True)["exact"]
    _, four = run(powersgd={**EXACT, "rank": 2}, load_path=two["saved"])
    assert apart(two, four) < 1e-4


def check_more_ranks_in_16_bits(folder: Path):
    """On the 1-6-9 wire each rank's part is rounded, so that the number of ranks matters, by no more than the rounding.

    Each number on the wire is rounded twice, by up to 2^-10 of it, and what is sent changes the weights.
    """
    two = torch.load(folder / "two.pt", weights_only=True)["rounded"]
    saved = {}
    load = PowerSGD.load_state_dict

    def keep(self, state):
        saved.update(state["errors"])
        load(self, state)

    with mock.patch.object(PowerSGD, "load_state_dict", keep):
        trainer, four = run(powersgd={"rank": 2}, load_path=two["saved"])
    projections = [q for state in trainer.levers[0].states for q in state.projections]
    assert all(torch.equal(q, other) for q, other in zip(projections, two["projections"], strict=True))
    for name, total in four.errors.items():  # on the first rank; each rank's share of the sum is rounded once
        assert total.abs().max() > 1e-2
        assert ((total - saved[name]).abs() <= 2**-10 * saved[name].abs() + 4 * 2**-69).all()
    assert apart(two, four) < 2**-9
    with mock.patch.object(PowerSGD, "load_state_dict"):
        _, forgot = run(powersgd={"rank": 2}, load_path=two["saved"])
    assert apart(two, forgot) > 10 * 2**-9


def apart(two, four):
    """Largest difference of weights after the batches of `four`, as a part of the largest change since the first."""
    batches = len(four.weights)
    assert 0 < batches < len(two["weights"])
    moved = (two["weights"][-1] - two["weights"][0]).abs().max()
    return (torch.stack(four.weights) - two["weights"][-batches:]).abs().max() / moved


def refused(message, **arguments):
    try:
        run(**arguments)
    except ValueError as error:
        assert message in str(error), error
        return
    raise AssertionError(f"not refused: {message}")


def check_refusals():
    refused("only one replica", powersgd={"rank": 4}, fsdp={"replicas": 1})


def main() -> None:
    os.environ.setdefault("NODE_RANK", "0")  # Composer asks for it
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    check_compressor()
    check_parts()
    _, plain = run()
    check_full_rank(plain)
    check_drivers(plain)
    check_overlap()
    check_overflows()
    check_refusals()
    check_formats()
    check_once_per_batch(plain)
    check_resumption(Path(sys.argv[1]))
    check_more_ranks(Path(sys.argv[2]))
    check_more_ranks_in_16_bits(Path(sys.argv[2]))
    print("all as it should be", flush=True)
    dist.barrier()
    os._exit(0)  # Composer's threads


if __name__ == "__main__":
    main()
