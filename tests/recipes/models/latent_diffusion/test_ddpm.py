"""The forward process and the loss against diffusers' schedulers and against closed forms."""

import json

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr

from recipes.models.latent_diffusion.ddpm import DDPM, NoiseSchedule

SHAPE = (6, 4, 8, 8)
TIMESTEPS = torch.tensor([0, 5, 100, 500, 900, 999])
BETAS = [(0.00085, 0.012, "scaled_linear"), (1e-4, 0.02, "linear"), (1e-4, 0.02, "squaredcos_cap_v2")]


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


def at(table, timesteps=TIMESTEPS):
    return table[timesteps].reshape(-1, 1, 1, 1)


@pytest.mark.parametrize("betas", BETAS, ids=lambda b: b[2])
def test_forward_process_is_that_of_diffusers(batch, betas):
    x0, noise = batch
    own = NoiseSchedule(1000, *betas)
    theirs = DDPMScheduler(1000, beta_start=betas[0], beta_end=betas[1], beta_schedule=betas[2])
    torch.testing.assert_close(
        own.add_noise(x0, noise, TIMESTEPS), theirs.add_noise(x0, noise, TIMESTEPS), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        own.velocity(x0, noise, TIMESTEPS), theirs.get_velocity(x0, noise, TIMESTEPS), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(own.snr(TIMESTEPS), compute_snr(theirs, TIMESTEPS), rtol=1e-5, atol=0)


def test_the_schedule_is_not_in_checkpoints():
    assert not DDPM().state_dict()


@pytest.mark.parametrize("gamma", [None, 5.0])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_a_perfect_prediction_costs_nothing(batch, prediction, gamma):
    x0, noise = batch
    loss = DDPM(prediction=prediction, min_snr_gamma=gamma)
    seen = []

    def denoise(x, timesteps):
        seen.append((x, timesteps))
        return noise if prediction == "epsilon" else loss.schedule.velocity(x0, noise, timesteps)

    assert loss(denoise, x0, noise, TIMESTEPS).tolist() == [0.0] * 6
    torch.testing.assert_close(seen[0][0], loss.schedule.add_noise(x0, noise, TIMESTEPS))
    assert (seen[0][1] == TIMESTEPS).all()


def test_one_value_per_sample_in_float32(batch):
    x0, noise = batch
    losses = DDPM()(lambda x, t: (noise + 1).bfloat16(), x0, noise, TIMESTEPS)
    assert losses.shape == (6,) and losses.dtype == torch.float32
    torch.testing.assert_close(losses, torch.ones(6), rtol=0.02, atol=0)
    one = DDPM()(lambda x, t: 0 * x, x0[2:3], noise[2:3], TIMESTEPS[2:3])
    torch.testing.assert_close(one[0], noise[2].square().mean())


def as_velocity(schedule, x, epsilon, timesteps):
    alpha, sigma = at(schedule.alpha, timesteps), at(schedule.sigma, timesteps)
    return alpha * epsilon - sigma * (x - sigma * epsilon) / alpha


def test_the_errors_of_both_predictions_are_one_error(batch):
    """v = (epsilon - sigma x_t) / alpha: an error in epsilon is one in v, divided by alpha."""
    x0, noise = batch
    own = DDPM().schedule
    by_epsilon = DDPM()(lambda x, t: 0.3 * x, x0, noise, TIMESTEPS)
    by_velocity = DDPM(prediction="v_prediction")(lambda x, t: as_velocity(own, x, 0.3 * x, t), x0, noise, TIMESTEPS)
    torch.testing.assert_close(by_velocity, by_epsilon / own.alpha[TIMESTEPS] ** 2, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 5.0])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_min_snr_is_the_clipped_weight_of_the_error_in_x0(batch, prediction, gamma):
    """Hang et al. 2023, section 3.4: min(snr, gamma) |x_0 - prediction of x_0|^2, whatever the network predicts."""
    x0, noise = batch
    objective = DDPM(prediction=prediction, min_snr_gamma=gamma).double()
    own = objective.schedule
    x0, noise = x0.double(), noise.double()
    guess = 0.9 * x0 + 0.1

    def denoise(x, timesteps):
        epsilon = (x - at(own.alpha, timesteps) * guess) / at(own.sigma, timesteps)
        return epsilon if prediction == "epsilon" else own.velocity(guess, epsilon, timesteps)

    loss = objective(denoise, x0, noise, TIMESTEPS)
    snr = (own.alpha[TIMESTEPS] / own.sigma[TIMESTEPS]) ** 2
    expected = snr.clamp(max=gamma) * (guess - x0).square().mean(dim=(1, 2, 3))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-12)
    assert snr[0] > gamma > snr[-1]  # both branches


