"""The lever that makes noise belong to samples."""

import pytest
import torch

from data.random_numbers import seeds_of
from recipes.algorithms.resilience.noise_of_samples import NoiseOfSamples
from recipes.models.latent_diffusion.task import LatentDiffusion
from tests.recipes.training.fake_run import FakeRun


def test_each_batch_gives_its_samples_other_numbers():
    run = FakeRun()
    run.batch = {"seed": torch.tensor([3, 8])}
    lever = NoiseOfSamples(run.task, seed=5)
    lever.batch_start(run.at(2))
    assert torch.equal(run.batch["draws"], seeds_of(torch.tensor([3, 8]), seed=5, batch=2))
    before = run.batch["draws"]
    lever.batch_start(run.at(3))
    assert (run.batch["draws"] != before).all()


def test_data_without_numbers_is_named():
    run = FakeRun()
    run.batch = {"image": torch.zeros(2, 3, 4, 4)}
    with pytest.raises(ValueError, match="noise_of_samples: the batches have no `seed`"):
        NoiseOfSamples(run.task).batch_start(run)


def test_latent_diffusion_takes_them():
    assert LatentDiffusion.takes_draws
