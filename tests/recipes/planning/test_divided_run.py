"""Memory and time of one way to divide a small transformer, against closed forms."""

import dataclasses
from pathlib import Path

import pytest

from recipes.config.recipe import Recipe, load_config
from recipes.planning.devices import Devices
from recipes.planning.divided_run import Cluster, Memory, Setting
from recipes.planning.footprint import gradient_traffic
from recipes.planning.hardware.gpus import Device, Shares
from recipes.planning.plan import Planner
from recipes.planning.settings import best_of, settings_of
from recipes.planning.step_time import LAUNCH, StepTime

ROOT = Path(__file__).resolve().parents[3]
DEVICE = Device("none", memory=100e9, bandwidth=1e12, within=100e9, between=80e9)
SHARES = Shares(compute=0.5, memory=0.8, links=0.5, gap=1e-6)
SIZES = "layers: 2, width: 32, heads: 4, text_positions: 8, text_vocabulary: 300, side: 4, codes: 64"
PLAIN = [
    "algorithms={compile: null, scheduled_ema: null}",
    "optimizer={name: adamw, lr: 1e-3}",
    "training.global_batch=16",
]


def planner(*changes):
    own = [f"model={{name: autoregressive, {SIZES}}}", *PLAIN, "training.global_batch=16", *changes]
    return Planner(load_config(ROOT / "yamls" / "dalle_1b.yaml", own, Recipe, []))


def cluster(world, machine=8, device=DEVICE):
    return Cluster(device, 1e14, SHARES, world, machine)


@pytest.fixture(scope="module")
def plain():
    return planner()


@pytest.fixture(scope="module")
def count(plain):
    return sum(p.numel() for p in plain.task.parameters())


def runs_of(planner, world, tensor=1):
    return {run.division: run for run in planner.runs(cluster(world)) if run.devices.tensor == tensor}


@pytest.mark.parametrize(
    ("world", "division", "microbatch", "bytes_per_weight"),
    [
        (1, "DDP", 4, 0),  # nothing is averaged
        (2, "DDP", 4, 4),
        (2, "DDP", 8, 0),  # gradients lie in the buckets
        (2, "SHARD_GRAD_OP", 4, 2),  # it reduces gradients once per batch, to half of them
        (2, "SHARD_GRAD_OP", 8, 0),
        (2, "FULL_SHARD", 4, 0),  # it reduces those of each microbatch
    ],
)
def test_gradients_of_several_microbatches_are_kept_beside_those_that_are_sent(
    plain, count, world, division, microbatch, bytes_per_weight
):
    assert runs_of(plain, world)[division].memory(microbatch, False).buckets == bytes_per_weight * count


def test_full_sharding_gathers_one_block_while_another_computes(plain):
    runs = runs_of(plain, 8)
    *blocks, rest = runs["FULL_SHARD"].gathered
    assert len(blocks) == len(plain.task.blocks()) and 2 * max(blocks) < sum(blocks)
    assert runs["FULL_SHARD"].memory(2, False).working == 2 * max(blocks) + rest
    assert runs["SHARD_GRAD_OP"].memory(2, False).working == sum(blocks) + rest
    # As if the gradients were there when its only pass begins.
    assert runs["FULL_SHARD"].memory(2, False).activations == pytest.approx(plain.passes(1).kept.peak(2))


def test_weights_and_gradients_that_are_stored_in_16_bits():
    low = planner(
        "algorithms={scaling: {name: resblock_grad_scaling, weights: fp16}}",
        "optimizer={name: adam16, lr: 1e-3}",
        "training.precision=fp32",
    )
    run = runs_of(low, 1)["DDP"]
    count, stored = sum(p.numel() for p in low.task.parameters()), run.costs.stored_16_bit
    assert 0 < stored < count
    assert run.copies(recompute=False) == (2 * (count - stored),) * 2
    kept, memory = low.passes(1).kept, run.memory(16, False)
    per_gradient = 4 - 2 * stored / count
    peak = kept.peak(16, per_gradient, (memory.working, memory.working))
    assert memory.activations == pytest.approx(peak - memory.working - per_gradient * count)


