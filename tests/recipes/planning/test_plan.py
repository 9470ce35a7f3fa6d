"""The planner: operations and memory against naive counts, times against closed forms, and what it prints."""

import copy
import dataclasses
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from data.cost import size_text
from recipes.algorithms.gradients.blocks import block_matrices
from recipes.config.build import build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.config.values import Component
from recipes.engines.dry_run_checks import levers_on_gpus
from recipes.planning.batches import blank_batch, sample_bytes
from recipes.planning.devices import Devices
from recipes.planning.divided_run import BLOCKS, USABLE, WORKSPACE, Cluster
from recipes.planning.hardware.gpus import Device, Shares
from recipes.planning.plan import Planner
from recipes.planning.settings import best_of, settings_of
from recipes.planning.step_time import (
    BY_BLOCK,
    BY_DDP,
    BY_UNIT,
    CAPTURED,
    COMPILED,
    LAUNCH,
    UPDATE_BYTES,
    StepTime,
    message_seconds,
    pass_times,
)
from recipes.planning.tracing.trace import PASSES, Operation, Trace, trace

ROOT = Path(__file__).resolve().parents[3]
SMALL = ["model.denoiser.channels=[32,32]", "model.denoiser.attention=[true,false]", "model.denoiser.heads=[1,1]"]
DEVICE = Device("none", memory=100e9, bandwidth=1e12, within=100e9, between=80e9)
SHARES = Shares(compute=0.5, memory=0.8, links=0.5, gap=0.0)


@pytest.fixture(scope="module")
def recipe():
    return load_config(ROOT / "yamls" / "sd2_base.yaml", [*SMALL, "data.resolution=64"], Recipe, [])


@pytest.fixture(scope="module")
def planner(recipe):
    return Planner(recipe)


def test_operations_are_those_that_pytorch_counts(recipe, planner):
    task, batch = build_on_meta(recipe.model), blank_batch(recipe, planner.task, 3)
    with FlopCounterMode(display=False) as counter:
        loss = task(batch)["total"]
    found = planner.traces.at(3)
    assert found.flops == counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    # Fused attention computes its scores again, which is half of its forward pass.
    again = sum(o.flops for o in found.operations if o.kind == "attention") / 2
    assert again and sum(o.flops for o in found.backward) == counter.get_total_flops() + again


def test_any_number_of_samples_follows_from_two(recipe, planner):
    task = build_on_meta(recipe.model).to(torch.bfloat16)
    direct, line = trace(task, blank_batch(recipe, task, 7)), planner.traces.at(7)
    assert line.flops == direct.flops
    for way in PASSES:
        assert sum(o.bytes for o in getattr(line, way)) == sum(o.bytes for o in getattr(direct, way)), way
    assert sum(o.flops for o in line.backward) == sum(o.flops for o in direct.backward)


def test_a_model_whose_operations_depend_on_values_is_said(recipe, monkeypatch):
    target = "recipes.models.latent_diffusion.task.LatentDiffusion.forward"
    monkeypatch.setattr(target, lambda self, batch: batch["latents"].sum().item())
    with pytest.raises(ValueError, match="^model: the operations of UNet depend on values .*test_plan.py, line"):
        Planner(recipe)


def test_the_batches_of_data_of_your_own_are_not_known(recipe, planner):
    own = dataclasses.replace(recipe, data=Component("data", "mine.random", {"count": 64}, "mine:random", "data"))
    with pytest.raises(ValueError, match="^data.name: plan.py knows the batches of latents, not those of mine.random"):
        blank_batch(own, planner.task, 3)


