"""Which images a rank draws, and errors. Two ranks that share images are in tests/callbacks/grid_ranks.py."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from callbacks.prompt_grid import PromptGrid, numbers_of
from callbacks.sample_grid import SampleGrid
from callbacks.token_grid import TokenGrid
from recipes.models.latent_diffusion.objective import seeded_noise
from tests.recipes.training.fake_run import FakeRun


@given(st.integers(1, 300), st.integers(1, 70))
def test_ranks_draw_each_image_and_equally_many(count, ranks):
    parts = [numbers_of(count, rank, ranks) for rank in range(ranks)]
    assert len({len(part) for part in parts}) == 1 and len(parts[0]) < count / ranks + 1
    drawn = [number for part in parts for number in part]
    assert drawn[:count] == list(range(count)) and set(drawn[count:]) <= {count - 1}


@pytest.mark.parametrize(("kind", "component"), [(SampleGrid, "sample_grid"), (TokenGrid, "token_grid")])
@pytest.mark.parametrize(
    ("wrong", "fault"),
    [({"prompts": []}, "prompts is empty"), ({"batch": 0}, "batch: 0; give 1"), ({"seed": 2**62}, "seed: 4611")],
)
def test_errors_name_the_component_of_the_recipe(kind, component, wrong, fault):
    with pytest.raises(ValueError, match=f"^{component}: {fault}"):
        kind(None, "", None, None, None, 1, **{"prompts": ["a cat"], **wrong})


def test_prompts_are_encoded_in_batches_on_the_device_of_the_model():
    said = []

    def encode(captions):
        said.append(len(captions))
        return torch.tensor([float(caption) for caption in captions])[:, None, None]

    text_encoder = SimpleNamespace(to=said.append, encode=encode)
    objective = SimpleNamespace(check_sampler=lambda sampler: "ddim", check_steps=lambda steps, sampler: None)
    parameter = torch.zeros(1)
    task = SimpleNamespace(entry_points=("denoise",), objective=objective, parameters=lambda: iter([parameter]))
    prompts = [str(number) for number in range(5)]
    grid = SampleGrid(task, "", None, lambda: ("vae", text_encoder), None, 1, prompts=prompts, batch=2)
    image_encoder, text = grid.prepare()
    assert image_encoder == "vae" and text.flatten().tolist() == [0, 1, 2, 3, 4]
    assert said == [parameter.device, 2, 2, 1]


def test_noise_is_that_of_the_seed_and_of_the_image():
    objective = SimpleNamespace(check_sampler=lambda sampler: "ddim", check_steps=lambda steps, sampler: None)
    objective.sample = lambda denoise, noise, *others, **more: noise
    task = SimpleNamespace(entry_points=("denoise",), objective=objective, denoise=None)
    task.parameters = lambda: iter([torch.zeros(1)])
    manifest = SimpleNamespace(latent_shape=lambda resolution: (2, 3, 3))
    loading = SimpleNamespace(manifest=manifest, resolution=6, null_text=torch.zeros(1, 1))
    grid = SampleGrid(task, "", loading, None, None, 1, prompts=["a"] * 5, seed=7)
    grid.text = torch.zeros(5, 1, 1)
    assert torch.equal(grid.draw([1, 3]), seeded_noise([8, 10], (2, 3, 3)))


class Draws(PromptGrid):
    """What `drawn` holds."""

    component = "draws"

    def prepare(self):
        return None, torch.zeros(1)

    def draw(self, numbers):
        return self.drawn[numbers]


@pytest.mark.parametrize("kind", [torch.float32, torch.int64], ids=["latents", "tokens"])
def test_images_that_are_not_finite_are_not_drawn_and_the_run_goes_on(tmp_path, capsys, kind):
    """A network may overflow in 16 bits while its weights and its losses are finite: the images would be black."""
    run = FakeRun()
    grid = Draws(run.task, tmp_path, None, 1, ["a"] * 3, None, None, 2)
    grid.drawn = torch.ones(3, 4, 4, dtype=kind)
    grid.drawn[1] = -1
    if kind.is_floating_point:
        grid.drawn[1, 2, 3] = torch.inf  # -1 is a latent like others
    grid.begin(run)
    grid.act(run.at(4))
    assert "samples: batch 4: 1 of 3 images are not finite in the precision" in capsys.readouterr().out
    assert not run.images and not any(tmp_path.iterdir())


class Fails(PromptGrid):
    """As tokens of logits that are not finite."""

    component = "fails"

    def prepare(self):
        return None, torch.zeros(1)

    def draw(self, numbers):
        raise ValueError("the logits of image tokens are not finite")


@pytest.mark.parametrize("weights", [False, True], ids=["losses", "weights"])
def test_nothing_is_drawn_that_is_not_finite_and_the_run_goes_on(tmp_path, capsys, weights):
    """The run skips such batches, up to a limit, and says at that what is wrong."""
    run = FakeRun()
    grid = Fails(run.task, tmp_path, None, 1, ["a"], None, None, 1)
    grid.begin(run)
    if weights:
        run.task.weight.data[0, 0] = torch.nan
    else:
        run.nonfinite = 1
    grid.act(run.at(4))
    assert "samples: batch 4 is not finite; nothing is drawn" in capsys.readouterr().out
    assert not run.images and not any(tmp_path.iterdir())
