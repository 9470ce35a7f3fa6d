"""Samplers on denoisers that are known in closed form, so that the right answer is too."""

import pytest
import torch

from recipes.models.latent_diffusion.ddpm import DDPM
from recipes.models.latent_diffusion.objective import seeded_noise
from recipes.models.latent_diffusion.samplers import make_scheduler

SHAPE = (2, 4, 4)
SCHEDULE = DDPM().schedule


def exact(mean, deviation, prediction="epsilon"):
    """The best prediction where data is N(mean, deviation^2), for each number apart."""

    def denoise(x, timesteps, text):
        alpha, sigma = (table[timesteps].reshape(-1, 1, 1, 1) for table in (SCHEDULE.alpha, SCHEDULE.sigma))
        epsilon = sigma * (x - alpha * mean) / (alpha**2 * deviation**2 + sigma**2)
        return epsilon if prediction == "epsilon" else alpha * epsilon - sigma * (x - sigma * epsilon) / alpha

    return denoise


def run(denoise, sampler, steps, prediction="epsilon", guidance=1.0, batch=3, text=None, null_text=None):
    noise = seeded_noise(list(range(batch)), SHAPE)
    text = torch.zeros(batch, 1, 1) if text is None else text
    null_text = torch.zeros(1, 1) if null_text is None else null_text
    objective = DDPM(prediction=prediction)
    return noise, objective.sample(denoise, noise, text, null_text, steps, guidance, sampler=sampler)