class TwoLayers(nn.Module):
    """x -> linear -> relu -> linear -> mean; the first two layers are what recomputation covers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU())
        self.last = nn.Linear(16, 4, bias=False)

    def forward(self, batch):
        return {"total": self.last(self.first(batch["x"])).mean()}

    def recomputed_blocks(self):
        return [self.first]

    def forward_flops(self):
        return None


def test_operations_of_two_layers_are_those_of_the_closed_form():
    with torch.device("meta"):
        found = trace(TwoLayers().to(torch.bfloat16), {"x": torch.empty(5, 8)})
    products = [operation for operation in found.operations if operation.kind == "product"]
    first, last = 2 * 5 * 8 * 16, 2 * 5 * 16 * 4
    assert [(o.flops, o.recomputed) for o in products] == [(first, True), (last, False)]
    # The last layer needs the gradients of its weight and of its input, the first that of its weight.
    assert sorted(o.flops for o in found.backward if o.kind == "product") == sorted([first, last, last])
    assert sum(o.flops for o in found.executed(True)) == 3 * first + 3 * last
    assert products[0].bytes == 2 * (5 * 8 + 8 * 16 + 5 * 16)


class Dropping(nn.Module):
    """A weight, and dropout."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        self.drop = nn.Dropout(0.1)

    def forward(self, batch):
        return {"total": self.drop(batch["x"] * self.weight).sum()}

    def recomputed_blocks(self):
        return []

    def forward_flops(self):
        return None


def test_dropout_is_one_operation_that_writes_a_byte_per_value():
    """As on a GPU. On the meta device PyTorch would draw numbers, scale them and multiply."""
    with torch.device("meta"):
        task = Dropping().to(torch.bfloat16)
        batch = {"x": torch.empty(5, 8)}
        dropped, whole = trace(task, batch), trace(task.eval(), batch)
    (more,) = set(o.bytes for o in dropped.operations) - set(o.bytes for o in whole.operations)
    assert more == 5 * 8 * (2 + 2 + 1) and len(dropped.operations) == len(whole.operations) + 1


def test_an_operation_takes_as_long_as_its_arithmetic_or_its_traffic():
    product, other = Operation("product", 1e12, 1e9), Operation("other", 0, 8e9)
    both = Trace((dataclasses.replace(product, recomputed=True), other), (product, product, other))
    shares = dataclasses.replace(SHARES, gap=1e-3)
    # 1e12 / (0.5 * 1e14) = 0.02 s of arithmetic; 8e9 / (0.8 * 1e12) = 0.01 s of traffic.
    assert pass_times(both, DEVICE, 1e14, shares, recompute=False) == pytest.approx((0.06, 0.02, 0.005))
    assert pass_times(both, DEVICE, 1e14, shares, recompute=True) == pytest.approx((0.08, 0.02, 0.006))


@pytest.mark.parametrize(
    ("messages", "host", "total", "bound"),
    [(1, 6, 7, "arithmetic"), (1, 8, 8, "the host's launches"), (6, 7, 8, "messages")],
)
def test_a_step_takes_what_takes_longest(messages, host, total, bound):
    """The GPU works for 5 s and waits for 2 s for messages, which others can come on top of."""
    time = StepTime(compute=3, traffic=1, update=1, gaps=0, messages=messages, host=host, exposed=2)
    assert (time.device, time.total, time.bound) == (5, total, bound)


@pytest.mark.parametrize(
    ("within", "between", "devices", "seconds"),
    [
        (1e9, 0, Devices(8, 1), 1 / 50),  # in one machine: 0.5 * 100 GB/s
        (1e9, 0, Devices(16, 1), 1 / 40),  # over two: 0.5 * 80 GB/s
        (0, 1e9, Devices(16, 16), 1 / 40),  # DDP over two machines is one ring
        (0, 1e9, Devices(16, 2), 8 / 40),  # eight rings share the adapters
        (0, 1e9, Devices(32, 2), 8 / 40),  # of each machine
        (0, 1e9, Devices(4, 4), 1 / 50),
        (0, 1e9, Devices(8, 8), 1 / 50),  # a whole machine sends nothing to others
        (0, 1e9, Devices(8, 2), 1 / 50),
        (1e9, 0, Devices(8, 1, 2), 1 / 50),  # parts of matrices in one machine
        (1e9, 0, Devices(16, 1, 2), 2 / 40),  # two rings, one for each part, share the adapters
        (0, 1e9, Devices(16, 8, 2), 2 / 40),
    ],
)
def test_messages_take_what_the_narrowest_link_allows(within, between, devices, seconds):
    assert message_seconds(within, between, devices, 8, DEVICE, SHARES) == pytest.approx(seconds)


