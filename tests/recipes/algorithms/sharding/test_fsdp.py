"""Sharded training against whole training; blocks that are computed again."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from recipes.algorithms.modules.activation_checkpointing import recompute
from recipes.algorithms.sharding.fsdp import Sharding
from recipes.algorithms.sharding.shard import check_shardable, is_sharded, shard
from recipes.config.build import build
from recipes.config.recipe import Recipe, load_config
from recipes.engines import first_weights, parts
from recipes.models.task import Task
from recipes.planning import dry_run
from recipes.planning.divided_run import Cluster
from recipes.planning.hardware.gpus import DEVICES, SHARES
from recipes.planning.plan import Planner
from tests.recipes.algorithms.sharding.fsdp_ranks import CONTRASTIVE, GRADIENTS, LOW_PRECISION, RUN, RUNS, UNITS, WIDER
from tests.recipes.training.fake_run import FakeRun


@pytest.mark.slow
@pytest.mark.parametrize("check", [GRADIENTS, LOW_PRECISION, UNITS, CONTRASTIVE, RUNS])
def test_two_ranks(two_ranks, check):
    two_ranks(check)


@pytest.mark.slow
def test_what_two_ranks_wrote_is_opened_by_one(two_ranks, quick_recipe, tmp_path):
    written = two_ranks(RUNS)
    denoiser = build(quick_recipe(tmp_path, WIDER).model).denoiser
    for part in (denoiser.folder, f"{denoiser.folder}_ema"):
        weights = []
        for run in ("ddp", "sharded", "full"):
            denoiser.load(written / run / "export" / part)
            weights.append({name: tensor.clone() for name, tensor in denoiser.state_dict().items()})
        for other in weights[1:]:
            for name, tensor in other.items():
                torch.testing.assert_close(tensor, weights[0][name], rtol=1e-3, atol=1e-4, msg=name)
    for run in ("sharded", "full"):
        grids = sorted(path.name for path in (written / run / "samples").iterdir())
        assert grids == ["ba0000003.png", "ba0000004.png"]
    # One process goes on from what two have saved, sharded or not.
    from recipes.engines.composer.trainer import build_trainer

    for run, name, fsdp in (("full", "ep0-ba2-rank0.pt", "null"), ("sharded", "ep0-ba2", "{}")):
        path = written / run / "checkpoints" / name
        overrides = [*RUN, WIDER, f"checkpoints.load_path={path}", f"training.fsdp={fsdp}", "training.global_batch=8"]
        trainer = build_trainer(quick_recipe(tmp_path / f"{run}-alone", *overrides))
        assert trainer.state.timestamp.batch.value == 2
        assert is_sharded(trainer.state.model) == (run == "sharded")
        trainer.fit()
        assert trainer.state.timestamp.batch.value == 4
        trainer.close()


@pytest.mark.slow
def test_weights_gradients_moments_and_average_take_what_the_planner_says(two_ranks, quick_recipe, tmp_path):
    """On each rank, between steps, all tensors that are alive. The rest, such as a batch and tables, is below 5%."""
    written = two_ranks(RUNS)
    recipe = quick_recipe(tmp_path, *RUN, WIDER)
    cluster = Cluster(DEVICES["h100"], 1e12, SHARES, 2, 2)
    planned = {run.division: run.memory(run.batch, False) for run in Planner(recipe).runs(cluster)}
    for run, division in (("ddp", "DDP"), ("sharded", "SHARD_GRAD_OP"), ("full", "FULL_SHARD")):
        expected = planned[division].state + planned[division].algorithms
        for rank in range(2):
            found = json.loads((written / run / f"live.{rank}.json").read_text())
            assert found == pytest.approx(expected, rel=0.05), (run, rank)


@pytest.mark.parametrize("sync", ["microbatch", "batch"])
@pytest.mark.parametrize("full_shard", [False, True])
def test_what_fsdp_is_told_of_the_last_pass(sync, full_shard):
    """Only where it changes. Results do not depend on it, but what is sent and held does."""
    task, run = mock.Mock(), FakeRun()
    lever = Sharding(task, full_shard=full_shard, by_block=True, parameters="auto", replicas=2, sync=sync)
    run.passes = 3
    told = []
    for _ in range(2):
        for run.pass_number in range(3):
            lever.before_forward(run)
        told.append([(call[0], *call[1]) for call in task.method_calls])
        task.reset_mock()

    def calls(last):
        names = ["requires_all_reduce"]
        names += ["is_last_backward", "requires_gradient_sync"] if sync == "batch" else []
        found = [(f"set_{name}", last) for name in names]
        return found + ([("set_reshard_after_backward", last or full_shard)] if sync == "batch" else [])

    assert told == [calls(False) + calls(True)] * 2


def kept_values(task, batch):
    """The loss, and how many values the forward pass keeps for the backward one."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        return task(batch)["total"], sum(kept)


