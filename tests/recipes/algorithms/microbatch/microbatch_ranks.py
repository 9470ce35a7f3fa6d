"""Checks that `lever_ranks` runs on two ranks: ranks whose memories differ find one microbatch, under DDP and FSDP2.

Under FSDP2 the network is compiled too, once the search has ended. Runs with a search have the fused AdamW, those that
they are compared with the plain one and no compiled network; the last bias has one element, so that one rank's shard of
it is empty.
"""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from composer import Trainer

from recipes.algorithms.microbatch.search import MicrobatchSearch
from recipes.algorithms.modules.compile import Compile
from recipes.algorithms.optimizers import adamw
from recipes.algorithms.sharding.fsdp import Sharding
from recipes.algorithms.sharding.shards import own
from recipes.engines.composer.model import ComposerTask
from tests.recipes.algorithms.composer_levers import algorithms_of, sharded_options
from tests.recipes.algorithms.microbatch.small import MB, FakeMemory, Line, data


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([own(p).detach().flatten() for p in model.parameters()])


def train(memory: FakeMemory | None, microbatch: int, sharded: bool) -> torch.Tensor:
    """This rank's weights after a run."""
    task = Line()
    levers = []
    if sharded and memory is not None:
        levers.append(Compile(task, backend="aot_eager"))
    if sharded:
        levers.append(
            Sharding(task, full_shard=False, by_block=True, parameters="fp32", replicas=1, sync="microbatch")
        )
    search = None
    if memory is not None:
        search = MicrobatchSearch(task, 24, memory, compiled=levers[:1])
        levers.append(search)
    made = Trainer(
        model=ComposerTask(task),
        train_dataloader=data(),
        max_duration="10ba",
        optimizers=adamw(task.parameters(), lr=0.05, fused=memory is not None),
        device="cpu",
        device_train_microbatch_size=microbatch,
        progress_bar=False,
        **(sharded_options(levers, task) if sharded else {"algorithms": algorithms_of(levers, task)}),
    )
    if memory is not None:
        memory.state = made.state
    made.fit()
    if search is not None:
        assert search.settled
        sizes = [None, None]
        dist.all_gather_object(sizes, memory.sizes)
        # The first rank alone would take 1, 1, 2, 8, 24; the second has room for 6 samples.
        with_compiled = [6, 6] if sharded else []
        assert sizes[0] == sizes[1] == [1, 1, 2, 6, *with_compiled], sizes
        assert made.state.device_train_microbatch_size == 6
    return weights(made.state.model)


def check(sharded: bool, folder: Path) -> None:
    """The search agrees on a size, and the weights are those of a run without it."""
    each = (100 * MB, 1_200 * MB)[dist.get_rank()]
    found = train(FakeMemory(held=1_000 * MB, fixed=500 * MB, each=each), 1, sharded)
    whole = train(None, 24, sharded)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)


CHECKS = {
    "one microbatch for ranks with different memory, DDP": partial(check, False),
    "one microbatch for ranks with different memory, FSDP2": partial(check, True),
}