@pytest.mark.parametrize("devices", [Devices(16, 1), Devices(16, 2), Devices(16, 16)])
def test_slow_links_within_machines_bound_messages_between_them(devices):
    """A ring over several machines passes both kinds."""
    slow = dataclasses.replace(DEVICE, within=2e9)
    for sent in ((1e9, 0), (0, 1e9)):
        assert message_seconds(*sent, devices, 8, slow, SHARES) == pytest.approx(1.0)


def test_memory_is_divided_as_the_setting_says(planner):
    cluster = Cluster(DEVICE, 1e14, SHARES, 16, 8)
    count = sum(p.numel() for p in planner.task.parameters())
    found = {(s.division, s.microbatch, s.recompute): s for s in planner.settings(cluster)}
    assert found["DDP", 128, False].memory.state == 16 * count
    assert found["FULL_SHARD", 128, False].memory.state == 16 * count / 16
    assert found["FULL_SHARD within machines", 128, False].memory.state == 16 * count / 8
    ddp, gathered = found["DDP", 128, False], found["SHARD_GRAD_OP", 128, False]
    kinds = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
    norms = {id(p) for m in planner.task.modules() if isinstance(m, kinds) for p in m.parameters()}
    low = sum(p.numel() for block in planner.task.blocks() for p in block.parameters() if id(p) not in norms)
    assert gathered.memory.working == 2 * low + 4 * (count - low)
    assert ddp.time.update == pytest.approx(UPDATE_BYTES * count / 0.8e12) == 16 * gathered.time.update
    again = found["DDP", 128, True]
    assert again.memory.activations < ddp.memory.activations
    assert ddp.time.compute < again.time.compute < 4 / 3 * ddp.time.compute
    assert found["DDP", 64, False].memory.activations == pytest.approx(ddp.memory.activations / 2)


def test_a_last_microbatch_that_is_smaller_is_a_pass(planner):
    runs = {run.division: run for run in planner.runs(Cluster(DEVICE, 1e14, SHARES, 2, 8))}
    odd, even = ({name: dataclasses.replace(run, batch=batch) for name, run in runs.items()} for batch in (3, 4))
    count = sum(p.numel() for p in planner.task.parameters())
    assert [odd["DDP"].memory(microbatch, False).buckets for microbatch in (2, 3)] == [4 * count, 0]
    assert odd["FULL_SHARD"].time(2, False).messages == even["FULL_SHARD"].time(2, False).messages


def test_full_sharding_gathers_twice_in_each_pass(planner):
    cluster = Cluster(DEVICE, 1e14, SHARES, 8, 8)
    seconds = {(s.division, s.microbatch): s.time.messages for s in planner.settings(cluster) if not s.recompute}
    assert seconds["FULL_SHARD", 128] == pytest.approx(2 * seconds["FULL_SHARD", 256])
    assert seconds["SHARD_GRAD_OP", 128] == seconds["SHARD_GRAD_OP", 256]


def test_the_best_setting_is_the_fastest_that_fits(planner):
    cluster = Cluster(DEVICE, 1e14, SHARES, 8, 8)
    settings = planner.settings(cluster)
    best = best_of(settings, DEVICE)
    assert all(s.time.total >= best.time.total / 1.01 for s in settings if s.memory.fits(DEVICE))
    small = dataclasses.replace(DEVICE, memory=0.5 * best.memory.total)
    other = best_of(settings, small)
    assert other is None or other.memory.total <= 0.45 * best.memory.total
    assert best_of(settings, dataclasses.replace(DEVICE, memory=1.0)) is None


def test_of_settings_that_are_as_fast_the_best_sends_the_least(planner):
    cluster = Cluster(DEVICE, 1e14, SHARES, 8, 8)
    found = {(s.division, s.microbatch): s for s in planner.settings(cluster) if not s.recompute}
    gathered, sharded = (
        dataclasses.replace(setting, time=dataclasses.replace(setting.time, host=0.0))
        for setting in (found["SHARD_GRAD_OP", 128], found["FULL_SHARD", 128])
    )
    assert gathered.time.messages < sharded.time.messages and sharded.memory.total < gathered.memory.total

    def best(messages):
        time = dataclasses.replace(sharded.time, messages=messages)
        assert time.total == sharded.time.total <= 1.01 * gathered.time.total
        return best_of([gathered, dataclasses.replace(sharded, time=time)], DEVICE).division

    assert best(gathered.time.messages) == "FULL_SHARD"
    assert best(gathered.time.messages + 0.02 * gathered.time.total) == "SHARD_GRAD_OP"


