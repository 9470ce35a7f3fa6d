"""A check that `lever_ranks` runs on two ranks: 16-bit weights, whose gradients DistributedDataParallel averages."""

from pathlib import Path

import torch
import torch.distributed as dist
from composer import DataSpec, Trainer

from recipes.algorithms.gradients.clipping import ClipByNorm
from recipes.algorithms.optimizers import adam16
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.engines.composer.model import ComposerTask
from recipes.training.microbatches import samples_of, split
from tests.recipes.algorithms.composer_levers import algorithms_of
from tests.recipes.algorithms.residual import WordTask

WEIGHTS = "weights and gradients in 16 bits"


def train(weights: str) -> dict[str, torch.Tensor]:
    task = WordTask()
    words = torch.randint(11, (2, 4, 8, 6), generator=torch.Generator().manual_seed(5))[dist.get_rank()]
    trainer = Trainer(
        model=ComposerTask(task),
        train_dataloader=DataSpec(
            [{"words": batch} for batch in words], split_batch=split, get_num_samples_in_batch=samples_of
        ),
        max_duration="4ba",
        optimizers=adam16(task.parameters(), task, lr=0.01, compiled=False),
        algorithms=algorithms_of([ResblockGradScaling(task, weights=weights), ClipByNorm(0.5)], task),
        device="cpu",
        device_train_microbatch_size=4,
        progress_bar=False,
    )
    trainer.fit()
    return {name: parameter.detach() for name, parameter in task.named_parameters()}


def check(folder: Path) -> None:
    """Ranks stay the same to the last bit, and near to those with 32-bit weights."""
    low, plain = train("fp16"), train("fp32")
    assert {value.dtype for value in low.values()} == {torch.float16, torch.float32}
    for name, value in low.items():
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value), name
        # Four steps of 0.01, of weights up to 0.5, which float16 rounds by up to 2^-12 per step.
        torch.testing.assert_close(value.float(), plain[name], rtol=0, atol=4e-3, msg=name)


CHECKS = {WEIGHTS: check}
