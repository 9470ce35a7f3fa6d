"""What every model promises a trainer, held for all model components alike."""

import inspect

import pytest
import torch

from recipes.config.build import build, build_on_meta
from recipes.config.components import COMPONENTS
from recipes.config.schema import Checker
from recipes.engines.composer.model import ComposerTask
from recipes.models.task import Task, losses_of

DENOISER = {"channels": [16, 16], "attention": [False, True], "heads": [1, 2], "text_width": 12}
DENOISER |= {"name": "unet", "blocks": 1, "norm_groups": 8}
IMAGE = {"image": ((3, 16, 16), 256)}
TOKENS = {"text": ((6,), 20), "image": ((16,), 12)}
# A small model of each kind, and its batch: the shape of a sample, and how many integers there are (None: any number).
SMALL = {
    "latent_diffusion": (
        {"denoiser": DENOISER, "objective": {"name": "ddpm", "eval_timesteps": [50, 900]}},
        {"latents": ((4, 8, 8), None), "text": ((7, 12), None), "seed": ((), 1000)},
    ),
    "kl_autoencoder": ({"channels": [8, 16], "blocks": 1, "norm_groups": 4}, IMAGE),
    "dvae": ({"codes": 24, "hidden": 8, "blocks": 1, "initial": 5}, IMAGE),
    "contrastive_text": (
        {"width": 16, "layers": 2, "heads": 2, "context_length": 12, "vocabulary": 50, "picture_size": 16,
         "patch_size": 8, "picture_width": 32, "picture_layers": 1, "embedding": 8},
        IMAGE | {"tokens": ((12,), 50)},
    ),
    "autoregressive": (
        {"layers": 4, "width": 32, "heads": 2, "text_positions": 6, "text_vocabulary": 20, "side": 4, "codes": 12,
         "kernel": 3},
        TOKENS,
    ),
    "language": (
        {"layers": 2, "width": 32, "heads": 2, "positions": 6, "vocabulary": 20, "dropout": 0.0},
        {"tokens": ((7,), 20)},
    ),
}  # fmt: skip
SAMPLES = 5
models = pytest.mark.parametrize("name", COMPONENTS["model"])


def component(name):
    checker = Checker(COMPONENTS)
    made = checker.component("model", {"name": name, **SMALL[name][0]}, "model")
    assert not checker.errors
    return made


def new(name, seed=0):
    torch.manual_seed(seed)
    task = build(component(name))
    with torch.no_grad():  # some layers start at zero, and would hide differences
        for parameter in task.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return task


def batch_of(name):
    generator = torch.Generator().manual_seed(8)
    batch = {}
    for key, (shape, count) in SMALL[name][1].items():
        full = (SAMPLES, *shape)
        if count is None:
            batch[key] = torch.randn(full, generator=generator)
        else:
            dtype = torch.uint8 if count == 256 else torch.int64
            batch[key] = torch.randint(count, full, generator=generator, dtype=dtype)
    return batch


@models
def test_members_have_their_types(name):
    task = new(name)
    assert isinstance(task, Task)
    assert list(task.eval_names) and all(isinstance(result, str) for result in task.eval_names)
    assert all(callable(getattr(task, method)) for method in task.entry_points)
    for value in task.scheduled:
        assert dict(task.named_buffers())[value].shape == () and value not in task.state_dict()
    assert isinstance(task.compares_samples, bool) and (task.codes is None or task.codes > 1)
    assert all(isinstance(key, str) for key in task.requirements())
    flops = task.forward_flops()
    assert flops is None or flops > 0


@models
def test_signatures_are_those_of_the_base_class(name):
    kind = type(new(name))
    for method, base in inspect.getmembers(Task, inspect.isfunction):
        if method in vars(Task):
            own = inspect.signature(getattr(kind, method)).parameters
            assert list(own) == list(inspect.signature(base).parameters), method