def test_shapes_and_length_are_those_of_a_set_that_is_here(latent_sets, tmp_path):
    """They are latents of half the pictures' side, with 12 tokens, of 40 pictures."""
    own = ["data.resolution=16", "data.expect=null", "training.duration=3ep", "training.global_batch=8"]
    own += [*SMALL, "model.denoiser.text_width=16", f"output={tmp_path}"]

    def planned(*overrides):
        return Planner(load_config(ROOT / "yamls" / "sd2_base.yaml", [*own, *overrides], Recipe, []))

    def shapes(planner):
        return [tuple(planner.batches[0][name].shape[1:]) for name in ("latents", "text")]

    here = planned(f"data.streams.train.path={latent_sets}/train")
    assert shapes(here) == [(4, 8, 8), (12, 16)] and here.steps == 15
    there = planned("data.streams.train.path=nowhere", "data.expect={downsample: 4, text_length: 5}")
    assert shapes(there) == [(4, 4, 4), (5, 16)] and there.steps is None


def test_a_stored_sample_has_the_published_size():
    full = load_config(ROOT / "yamls" / "sd2_base.yaml", [], Recipe, [])
    batch = {"latents": torch.empty(2, 4, 32, 32, device="meta"), "text": torch.empty(2, 77, 1024, device="meta")}
    assert full.data.args["resolution"] == 256 and sample_bytes(batch) == 2 * (2 * 4 * 32 * 32 + 77 * 1024)


def test_one_pass_makes_gradients_while_activations_are_freed(planner):
    """Several passes, and DDP, have the gradients of all parameters at their peak."""
    one = {s.microbatch: s.memory for s in planner.settings(Cluster(DEVICE, 1e14, SHARES, 1, 8)) if not s.recompute}
    cluster = Cluster(DEVICE, 1e14, SHARES, 2, 8)
    two = {s.microbatch: s.memory for s in planner.settings(cluster) if s.division == "DDP" and not s.recompute}
    gradients = 4 * sum(p.numel() for p in planner.task.parameters())
    kept = planner.passes(1).kept
    assert two[1024].activations == kept.peak(1024) and one[1024].activations == kept.peak(1024)
    assert one[2048].activations == kept.peak(2048, 4) - gradients
    assert kept.peak(2048) - gradients <= one[2048].activations < kept.peak(2048)


@pytest.mark.parametrize(
    ("algorithms", "forward", "backward"),
    [
        ("{activation_checkpointing: {name: activation_checkpointing}}", 1.0, None),
        ("{compile: {name: compile}}", None, None),
        ("{working_weights: {name: working_weights}}", 1.0, 1.0),
    ],
)
def test_copies_of_weights_in_blocks_that_are_computed_again(algorithms, forward, backward):
    """None: outside of the blocks, and of the largest one."""
    sizes = "layers: 2, width: 32, heads: 2, positions: 64, vocabulary: 300"
    own = [f"model={{{sizes}}}", f"algorithms={algorithms}", "training.global_batch=8"]
    found = Planner(load_config(ROOT / "yamls" / "gpt2_1b.yaml", own, Recipe, []))
    run = next(run for run in found.runs(place_of(1)) if run.division == "DDP")
    blocks = [sum(p.numel() for p in block.parameters()) for block in found.task.recomputed_blocks()]
    count = sum(p.numel() for p in found.task.parameters())
    single = 2 * (count - sum(blocks) + max(blocks))
    assert run.copies(recompute=False) == (2 * count, 2 * count)
    assert run.copies(recompute=True) == tuple(single if way is None else 2 * count for way in (forward, backward))


