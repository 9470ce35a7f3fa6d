"""How many kernels a step launches, and how often the host waits: limits that a change may lower, and not raise."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.common.counting import Launches, counting
from benchmarks.launches import CHANGES, count_step, narrow_recipe

# Recipe -> most launches per microbatch in the forward and in the backward pass, then the rest of a step.
LIMITS = {
    "sd2_base": (1000, 1960, 20),
    "dalle_1b": (750, 1260, 30),  # queries, keys and values are three products, so that heads can be divided
    "dvae": (370, 450, 20),
    "openmoji_text": (240, 470, 30),
    "openmoji_vae": (250, 310, 310),  # of muon: 15 products for each of 12 shapes of matrices
    "openmoji_diffusion": (420, 770, 30),
    "docs_gpt2": (250, 310, 30),
    "dalle_2b": (180, 490, 3800),  # of compression; on a CPU the numbers on the wire have no kernels of their own
}
# Operation -> times that the host reads values in a step: the guard reads once whether gradients are finite, and if a
# rank is to stop. The engines, which are not counted, read the number of samples and the loss besides.
WAITS = {"tolist": 1}
# Recipes with more. On a GPU three of these are waits for the device: `cpu`, whether blocks overflowed; two of
# `tolist`, of powersgd: which bases to compute again, and the norm, by which an update is skipped. All else is in the
# host's memory: the optimizer's counters of steps, one for each of 73 parameters.
MORE_WAITS = {"dalle_2b": {"cpu": 1, "tolist": 5, "_local_scalar_dense": 76}}
PASSES = 2


@pytest.fixture(autouse=True)
def no_group():
    """Trainers of other tests leave their group of one process, and powersgd is counted in another one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def step_of():
    """Recipe, with overrides -> its counts, each made once."""
    made = {}

    def step(name, *overrides):
        if (name, overrides) not in made:
            made[name, overrides] = count_step(narrow_recipe(name, *overrides), PASSES)
        return made[name, overrides]

    return step


@pytest.mark.parametrize("name", list(LIMITS))
def test_a_step_stays_within_its_limits(step_of, name):
    step = step_of(name)
    forward, backward, rest = LIMITS[name]
    assert step.waits == MORE_WAITS.get(name, WAITS)
    assert step.forward.total <= forward * PASSES, step.forward.launches.most_common(20)
    assert step.backward.total <= backward * PASSES, step.backward.launches.most_common(20)
    assert step.rest.total <= rest, step.rest.launches
    assert min(part.total for part in step) > 0


def test_what_the_levers_of_the_u_net_save(step_of):
    plain = step_of("sd2_base", *(f"algorithms.{name}=null" for name in CHANGES))
    step = step_of("sd2_base")
    assert step.forward.total < 0.8 * plain.forward.total and step.backward.total < plain.backward.total
    assert step.forward.copies <= PASSES  # the input's memory format
    assert step.copies < 0.4 * plain.copies
    assert step.casts < plain.casts


def test_everything_that_makes_the_host_wait_is_seen():
    x = torch.tensor([1.0, 0.0, 2.0])
    for wait in (
        lambda: x.sum().item(),
        lambda: bool(x[0]),
        lambda: float(x[0]),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: torch.masked_select(x, x > 0),
        lambda: x.tolist(),
        lambda: x.numpy(),
        lambda: x.cpu(),
        lambda: torch.equal(x, x),
        lambda: x.repeat_interleave(torch.tensor([1, 2, 3])),
    ):
        launches = Launches()
        with counting(launches):
            wait()
        assert sum(launches.waits.values()) >= 1
    launches = Launches()
    with counting(launches):
        y = x.view(3, 1).expand(3, 2).t()
        y = y + x[torch.tensor([0, 1, 1])].to(torch.float16)
        y.clone()
    assert not launches.waits
    assert launches.launches == {"index": 1, "_to_copy": 1, "add": 1, "clone": 1}
    assert (launches.casts, launches.copies, launches.total) == (1, 1, 4)
