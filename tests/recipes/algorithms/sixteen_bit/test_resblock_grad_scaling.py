"""Per-block gradient scaling in runs: fp16 blocks follow 32-bit, overflows skip and lower one scale, runs resume."""

from types import SimpleNamespace

import pytest
import torch
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from torch.utils.data import DataLoader

from recipes.algorithms.gradients.clipping import ClipByNorm
from recipes.algorithms.optimizers import adam16
from recipes.algorithms.sharding.fsdp import Sharding
from recipes.algorithms.sixteen_bit.block_scaling import scale_branch
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.engines.composer.adapters import as_algorithms
from recipes.engines.composer.model import ComposerTask
from recipes.engines.composer.run import ComposerRun
from recipes.models.task import Task
from recipes.training.lever import Lever
from recipes.training.levers import Levers
from tests.recipes.algorithms.residual import WordTask, vector
from tests.recipes.algorithms.sixteen_bit.scaling_ranks import WEIGHTS
from tests.recipes.training.fake_run import FakeRun


class PlainTask(Task):
    """A model that names no blocks."""


class Watch(Callback):
    def __init__(self, bad_batches=()):
        self.bad_batches = bad_batches
        self.weights, self.losses, self.gradients = [], [], []

    def after_loss(self, state, logger):
        self.losses.append(state.loss["total"].item())

    def after_backward(self, state, logger):
        if state.timestamp.batch.value in self.bad_batches:
            state.model.task.layers[1].branch[1].weight.grad[0, 0] = float("nan")

    def after_train_batch(self, state, logger):  # callbacks come after algorithms
        grads = [p.grad for p in state.model.parameters()]
        self.gradients.append(None if grads[0] is None else torch.cat([g.float().flatten() for g in grads]))

    def batch_end(self, state, logger):
        self.weights.append(vector(state.model))


def sgd(task):
    return torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.5)


def low_adam(task):
    return adam16(task.parameters(), task, lr=0.01, compiled=False)


def run(scaling=None, *others, duration="8ba", bad_batches=(), callbacks=(), optimizer=sgd, **options):
    """A run of batches of 8 samples in two microbatches; `scaling` holds the arguments of the lever."""
    task = WordTask()
    levers = [] if scaling is None else [ResblockGradScaling(task, **scaling)]
    words = torch.randint(11, (128, 6), generator=torch.Generator().manual_seed(5))
    watch = Watch(bad_batches)
    options = {"precision": "fp32", **options}
    trainer = Trainer(
        model=ComposerTask(task),
        train_dataloader=DataLoader([{"words": row} for row in words], batch_size=8),
        max_duration=duration,
        optimizers=optimizer(task),
        algorithms=as_algorithms(Levers([*levers, *others]), ComposerRun(task)),
        callbacks=[watch, *callbacks],
        device="cpu",
        device_train_microbatch_size=4,
        progress_bar=False,
        seed=3,
        **options,
    )
    trainer.fit()
    trainer.watch = watch
    trainer.levers = [*levers, *others]
    return trainer


def scaling_of(trainer):
    return trainer.levers[0]


def test_a_run_follows_that_in_32_bit():
    plain, scaled = run(), run({})
    first = [trainer.watch.gradients[0] for trainer in (plain, scaled)]
    assert (first[0] - first[1]).norm() < 2e-3 * first[0].norm()
    assert not torch.equal(*first)
    for a, b in zip(plain.watch.losses, scaled.watch.losses, strict=True):
        assert abs(a - b) < 1e-2 * a
    assert scaling_of(scaled).scales.exponents.tolist() == pytest.approx([13 + 8 / 1000] * 2)
    assert scaling_of(scaled).skipped == 0


def test_clipping_sees_unscaled_gradients():
    plain = run(None, ClipByNorm(0.1))
    scaled = run({}, ClipByNorm(0.1))
    assert (vector(plain.state.model) - vector(scaled.state.model)).abs().max() < 1e-3


def test_gradients_are_unscaled_averaged_and_clipped_in_this_order():
    seen = []

    def lever(moment):
        return type(moment, (Lever,), {moment: lambda self, run: seen.append(moment)})()

    order = ["unscale_gradients", "average_gradients", "clip_gradients", "before_step"]
    Levers([lever(moment) for moment in reversed(order)]).finish_gradients(None)
    assert seen == order


def test_an_overflow_skips_the_update_and_lowers_the_scale_of_its_block():
    trainer = run({}, bad_batches=(3, 5))
    weights = trainer.watch.weights
    same = [torch.equal(a, b) for a, b in zip(weights[:-1], weights[1:], strict=True)]
    assert same == [number in (2, 4) for number in range(7)]
    scaling = scaling_of(trainer)
    assert scaling.skipped == 2
    # Block 1: six times up, once down; the second overflow came within 125 updates. Block 0: eight times up.
    assert scaling.scales.exponents.tolist() == pytest.approx([13.008, 13.006 - 0.5])
    assert torch.isfinite(weights[-1]).all()