def test_recomputed_blocks_give_the_same_gradients_and_keep_less(small_recipe, tmp_path):
    results = []
    for again in (False, True):
        torch.manual_seed(0)
        task = build(small_recipe(tmp_path, "model.denoiser.dropout=0.1").model)
        if again:
            names = list(task.state_dict())
            recompute(task.recomputed_blocks())
            assert list(task.state_dict()) == names
        batch = {"latents": torch.randn(2, 4, 8, 8), "text": torch.randn(2, 12, 16)}
        torch.manual_seed(1)  # of timesteps, noise and dropout
        loss, kept = kept_values(task, batch)
        loss.backward()
        results.append((loss, [p.grad for p in task.parameters()], kept))
    plain, recomputed = results
    assert torch.equal(plain[0], recomputed[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], recomputed[1], strict=True))
    assert recomputed[2] < 0.5 * plain[2]


def test_recomputing_in_a_recipe(small_recipe, tmp_path, capsys):
    from recipes.engines.composer.trainer import build_trainer

    overrides = ["algorithms.again={name: activation_checkpointing, every: 2}", "training.duration=2ba"]
    trainer = build_trainer(small_recipe(tmp_path, *overrides))
    blocks = trainer.state.model.task.recomputed_blocks()
    assert sum("forward" in vars(block) for block in blocks) == -(-len(blocks) // 2)
    trainer.fit()
    trainer.close()
    assert f"activation_checkpointing: {-(-len(blocks) // 2)} blocks" in capsys.readouterr().out


class Blockless(Task):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, *given):
        raise AssertionError("nothing runs")

    evaluate = export = forward


def test_a_model_without_blocks_is_told():
    with pytest.raises(ValueError, match="names no blocks to shard one by one; set training.fsdp.wrap to model"):
        shard(Blockless(), None)


class Scaled(Blockless):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.0))


def test_a_model_with_a_scalar_is_told():
    with pytest.raises(ValueError, match="the model's gain is a scalar, .*; make it a tensor of shape"):
        shard(Scaled(), None, by_block=False)


def test_a_trained_parameter_without_elements_is_told():
    """PyTorch failed in the first backward pass."""
    model = Blockless()
    model.gain = nn.Parameter(torch.zeros(0, 2))
    with pytest.raises(ValueError, match="the model's gain has no elements, .*; remove it, or freeze it"):
        check_shardable(model, by_block=False)
    check_shardable(model.requires_grad_(False), by_block=False)