def test_values_that_cannot_be():
    with pytest.raises(ValueError, match="min_snr_gamma must be above 0, got 0"):
        DDPM(min_snr_gamma=0.0)
    for steps in ([], [1000], [-1], [0, 1000]):
        with pytest.raises(ValueError, match=r"ddpm: eval_timesteps .*: give at least one, all in \[0, 1000\)"):
            DDPM(eval_timesteps=steps)
    with pytest.raises(ValueError, match="ddpm: steps 10001: give 10000 or fewer"):
        DDPM(steps=10_001)


def test_training_draws_every_timestep():
    objective = DDPM(steps=10, eval_timesteps=[1])
    drawn = torch.cat([objective.draw(torch.zeros(5, 1, 1, 1))[1] for _ in range(60)])
    counts = drawn.bincount(minlength=10)
    assert len(counts) == 10 and counts.min() > 10  # 300 draws of 10


def naive_loss(prediction, gamma, predict, x0, noise, timestep):
    """One sample's weighted error, written out from the papers."""
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    product = torch.cumprod(1.0 - betas, dim=0)[timestep]
    alpha, sigma = product.sqrt(), (1 - product).sqrt()
    error = predict(alpha * x0 + sigma * noise) - (noise if prediction == "epsilon" else alpha * noise - sigma * x0)
    snr = (alpha / sigma) ** 2
    weight = 1.0 if gamma is None else min(snr, gamma) / (snr if prediction == "epsilon" else snr + 1)
    return weight * error.square().mean()


@pytest.mark.parametrize(("prediction", "gamma"), [("epsilon", None), ("v_prediction", 5.0), ("epsilon", 1.0)])
def test_losses_are_those_of_a_naive_reference(batch, prediction, gamma):
    x0, noise = batch
    objective = DDPM(prediction=prediction, min_snr_gamma=gamma)
    got = objective(lambda x, t: 0.7 * x - 0.1, x0, noise, TIMESTEPS)
    for i, timestep in enumerate(TIMESTEPS.tolist()):
        expected = naive_loss(prediction, gamma, lambda x: 0.7 * x - 0.1, x0[i], noise[i], timestep)
        torch.testing.assert_close(got[i], expected, rtol=1e-6, atol=0)


def test_an_objective_for_sampling_comes_back_from_an_export(tmp_path):
    DDPM(prediction="v_prediction", steps=500, beta_schedule="linear", eval_timesteps=[9]).save(tmp_path)
    opened = DDPM.open(tmp_path)
    assert opened.prediction == "v_prediction" and opened.schedule.steps == 500
    tables = DDPM(steps=500, beta_schedule="linear", eval_timesteps=[9]).schedule
    assert torch.equal(opened.schedule.alpha, tables.alpha)
    DDPM(steps=10_000).save(tmp_path)
    assert DDPM.open(tmp_path).schedule.steps == 10_000
    assert opened.scheduler_config["beta_schedule"] == "linear" and opened.scheduler_config["steps_offset"] == 1


def test_the_scheduler_of_an_export_is_kept_as_it_is(tmp_path):
    """Published ones name other spacings of timesteps, by which ddim draws other pictures."""
    DDPM().save(tmp_path)
    file = tmp_path / "scheduler_config.json"
    saved = json.loads(file.read_text()) | {"timestep_spacing": "trailing", "set_alpha_to_one": True}
    file.write_text(json.dumps(saved))
    kept = {name: value for name, value in saved.items() if not name.startswith("_")}
    assert DDPM.open(tmp_path).scheduler_config == kept != saved