def test_one_device_averages_nothing(plain):
    operations = len(list(plain.traces.at(16).executed(False)))
    assert runs_of(plain, 1)["DDP"].time(16, False).host == pytest.approx(LAUNCH * operations)


def test_two_replicas_average_the_part_that_each_device_has(plain, count):
    divided = sum(p.numel() for p in plain.task.parameters() if id(p) in plain.task.tensor_plan().dimensions())
    assert gradient_traffic(plain.task, Devices(4, 2, 2)) == 4 * (count - divided / 2)


def test_levers_for_whole_copies_are_left_out_where_matrices_are_divided():
    found = planner("algorithms={averages: {name: block_all_reduce}}")
    assert runs_of(found, 2)["DDP"].recipe.algorithms
    (divided,) = runs_of(found, 2, tensor=2).values()
    assert divided.division == "no FSDP" and not divided.recipe.algorithms


def test_links_are_needed_where_something_is_sent_over_them(plain):
    alone, inside = (dataclasses.replace(DEVICE, between=None, within=within) for within in (None, 1e11))
    cluster(1, device=alone).check_links()
    cluster(8, device=inside).check_links()  # a whole machine sends nothing to others
    with pytest.raises(ValueError, match="within a machine were not measured"):
        cluster(2, device=alone).check_links()
    with pytest.raises(ValueError, match="give --between"):
        cluster(9, device=inside).check_links()


def test_the_batch_of_a_device_is_a_microbatch(plain):
    run = dataclasses.replace(runs_of(plain, 1)["DDP"], batch=12)
    assert sorted({setting.microbatch for setting in settings_of([run])}) == [1, 2, 4, 8, 12]


@pytest.mark.parametrize(
    ("seconds", "messages", "memory", "best"),
    [
        ((1.0, 1.02), (0.9, 0.1), (1e9, 1e9), 0),  # 2% faster
        ((1.0, 1.005), (0.9, 0.1), (1e9, 1e9), 1),  # as fast, and sends less
        ((1.0, 1.005), (0.5, 0.505), (2e9, 1e9), 1),  # sends as much, and takes less memory
        ((1.0, 1.005), (0.5, 0.505), (1e9, 2e9), 0),
    ],
)
def test_differences_of_a_hundredth_decide_nothing(seconds, messages, memory, best):
    settings = [
        Setting(
            "DDP",
            1,
            8,
            False,
            Memory(state=size, working=0, buckets=0, algorithms=0, activations=0, others=0),
            StepTime(compute=second, traffic=0, update=0, gaps=0, messages=message, host=0),
        )
        for second, message, size in zip(seconds, messages, memory, strict=True)
    ]
    assert best_of(settings, DEVICE) is settings[best]


def test_products_and_messages_of_an_optimizer_are_counted(plain):
    by_muon = planner("optimizer={name: muon, lr: 0.02, adamw_lr: 1e-3}")
    blocks = [p for block in by_muon.task.blocks() for p in block.parameters() if p.ndim == 2]
    work = 0
    for p in blocks:
        short, long = sorted(p.shape)
        work += 5 * (4 * short**2 * long + 2 * short**3)
    values, rate = sum(p.numel() for p in blocks), 0.5 * 1e14
    for division, gathered in (("DDP", 0), ("SHARD_GRAD_OP", 4 * values * 15 / 16)):
        usual, own = (runs_of(p, 16)[division].time(1, False) for p in (plain, by_muon))
        assert own.update - usual.update == pytest.approx(work / 16 / rate)
        # The ring of 16 devices in two machines passes each adapter once, which is slower than links within.
        sent = gathered + 2 * (15 / 16) * 2 * values
        assert usual.exposed == 0 and own.exposed == pytest.approx(sent / (0.5 * 80e9))
        assert own.total >= own.device + own.exposed