class Tied(Blockless):
    """FSDP2 would train a weight of its own in each of the blocks."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(2, 2)
        self.other.weight = self.layer.weight

    def blocks(self):
        return [self.layer, self.other]


class TiedOutside(Tied):
    def blocks(self):
        return [self.layer]


@pytest.mark.parametrize("kind", [Tied, TiedOutside])
def test_a_block_that_shares_a_weight_is_told(kind):
    names = "layer.weight and other.weight are one parameter, .*; set training.fsdp.wrap to model"
    with pytest.raises(ValueError, match=names):
        shard(kind(), None)
    check_shardable(kind(), by_block=False)


class Nested(Blockless):
    def __init__(self):
        super().__init__()
        self.outer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def blocks(self):
        return [self.outer[1], self.outer]


def test_copies_of_frozen_parameters_and_blocks_within_blocks_are_sharded():
    """Copies stay equal, and what a block within a block has is in one unit: no parameter becomes several."""
    for kind in (Tied, TiedOutside):
        check_shardable(kind().requires_grad_(False), by_block=True)
    check_shardable(Nested(), by_block=True)
    twice = Tied().requires_grad_(False)
    twice.third = nn.Sequential(twice.other)
    twice.blocks = lambda: [twice.layer, twice.third]
    with pytest.raises(ValueError, match="other.weight and third.0.weight are one parameter"):  # of one module
        check_shardable(twice, by_block=True)
    for blocks in ([0, 0], [1, 0]):
        model = Nested()
        model.blocks = lambda model=model, blocks=blocks: [Nested.blocks(model)[number] for number in blocks]
        with pytest.raises(ValueError, match="^fsdp: the model names a block (Linear|Sequential) twice, or one that "):
            check_shardable(model, by_block=True)


@pytest.mark.parametrize(
    ("model", "fsdp", "message"),
    [
        (Scaled, "{wrap: model}", "fsdp: the model's gain is a scalar"),
        (Tied, "{}", "fsdp: layer.weight and other.weight are one parameter"),
        (Blockless, "{}", "fsdp: the model names no blocks"),
    ],
)
def test_models_that_cannot_be_sharded_are_refused_before_anything_runs(monkeypatch, tmp_path, model, fsdp, message):
    """Before data is opened, and in the dry run, which named the memory that the run would take."""
    yaml = Path(__file__).resolve().parents[4] / "yamls" / "openmoji_text.yaml"
    overrides = [f"training.fsdp={fsdp}", "training.device=cpu", f"output={tmp_path / 'run'}"]
    recipe = load_config(yaml, overrides, Recipe, missing=[])
    monkeypatch.setattr(dry_run, "build_on_meta", lambda component: model())
    with pytest.raises(ValueError, match=message):
        dry_run.describe_run(recipe, [])
    assert [line for line in dry_run.problems(recipe) if line.startswith(message)]
    monkeypatch.setattr(first_weights, "build", lambda component: model())
    with pytest.raises(ValueError, match=message):
        parts.build_parts(recipe, parts.Place.of(recipe, 1), "lightning")


def test_parameters_in_bf16_need_autocast(quick_recipe, tmp_path):
    """Linear layers multiply no 32-bit activations by 16-bit weights."""
    recipe = quick_recipe(tmp_path, "training.fsdp={parameters: bf16}")
    with pytest.raises(ValueError, match="^training.fsdp.parameters: bf16, and the run is in fp32 without autocast"):
        parts.build_parts(recipe, parts.Place.of(recipe, 1), "composer")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sharded", ["{}", "{strategy: FULL_SHARD, checkpoints: full}"])
def test_on_a_gpu(small_recipe, fit, tmp_path, sharded):
    """bf16 parameters under autocast, with the levers that change modules: as DDP's losses, within bf16's rounding."""
    changes = [*RUN, "training.device=gpu", "training.precision=amp_bf16", "model.denoiser.norm_groups=8"]
    changes += ["algorithms.low_precision_norms={name: low_precision_norms, modules: denoiser}"]
    losses = []
    for name, options in (("whole", []), ("sharded", [f"training.fsdp={sharded}"])):
        trainer = fit(small_recipe(tmp_path / name, *changes, *options))
        assert is_sharded(trainer.state.model) == bool(options)
        losses.append(float(trainer.state.eval_metric_values["loss"]))
        assert (tmp_path / name / "export" / "done.json").is_file()
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