def test_what_is_not_finite_is_counted_per_block():
    logger = InMemoryLogger()
    trainer = run({}, bad_batches=(3, 5), loggers=logger)
    prefix = "resblock_grad_scaling/nonfinite/"
    logged = {name: data for name, data in logger.data.items() if name.startswith(prefix)}
    (name,) = logged  # block 0 had none
    assert name == f"{prefix}001"
    assert [(time.batch.value, count) for time, count in logged[name]] == [(3, 1), (5, 1)]
    assert scaling_of(trainer).nonfinite.tolist() == [0, 0]  # of the last update

    def values(name):
        return [value for _, value in logger.data[f"resblock_grad_scaling/{name}"]]

    assert values("skipped") == [0, 0, 0, 1, 1, 2, 2, 2] and values("overflowed_blocks") == [0, 0, 0, 1, 0, 1, 0, 0]
    scales = {time.batch.value: scale for time, scale in logger.data["resblock_grad_scaling/log2_scale/001"]}
    assert scales == pytest.approx({0: 13.0, 3: 13.003, 5: 12.504}) and not any(values("filtered"))
    # Scales that are far too large: gradients of parameters, and those that the filter met on their way out.
    logger = InMemoryLogger()
    scaling = scaling_of(run({"start": 40.0, "most": 40.0}, duration="1ba", loggers=logger))
    assert values("filtered")[0] > 0 and values("overflowed_blocks") == [2]
    parameters = sum(p.numel() for p in scaling.branches[0].parameters())
    assert (scaling.nonfinite > parameters / 2).all()


def test_what_the_filter_met_skips_one_update_though_all_gradients_are_finite():
    """Without the values that the filter took out, gradients of earlier blocks are not those of the loss."""
    run = FakeRun(WordTask())
    scaling = ResblockGradScaling(run.task)
    scaling.change_modules(run)
    scaling.begin(run)
    for met, exponents, nonfinite, lowers in (
        ([0, 3], [13.001, 12.5], [0, 3], True),
        ([0, 0], [13.002, 12.501], [0, 0], False),
        ([2, 1], [12.502, 12.501], [2, 1], True),
    ):
        for parameter in run.task.parameters():
            parameter.grad = torch.ones_like(parameter)
        scaling.filtered.add_(torch.tensor(met))
        scaling.unscale_gradients(run)
        assert all((p.grad is None) == any(met) for p in run.task.parameters())
        assert scaling.scales.exponents.tolist() == pytest.approx(exponents)
        assert scaling.nonfinite.tolist() == nonfinite and scaling.lowers == lowers
    scaling.scales.exponents[0] = scaling.scales.least
    scaling.filtered.add_(1)
    scaling.unscale_gradients(run)
    assert not scaling.lowers and scaling.skipped == 3  # one of them stays where it is


def test_scales_that_are_too_large_skip_until_they_fit():
    trainer = run({"start": 40.0, "most": 40.0}, duration="2ba")
    scaling = scaling_of(trainer)
    assert scaling.skipped == 2
    assert torch.equal(trainer.watch.weights[0], trainer.watch.weights[1])
    assert scaling.scales.exponents.tolist() == [39.5, 39.5] and scaling.lowers


def test_a_scale_that_cannot_become_smaller_is_known():
    assert not scaling_of(run({"start": 40.0, "least": 40.0, "most": 40.0}, duration="1ba")).lowers
    assert not scaling_of(run({}, bad_batches=(1,), duration="3ba")).lowers  # the last batch did not overflow


def test_resuming_changes_nothing(tmp_path):
    whole = run({}, bad_batches=(1, 6), save_folder=str(tmp_path), save_interval="1ba")
    saved = str(next(tmp_path.glob("*-ba4-rank0.pt")))
    resumed = run({"start": 10.0}, bad_batches=(1, 6), load_path=saved)
    assert len(resumed.watch.weights) == 4
    assert torch.equal(vector(resumed.state.model), vector(whole.state.model))
    a, b = scaling_of(whole), scaling_of(resumed)
    assert torch.equal(a.scales.exponents, b.scales.exponents) and torch.equal(a.scales.since, b.scales.since)
    assert a.skipped == b.skipped == 2