def test_memory_beside_the_model(planner):
    """The step's batch as it is stored, a microbatch twice in 32 bits, cuBLAS's workspace, and unfilled blocks."""
    values = 4 * 8 * 8 + 77 * 1024
    found = {s.microbatch: s.memory for s in planner.settings(Cluster(DEVICE, 1e14, SHARES, 1, 8)) if not s.recompute}
    batch = 2048 * sample_bytes(planner.batches[0]) + 2 * 4 * values * 64
    memory = found[64]
    rest = memory.state + memory.working + memory.buckets + memory.algorithms + memory.activations
    assert memory.others == pytest.approx(WORKSPACE + batch + BLOCKS * (rest + WORKSPACE + batch))


def compiled(planner, options, *levers):
    """The same model with `compile`, which changes none of its operations, and other such levers."""
    found, lever = copy.copy(planner), f"algorithms.compile={{name: compile, {options}}}"
    changes = [*SMALL, "data.resolution=64", lever, *levers]
    found.recipe = load_config(ROOT / "yamls" / "sd2_base.yaml", changes, Recipe, [])
    return found


def test_the_host_launches_less_with_cuda_graphs_which_fsdp_does_not_allow(planner):
    """So their rows are those of a run without graphs, and say so."""

    def launches(mode):
        return {run.division: run.time(128, False).host for run in compiled(planner, f"mode: {mode}").runs(place_of(8))}

    eager = 2 * LAUNCH * len(list(planner.traces.at(128).executed(False)))  # two microbatches
    averaging = BY_DDP * len(list(planner.task.parameters()))
    units = 1 + len(planner.task.blocks())
    without = {
        f"{name}, without CUDA graphs": pytest.approx(eager + 2 * units * seconds) for name, seconds in BY_UNIT.items()
    }
    for mode in ("reduce-overhead", "max-autotune"):
        assert launches(mode) == {"DDP": pytest.approx(COMPILED * eager + averaging), **without}
    found = launches("max-autotune-no-cudagraphs")
    assert found["DDP"] == pytest.approx(eager + averaging) and set(found) == {"DDP", "SHARD_GRAD_OP", "FULL_SHARD"}


def test_cuda_graphs_need_whole_copies_that_are_averaged_by_block(planner):
    """And nothing is computed again."""
    levers = ["algorithms.graphs={name: cuda_graphs}", "algorithms.averages={name: block_all_reduce}"]
    found = {run.division: run for run in compiled(planner, "mode: default", *levers).runs(place_of(8))}
    assert set(found) == {"DDP", "SHARD_GRAD_OP, without CUDA graphs", "FULL_SHARD, without CUDA graphs"}
    assert not {"graphs", "averages"} & set(found["FULL_SHARD, without CUDA graphs"].recipe.algorithms)
    eager = 2 * LAUNCH * len(list(planner.traces.at(128).executed(False)))
    averaging = BY_BLOCK * len(list(planner.task.parameters()))
    assert found["DDP"].time(128, False).host == pytest.approx(CAPTURED * eager + averaging)
    assert {s.recompute for s in settings_of([found["DDP"]])} == {False}
    assert {s.recompute for s in settings_of([found["FULL_SHARD, without CUDA graphs"]])} == {False, True}
    without = compiled(planner, "mode: default", levers[0])
    without.check = levers_on_gpus
    assert {run.division for run in without.runs(place_of(8))} == set(found) - {"DDP"}
    left_out = "DDP: left out: cuda_graphs: DistributedDataParallel does not see the gradients of graphs; add "
    assert left_out in without.report([place_of(8)], None)
    assert left_out not in without.report([place_of(1)], None)


def test_ways_whose_levers_a_run_refuses_are_left_out(planner):
    """Of `powersgd`: that overlaps, without FSDP; whose rank the devices of a machine do not divide."""
    overlapped = compiled(planner, "mode: default", "algorithms.low={name: powersgd, rank: 16, overlap: true}")
    odd = compiled(planner, "mode: default", "algorithms.low={name: powersgd, rank: 12}")
    for found, left_out in ((overlapped, {"DDP": "needs"}), (odd, {"FULL_SHARD within machines": "is not divis"})):
        found.check, told = levers_on_gpus, {}
        every = {"DDP", "SHARD_GRAD_OP, without powersgd", "FULL_SHARD, without powersgd", "FULL_SHARD within machines"}
        cluster = Cluster(DEVICE, 100e12, SHARES, 16, 8)
        assert {run.division for run in found.runs(cluster, told)} == every - set(left_out)
        assert set(told) == set(left_out)
        for way, message in left_out.items():
            assert told[way].startswith("powersgd: ") and message in told[way]
    odd.check = Mock(side_effect=[ValueError("the first reason"), *[ValueError("another")] * 3])
    with pytest.raises(ValueError, match="^the first reason$"):
        odd.settings(place_of(8))


