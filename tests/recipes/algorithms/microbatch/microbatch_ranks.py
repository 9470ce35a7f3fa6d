"""Run on two ranks by test_microbatch.py: ranks whose memories differ find one microbatch, under DDP and FSDP2.

Under FSDP2 the network is compiled too, once the search has ended. Runs with a search have the fused AdamW, those that
they are held against the plain one; the last bias has one element, so that one rank's shard of it is empty.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from composer import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from test_microbatch import MB, FakeMemory, Line, data  # noqa: E402

from recipes.algorithms.averaging.average import own  # noqa: E402
from recipes.algorithms.microbatch.search import MicrobatchSearch  # noqa: E402
from recipes.algorithms.modules.compile import Compile  # noqa: E402
from recipes.algorithms.optimizers import adamw  # noqa: E402
from recipes.algorithms.sharding.fsdp import Sharding  # noqa: E402
from recipes.engines.composer.model import ComposerTask  # noqa: E402


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([own(p).detach().flatten() for p in model.parameters()])


def train(memory: FakeMemory | None, microbatch: int, sharded: bool) -> torch.Tensor:
    """This rank's weights after a run."""
    task = Line()
    search = [] if memory is None else [MicrobatchSearch(task, 24, memory)]
    more = []
    if sharded:
        more = [
            Compile(task, backend="aot_eager"),
            Sharding(
                task,
                full_shard=False,
                by_block=True,
                parameters="fp32",
                replicas=1,
                sync="microbatch",
                checkpoints="full",
            ),
        ]
    made = Trainer(
        model=ComposerTask(task),
        train_dataloader=data(),
        max_duration="10ba",
        optimizers=adamw(task.parameters(), lr=0.05, fused=memory is not None),
        algorithms=[*search, *more],
        device="cpu",
        device_train_microbatch_size=microbatch,
        parallelism_config={"fsdp": more[1].composer_config()} if sharded else None,
        progress_bar=False,
    )
    if memory is not None:
        memory.state = made.state
    made.fit()
    if memory is not None:
        assert search[0].settled
        sizes = [None, None]
        dist.all_gather_object(sizes, memory.sizes)
        # The first rank alone would take 1, 1, 2, 8, 24; the second has room for 6 samples.
        with_compiled = [6, 6] if sharded else []
        assert sizes[0] == sizes[1] == [1, 1, 2, 6, *with_compiled], sizes
        assert made.state.device_train_microbatch_size == 6
    return weights(made.state.model)


def main() -> None:
    os.environ.setdefault("NODE_RANK", "0")  # Composer asks for it
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for sharded in (False, True):
        each = (100 * MB, 1_200 * MB)[dist.get_rank()]
        found = train(FakeMemory(held=1_000 * MB, fixed=500 * MB, each=each), 1, sharded)
        whole = train(None, 24, sharded)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-12)
    print("agreed", flush=True)
    dist.barrier()
    os._exit(0)  # Composer's threads


if __name__ == "__main__":
    main()
