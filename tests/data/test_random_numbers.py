"""Random numbers of samples: known values, their distribution, and what they depend on."""

import math

import pytest
import torch

from data.random_numbers import STEP, Draws, SampleDraws, draws_of, mix, seeds_of


def test_the_words_are_those_of_splitmix64():
    """The first values of the generator with seed 0, of its authors' code."""
    words = mix(STEP * torch.arange(1, 4)).tolist()
    assert [word % 2**64 for word in words] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def splitmix64(state):
    """The generator, written out in Python's integers."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        word = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        yield word ^ word >> 31


def test_numbers_stay_from_version_to_version():
    """Each kind is a generator of its own, whose seed comes from that of the sample."""
    assert seeds_of(torch.tensor([5, 2**62]), seed=17, batch=3).tolist() == [-6041609333747845862, 4812516837559436835]
    draws, seeds, x = SampleDraws(torch.tensor([0]), kind=1), splitmix64(0), torch.empty(1, 1)
    assert draws.integers(x, 10**9).item() == (next(splitmix64(next(seeds))) >> 1) % 10**9
    assert draws.uniform(x).item() == (next(splitmix64(next(seeds))) >> 40) / 2**24


@pytest.fixture(scope="module")
def numbers():
    return SampleDraws(torch.arange(40)).normal_like(torch.empty(40, 4, 25, 25))


def test_normal_numbers_are_standard_and_independent(numbers):
    """100,000 numbers: each bound is four deviations of its estimate, or more."""
    count, flat = numbers.numel(), numbers.flatten().double()
    assert flat.isfinite().all() and abs(flat.mean()) < 4 / math.sqrt(count)
    for power, moment, deviation in ((2, 1, math.sqrt(2)), (3, 0, math.sqrt(15)), (4, 3, math.sqrt(96))):
        assert abs(flat.pow(power).mean() - moment) < 4 * deviation / math.sqrt(count), power
    ordered, place = flat.sort().values, (torch.arange(count) + 0.5) / count
    assert (torch.special.ndtr(ordered) - place).abs().max() < 1.95 / math.sqrt(count)  # Kolmogorov, 0.1 %
    samples = numbers.flatten(1)
    correlation = torch.corrcoef(samples) - torch.eye(40)
    assert correlation.abs().max() < 5 / math.sqrt(samples.shape[1])
    assert abs((samples[:, 1:] * samples[:, :-1]).mean()) < 4 / math.sqrt(count)
    # The halves come from the same words.
    assert abs((samples[:, :1250] * samples[:, 1250:]).mean()) < 4 / math.sqrt(count / 2)


def test_the_ends_of_the_words_are_finite_numbers(monkeypatch):
    """One word in 2^32, which a batch of latents may well meet, has an upper half of zeros."""
    monkeypatch.setattr(SampleDraws, "_words", lambda draws, count: torch.tensor([[0], [-1]]))
    ends = SampleDraws(torch.arange(2)).normal(torch.empty(2, 1))
    assert ends.tolist() == pytest.approx([math.sqrt(64 * math.log(2)), 0])


def test_uniform_numbers_and_integers():
    draws, x = SampleDraws(torch.arange(20000)), torch.empty(20000, 1)
    uniform = draws.uniform(x)
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 4 / math.sqrt(12 * 20000)
    integers = draws.integers(x, 7)
    counts = integers.bincount(minlength=7)
    assert len(counts) == 7 and (counts - 20000 / 7).abs().max() < 4 * math.sqrt(20000 / 7)
    scalars = draws.normal(x)
    assert abs(scalars.mean()) < 4 / math.sqrt(20000) and abs(scalars.var() - 1) < 4 * math.sqrt(2 / 20000)
    assert abs(torch.corrcoef(torch.stack([uniform, integers.float(), scalars])) - torch.eye(3)).max() < 0.03


def test_a_sample_has_the_same_numbers_in_any_batch(numbers):
    for part in (slice(7, 8), slice(3, 40)):
        seeds = torch.arange(40)[part]
        alone = SampleDraws(seeds).normal_like(torch.empty(len(seeds), 4, 25, 25))
        # Where a vector ends, PyTorch computes logarithms one by one, which may round otherwise.
        torch.testing.assert_close(alone, numbers[part], rtol=1e-5, atol=1e-6)


def test_what_numbers_depend_on():
    samples = torch.tensor([5, 2**62, 5])
    first = seeds_of(samples, seed=17, batch=3)
    assert first[0] == first[2] != first[1]
    others = [seeds_of(samples, 17, 4), seeds_of(samples, 3, 17), seeds_of(samples, 18, 3)]
    assert all((first != other).all() for other in others)
    batch, x = {"draws": first}, torch.empty(3, 2)
    data, model = draws_of(batch, 0), draws_of(batch, 1)
    drawn = [data.normal_like(x), data.normal_like(x), model.normal_like(x)]
    assert all((a != b).all() for a, b in zip(drawn, drawn[1:] + drawn[:1], strict=True))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    draws_of(batch, 0).uniform(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_numbers_of_samples_the_generator_is_used_as_ever():
    """In the same order, so that results of earlier versions stay."""
    x = torch.empty(4, 3, 2)
    torch.manual_seed(0)
    draws = draws_of({}, 1)
    own = [draws.normal_like(x), draws.integers(x, 9), draws.uniform(x), draws.normal(x)]
    torch.manual_seed(0)
    theirs = [torch.randn_like(x), torch.randint(9, (4,)), torch.rand(4), torch.randn(4)]
    assert type(draws) is Draws and all(torch.equal(a, b) for a, b in zip(own, theirs, strict=True))