def test_gradients_are_averaged_by_block_where_nothing_is_divided(planner):
    lever = "algorithms.averages={name: block_all_reduce, wire: bf16}"
    runs = {run.division: run for run in compiled(planner, "mode: default", lever).runs(place_of(8))}
    assert set(runs) == {"DDP", "SHARD_GRAD_OP", "FULL_SHARD"}
    plain = {run.division: run for run in compiled(planner, "mode: default").runs(place_of(8))}
    for microbatch in (128, 256):  # of 256
        memory, other = (by["DDP"].memory(microbatch, False) for by in (runs, plain))
        assert memory.algorithms == 2 * sum(p.numel() for p in planner.task.parameters())
        assert (memory.buckets, other.buckets) == (0, 2 * memory.algorithms if microbatch == 128 else 0)
        assert memory.activations == other.activations
    assert runs["DDP"].sent(2)[1] == plain["DDP"].sent(2)[1] / 2
    assert "averages" not in runs["FULL_SHARD"].recipe.algorithms
    tensors = len(list(planner.task.parameters()))
    assert plain["DDP"].time(128, False).host - runs["DDP"].time(128, False).host == pytest.approx(
        tensors * (BY_DDP - BY_BLOCK)
    )


def test_ways_in_which_a_block_would_not_be_one_graph_are_left_out(planner):
    """FSDP gathers blocks in the midst of a network."""
    whole = compiled(planner, "whole: true, fullgraph: true").runs(place_of(8))
    assert {run.division for run in whole} == {"DDP"}
    blocks = compiled(planner, "fullgraph: true").runs(place_of(8))
    assert {run.division for run in blocks} == {"DDP", "SHARD_GRAD_OP", "FULL_SHARD"}


def test_where_nothing_fits_the_report_says_what_does(planner):
    tiny = dataclasses.replace(DEVICE, memory=1e6)
    text = planner.report([Cluster(tiny, 1e14, SHARES, 8, 8)], None)
    assert "nothing fits; the least is FULL_SHARD, microbatch 1, recomputing: " in text
    assert ", which fits on v100-16, " in text and "; nor does it fit on more GPUs of this kind" in text


def test_what_fits_on_more_devices_than_are_linked_here(planner):
    """The report names their number, and how much memory the ways that do not fit take."""
    (least,) = [run.memory(1, True).total for run in planner.runs(place_of(1))]
    small = dataclasses.replace(DEVICE, memory=0.9 * least, within=None, between=None)  # measured on one GPU alone
    text = planner.report([Cluster(small, 1e14, SHARES, 1, 1)], None)
    assert f"the least is DDP, microbatch 1, recomputing: {size_text(least)}, which fits on v100-16, " in text
    assert text.endswith("; or on 2 GPUs of this kind")
    settings = planner.settings(place_of(8))
    least = {way: min(s.memory.total for s in settings if s.way == way) for way in {s.way for s in settings}}
    between = dataclasses.replace(DEVICE, memory=(least["DDP"] + least["FULL_SHARD"]) / 2 / USABLE)
    text = planner.report([Cluster(between, 1e14, SHARES, 8, 8)], None)
    assert f"\n  DDP: does not fit, {size_text(least['DDP'])} at the least\n" in text
    assert re.search(r"\n  FULL_SHARD, microbatch \d+.* s, [\d.]+ MB; microbatch \d+ would take [\d.]+ MB$", text)


@pytest.fixture(scope="module")
def tokens():
    sizes = "layers: 2, width: 32, heads: 4, text_positions: 8, text_vocabulary: 300, side: 4, codes: 64"
    own = ["training.global_batch=8", "optimizer={name: adamw, lr: 1e-3}"]
    overrides = [f"model={{name: autoregressive, {sizes}}}", *own]
    return Planner(load_config(ROOT / "yamls" / "dalle_12b.yaml", overrides, Recipe, []))