def on_the_flow(noise, mean, deviation, step):
    """Where the probability flow that starts from `noise` is at a step: the same quantile of each marginal."""

    def spread(i):
        return (SCHEDULE.alpha[i] ** 2 * deviation**2 + SCHEDULE.sigma[i] ** 2).sqrt()

    return SCHEDULE.alpha[step] * mean + spread(step) * (noise - SCHEDULE.alpha[-1] * mean) / spread(-1)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_ddim_finds_a_single_point(prediction):
    """The way from noise to a point is straight: any number of steps is exact, down to step 0's own noise."""
    mean = torch.linspace(-2, 2, 32).reshape(SHAPE)
    for steps in (2, 5, 20):
        noise, made = run(exact(mean, 0.0, prediction), "ddim", steps, prediction)
        first = 1 + (1000 // steps) * (steps - 1)  # the timestep it starts from, in diffusers' leading spacing
        start = (noise - SCHEDULE.alpha[first] * mean) / SCHEDULE.sigma[first]
        torch.testing.assert_close(made, SCHEDULE.alpha[0] * mean + SCHEDULE.sigma[0] * start, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sampler", DDPM.samplers)
def test_as_many_steps_as_timesteps_are_refused(sampler):
    assert run(exact(0.7, 0.5), sampler, 999)[1].isfinite().all()
    for steps in (1000, 1001):
        with pytest.raises(ValueError, match=f"steps must be below the 1000 timesteps.*, got {steps}"):
            run(exact(0.7, 0.5), sampler, steps)


@pytest.mark.parametrize(("timesteps", "most"), [(1000, 995), (100, 98)])
def test_dpm_takes_fewer_steps_in_the_cosine_schedule(timesteps, most):
    """It begins before the last timestep. Two steps that share one gave pictures of NaN."""
    objective = DDPM(beta_schedule="squaredcos_cap_v2", steps=timesteps, eval_timesteps=[0])
    tables = objective.schedule

    def denoise(x, times, text):  # exact for the one point 0.7
        return (x - 0.7 * tables.alpha[times].reshape(-1, 1, 1, 1)) / tables.sigma[times].reshape(-1, 1, 1, 1)

    def sample(steps):
        noise, text = seeded_noise([0], SHAPE), torch.zeros(1, 1, 1)
        return objective.sample(denoise, noise, text, text[0], steps, 1.0, sampler="dpm++")

    torch.testing.assert_close(sample(most), torch.full((1, *SHAPE), 0.7), rtol=0, atol=1e-3)
    for steps in range(most + 1, timesteps):
        with pytest.raises(ValueError, match=rf"{steps} steps of dpm\+\+ begin at .*; give {most} or fewer"):
            sample(steps)


@pytest.mark.parametrize(("steps", "first", "better"), [(150, 895, 142), (340, 679, 333), (600, 600, 500)])
def test_ddim_begins_near_the_noise(steps, first, better):
    with pytest.raises(ValueError, match=f"{steps} steps of ddim begin at timestep {first} of 1000.*; give {better},"):
        run(exact(0.7, 0.5), "ddim", steps)
    assert run(exact(0.7, 0.5), "ddim", better)[1].isfinite().all()


def test_one_step_of_ddim_would_give_noise():
    with pytest.raises(ValueError, match="1 step of ddim begins at timestep 1 of 1000, .*; give 2 or more"):
        run(exact(0.7, 0.5), "ddim", 1)


@pytest.mark.parametrize("steps", [10, 25, 50])
def test_dpm_bears_a_network_that_errs_a_little_in_the_cosine_schedule(steps):
    """Its last latents hold so little of the image that an error of 1% was multiplied by 200."""
    objective = DDPM(beta_schedule="squaredcos_cap_v2")
    tables, errors = objective.schedule, torch.Generator().manual_seed(0)

    def denoise(x, timesteps, text):
        alpha, sigma = (table[timesteps].reshape(-1, 1, 1, 1) for table in (tables.alpha, tables.sigma))
        epsilon = sigma * (x - alpha) / (alpha**2 * 0.5**2 + sigma**2)  # of data from N(1, 0.5^2)
        return epsilon + 0.01 * torch.randn(x.shape, generator=errors)

    noise = seeded_noise(list(range(64)), SHAPE)
    made = objective.sample(denoise, noise, torch.zeros(64, 1, 1), torch.zeros(1, 1), steps, 1.0, sampler="dpm++")
    # Of 2,048 numbers, the deviation is known to 2%; few steps lose a little of it.
    assert abs(made.std() - 0.5) < 0.05 and abs(made.mean() - 1) < 0.05


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_samplers_find_a_gaussian(prediction):
    mean, deviation = 0.7, 0.5
    noise, ddim = run(exact(mean, deviation, prediction), "ddim", 500, prediction)
    torch.testing.assert_close(ddim, on_the_flow(noise, mean, deviation, 0), rtol=0, atol=0.02)
    # DPM-Solver++ ends with one jump to the expected picture, which costs the more variance the sooner it jumps.
    for steps, tolerance in ((25, 0.1), (100, 0.025)):
        noise, fast = run(exact(mean, deviation, prediction), "dpm++", steps, prediction)
        final = mean + deviation * (noise - SCHEDULE.alpha[-1] * mean) / SCHEDULE.sigma[-1]
        torch.testing.assert_close(fast, final, rtol=0, atol=tolerance)
    assert abs(ddim.std() - deviation) < 0.1 and abs(ddim.mean() - mean) < 0.15


def test_dpm_agrees_with_ddim_at_many_steps():
    _, ddim = run(exact(-0.3, 0.8), "ddim", 500)
    _, dpm = run(exact(-0.3, 0.8), "dpm++", 200)
    assert (ddim - dpm).abs().max() < 0.05  # ddim keeps step 0's noise, of deviation 0.03


@pytest.mark.parametrize("sampler", ["ddim", "dpm++"])
def test_a_saved_scheduler_samples_as_the_one_in_training(tmp_path, sampler):
    """An export holds a DDIM config with all of diffusers' defaults, which are not those of DPM-Solver++."""
    DDPM().save(tmp_path)
    noise, both = seeded_noise([0], SHAPE), []
    for objective in (DDPM(), DDPM.open(tmp_path)):
        zeros = torch.zeros(1, 1, 1), torch.zeros(1, 1)
        both.append(objective.sample(exact(0.7, 0.5), noise, *zeros, 5, 1.0, sampler=sampler))
        scheduler = make_scheduler(sampler, objective.scheduler_config)
        scheduler.set_timesteps(5)
        assert scheduler.timesteps[0] == (801 if sampler == "ddim" else 999)
    assert (both[0] == both[1]).all()


class Recorder:
    """Predicts the first number of the text everywhere, in bf16; remembers the batches it was given."""

    def __init__(self):
        self.batches = []

    def __call__(self, x, timesteps, text):
        assert x.dtype == torch.float32  # schedulers would give latents the number format of a prediction
        self.batches.append((len(x), timesteps, text))
        return text[:, 0, 0].reshape(-1, 1, 1, 1).expand_as(x).bfloat16()


@pytest.mark.parametrize("sampler", ["ddim", "dpm++"])
def test_guidance(sampler):
    text, null = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1), torch.full((1, 1), 0.5)

    def guided(scale):
        recorder = Recorder()
        return run(recorder, sampler, 3, guidance=scale, text=text, null_text=null)[1], recorder.batches

    plain, batches = guided(1.0)
    assert [size for size, _, _ in batches] == [3, 3, 3] and all((t == text).all() for _, _, t in batches)
    assert all(len(timesteps) == size for size, timesteps, _ in batches)
    alone, _ = guided(0.0)
    torch.testing.assert_close(alone, run(Recorder(), sampler, 3, text=null.expand(3, 1, 1))[1])
    for scale in (0.0, 3.0):
        made, batches = guided(scale)
        assert [size for size, _, _ in batches] == [6, 6, 6]
        assert (batches[0][2][:3] == null).all() and (batches[0][2][3:] == text).all()
        # A constant prediction goes through both samplers linearly.
        direct = run(Recorder(), sampler, 3, text=null + scale * (text - null))[1]
        torch.testing.assert_close(made, direct, rtol=1e-4, atol=1e-4)
    assert (plain - alone).abs().max() > 0.1


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_nothing_is_kept_for_a_backward_pass(guidance):
    """The activations of all steps would be: 25 times those of a training step."""
    weight = torch.ones(1, requires_grad=True)
    assert not run(lambda latents, times, text: weight * latents, "ddim", 2, guidance=guidance)[1].requires_grad


def test_noise_is_a_function_of_the_seed():
    together, state = seeded_noise([3, 4, 5], SHAPE), torch.get_rng_state()
    assert (together[1:2] == seeded_noise([4], SHAPE)).all() and (together[0] != together[1]).any()
    assert (torch.get_rng_state() == state).all()
    assert abs(seeded_noise([1], (4, 64, 64)).std() - 1) < 0.02


@pytest.mark.parametrize("sampler", ["ddim", "dpm++"])
def test_a_picture_does_not_depend_on_its_batch(sampler):
    text = torch.linspace(-1, 1, 3).reshape(3, 1, 1)

    def denoise(x, timesteps, text):
        return exact(text.mean(dim=(1, 2)).reshape(-1, 1, 1, 1), 0.5)(x, timesteps, text)

    _, together = run(denoise, sampler, 5, guidance=2.0, text=text)
    for i in range(3):
        noise = seeded_noise([i], SHAPE)
        alone = DDPM().sample(denoise, noise, text[i : i + 1], torch.zeros(1, 1), 5, guidance=2.0, sampler=sampler)
        torch.testing.assert_close(alone[0], together[i], rtol=1e-5, atol=1e-5)


def test_the_default_sampler():
    assert torch.equal(run(exact(0.3, 0.5), None, 4)[1], run(exact(0.3, 0.5), "dpm++", 4)[1])


def test_what_cannot_be():
    with pytest.raises(ValueError, match=r"sampler: `euler` is unknown to ddpm; allowed: dpm\+\+, ddim"):
        run(Recorder(), "euler", 1)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        run(Recorder(), "ddim", 0)