@pytest.mark.parametrize(
    ("samples", "exponents"), [(2, [10.0, 7.0]), (8, [12.0, 8.0]), (32, [14.0, 10.0]), (2**18, [24.0, 23.0])]
)
def test_scales_move_with_the_samples_of_a_rank(samples, exponents):
    """Of a run that goes on with another number of ranks; but not beyond the bounds."""
    saved = ResblockGradScaling(WordTask(), samples=8)
    saved.scales.exponents = torch.tensor([12.0, 8.0], dtype=torch.float64)
    lever = ResblockGradScaling(WordTask(), samples=samples)
    lever.load_state_dict(saved.state_dict())
    assert lever.scales.exponents.tolist() == exponents
    lever.load_state_dict({name: value for name, value in saved.state_dict().items() if name != "samples"})
    assert lever.scales.exponents.tolist() == [12.0, 8.0]  # of a version that did not write it


def test_weights_and_gradients_in_16_bits_follow_those_in_32():
    plain = run(None, ClipByNorm(0.5), optimizer=low_adam, duration="16ba")
    scaled = run({"weights": "fp16"}, ClipByNorm(0.5), optimizer=low_adam, duration="16ba")
    for name, parameter in scaled.state.model.named_parameters():
        matrix_of_block = ".branch." in name and parameter.ndim == 2
        assert parameter.dtype == (torch.float16 if matrix_of_block else torch.float32), name
    for a, b in zip(plain.watch.losses, scaled.watch.losses, strict=True):
        assert abs(a - b) < 1e-2 * a
    assert scaled.watch.losses[-1] < 0.9 * scaled.watch.losses[0] and scaling_of(scaled).skipped == 0


def test_16_bit_weights_skip_updates_and_resume(tmp_path):
    low = {"weights": "fp16"}
    more = {"optimizer": low_adam, "bad_batches": (1, 6)}
    whole = run(low, ClipByNorm(0.5), save_folder=str(tmp_path), save_interval="1ba", **more)
    weights = whole.watch.weights
    same = [torch.equal(a, b) for a, b in zip(weights[:-1], weights[1:], strict=True)]
    assert same == [number in (0, 5) for number in range(7)]
    saved = str(next(tmp_path.glob("*-ba4-rank0.pt")))
    resumed = run({**low, "start": 10.0}, ClipByNorm(0.5), load_path=saved, **more)
    assert len(resumed.watch.weights) == 4
    assert torch.equal(vector(resumed.state.model), vector(whole.state.model))


def test_16_bit_weights_on_two_ranks(two_ranks):
    two_ranks(WEIGHTS)


def test_where_16_bit_weights_do_not_fit():
    with pytest.raises(ValueError, match="weights: fp16 needs the optimizer adam16"):
        run({"weights": "fp16"})
    with pytest.raises(ValueError, match="weights: fp16 does not work together with powersgd"):
        ResblockGradScaling(WordTask(), low_rank=True, weights="fp16")
    task = WordTask()
    scaling = ResblockGradScaling(task, weights="fp16")
    sharded = {"full_shard": True, "by_block": True, "replicas": 1, "sync": "batch"}
    with pytest.raises(ValueError, match="training.fsdp: PyTorch shards no block with parameters of two number"):
        Sharding(task, parameters="auto", scaling=scaling, **sharded)
    with pytest.raises(ValueError, match="training.fsdp.parameters: bf16, and resblock_grad_scaling computes in fp16"):
        Sharding(task, parameters="bf16", scaling=ResblockGradScaling(task), **sharded)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="bf16 has the exponents of 32-bit floats"):
        run({}, precision="amp_bf16", device="gpu") if torch.cuda.is_available() else _wrap_under("amp_bf16")
    with pytest.raises(ValueError, match="least <= start <= most must hold"):
        ResblockGradScaling(WordTask(), start=5.0)
    with pytest.raises(ValueError, match="PlainTask has no blocks; it is for models whose blocks are"):
        ResblockGradScaling(PlainTask())
    other = WordTask()
    other.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="WordTask has blocks of Linear without a residual branch"):
        ResblockGradScaling(other)
    shared = WordTask()
    shared.layers[1].branch = shared.layers[0].branch
    with pytest.raises(ValueError, match="layers.0.branch.* and layers.1.branch.* are one parameter, whose gradient"):
        ResblockGradScaling(shared)
    ResblockGradScaling(shared.requires_grad_(False))  # without gradients
    with pytest.raises(ValueError, match="the checkpoint has 3 scales, the model 2 blocks"):
        ResblockGradScaling(WordTask()).load_state_dict({"exponents": torch.zeros(3)})
    with pytest.raises(ValueError, match="the identity path is torch.bfloat16"):
        block = WordTask().layers[0]
        scale_branch(block.branch, torch.ones(()), torch.zeros((), dtype=torch.int64))
        block(torch.zeros(2, 16, dtype=torch.bfloat16))


def _wrap_under(precision):
    """Without Composer, which itself refuses 16-bit precisions on a CPU."""
    ResblockGradScaling(WordTask()).change_modules(SimpleNamespace(precision=precision))