def test_a_transformer_over_tokens_counts_visible_pairs_only(tokens):
    assert tokens.traces.at(4).flops == pytest.approx(4 * tokens.task.forward_flops())


def test_each_device_computes_and_holds_its_part_of_divided_matrices(tokens):
    whole, half = tokens.traces.at(4), tokens.divided(2).at(4)
    assert half.flops == pytest.approx(whole.flops / 2)  # all products are divided: heads, inner width and tokens
    assert len(half.operations) == len(whole.operations)
    # Norms, the residual stream and its sums are not divided.
    moved = [sum(operation.bytes for operation in one.operations) for one in (whole, half)]
    assert moved[0] / 2 < moved[1] < moved[0]
    found = {(s.tensor, s.division, s.microbatch): s for s in tokens.settings(place_of(4)) if not s.recompute}
    plan, count = tokens.task.tensor_plan(), sum(p.numel() for p in tokens.task.parameters())
    divided = sum(p.numel() for p in tokens.task.parameters() if id(p) in plan.dimensions())
    own = count - divided + divided / 2
    pair, single = (found[tensor, "FULL_SHARD, without powersgd", samples] for tensor, samples in ((2, 4), (1, 2)))
    assert pair.memory.state == pytest.approx(16 * own / 2)
    assert pair.memory.working < single.memory.working
    # A group of two computes twice the samples of a device, each in half the time.
    assert pair.time.compute <= single.time.compute * 1.001


def place_of(world, machine=8, shares=SHARES):
    return Cluster(DEVICE, 1e14, shares, world, machine)


def test_devices_that_divide_matrices_wait_for_their_messages(tokens):
    shares = dataclasses.replace(SHARES, gap=1e-6)
    found = {(s.tensor, s.microbatch): s for s in tokens.settings(place_of(4, shares=shares)) if not s.recompute}
    # Per sample, 8 all-reduces of 24 positions x 32 in 16 bits; of the loss, two floats of 23 rows from each device,
    # and one all-reduce of their gradient. Four devices have a batch of 8 samples.
    ring, others = 2 * 3 / 4, 3
    sent = 8 * (ring * 2 * (8 * 24 * 32 + 23 * 32) + others * 8 * 23)
    assert found[4, 8].time.exposed == pytest.approx(sent / 50e9 + 10 * 1e-6)
    assert found[4, 2].time.exposed == pytest.approx(sent / 50e9 + 4 * 10 * 1e-6)  # in four passes
    assert found[4, 8].time.total >= found[4, 8].time.exposed + found[4, 8].time.device
    assert found[1, 2].time.exposed == 0


def test_powersgd_is_left_out_where_there_is_one_replica(tokens):
    settings = tokens.settings(place_of(8, machine=4))  # the recipe has it
    found = {s.division: s.memory.algorithms for s in settings if s.tensor == 1}
    alone = {f"{name}, without powersgd" for name in ("SHARD_GRAD_OP", "FULL_SHARD")}
    assert found.keys() == {"DDP", "FULL_SHARD within machines"} | alone
    assert not any(found[name] for name in alone) and found["FULL_SHARD within machines"] > 0 < found["DDP"]
    size = 4 * sum(p.numel() for block in block_matrices(tokens.task, "test") for p in block)  # errors in checkpoints
    assert f", {size_text(size)} less in settings without powersgd, " in tokens.report([place_of(8, machine=4)], None)


def test_groups_can_be_more_than_samples(tokens):
    """16 devices have no batch of 8 samples, but groups of 2 or 4 do. Eight cannot divide four heads."""
    settings = tokens.settings(place_of(16))
    assert {s.tensor for s in settings} == {2, 4}
    text = tokens.report([place_of(16)], None)
    assert re.search(r"^16 GPUs \(.*\): tensor_parallel [24], \w+", text, re.MULTILINE)
    assert all(f"\n  tensor_parallel {n}, " in text for n in (2, 4)) and "exposed messages" in text