@models
def test_training_losses_are_scalars(name):
    task = new(name)
    losses = task(batch_of(name))
    assert all(loss.shape == () and loss.isfinite() for loss in losses.values())
    assert losses["total"].requires_grad and not any(loss.requires_grad for k, loss in losses.items() if k != "total")


@models
def test_validation_has_one_result_per_sample_and_draws_nothing(name):
    task, batch = new(name).eval(), batch_of(name)
    state = torch.get_rng_state()
    results = task.evaluate(batch)
    assert torch.equal(torch.get_rng_state(), state)
    given = set(task.eval_names) - set(task.eval_exponentials)  # those are computed from others
    assert given <= set(results) and set(task.eval_exponentials.values()) <= given
    assert all(results[key].shape == (SAMPLES,) and not results[key].requires_grad for key in given)
    if task.codes is not None:
        assert len(results["codes"]) == SAMPLES and results["codes"].max() < task.codes


@models
def test_blocks_are_called_through_their_forward(name):
    for blocks in (Task.blocks, Task.recomputed_blocks):
        task, called = new(name), set()
        found = getattr(task, blocks.__name__)()
        assert len({id(block) for block in found}) == len(found)
        inside = {id(module) for module in task.modules()}
        for block in found:
            assert id(block) in inside
            block.register_forward_hook(lambda module, *_, called=called: called.add(id(module)))
        task(batch_of(name))
        assert called == {id(block) for block in found}


@models
def test_exports_come_back_bit_equal(name, tmp_path):
    task, other, batch = new(name).eval(), new(name, seed=1).eval(), batch_of(name)
    task.export(tmp_path)
    assert not [file for file in tmp_path.rglob("*") if file.suffix in (".pt", ".bin", ".pkl")]
    other.load_export(tmp_path)
    expected, got = task.evaluate(batch), other.evaluate(batch)
    assert all(torch.equal(got[key], expected[key]) for key in expected)
    if task.exports_average_beside:
        raw = {file: file.read_bytes() for file in tmp_path.rglob("*.safetensors")}
        new(name, seed=1).export_average(tmp_path)
        assert all(file.read_bytes() == held for file, held in raw.items())
        assert len(list(tmp_path.rglob("*.safetensors"))) == 2 * len(raw)


@models
def test_it_can_be_built_without_memory(name):
    task = build_on_meta(component(name))
    assert all(parameter.is_meta for parameter in task.parameters())
    assert task.export_record() == new(name).export_record()


@pytest.mark.parametrize(
    ("outputs", "found"),
    [({"loss": 1.0, "other": 2.0}, "loss, other"), ({}, "an empty dict"), (torch.ones(()), "Tensor")],
)
def test_losses_without_a_total_are_refused_by_both_engines(outputs, found):
    """Composer would minimise the sum of what there is."""
    task = Task()
    for losses in (lambda: ComposerTask(task).loss(outputs, None), lambda: losses_of(task, outputs)):
        with pytest.raises(ValueError, match=f"^model: forward of Task .* returns {found}; return a dict of scalars"):
            losses()
    total = {"total": torch.ones(())}
    assert ComposerTask(task).loss(total, None) == total


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({"total": 1.0}, "an instance of float for `total`"),
        ({"total": torch.ones(3)}, r"a tensor of shape \(3,\) and dtype float32 for `total`"),
        ({"total": torch.ones(()), "tokens": torch.tensor(3)}, r"a tensor of shape \(\) and dtype int64 for `tokens`"),
        ({"total": torch.ones(()), "aux": None}, "nothing for `aux`"),
    ],
)
def test_losses_that_are_no_scalars_are_refused(losses, message):
    """Both engines average them as tensors of floating-point numbers."""
    with pytest.raises(ValueError, match=rf"forward of Task \(recipes.models.task\) returns {message}; return"):
        losses_of(Task(), losses)
    whole = {"total": torch.ones(1), "aux": torch.ones((), dtype=torch.float64)}
    assert losses_of(Task(), whole) is whole
