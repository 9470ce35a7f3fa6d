"""Run on two ranks by test_tokens.py: a sharded transformer against a whole one, then runs of a recipe.

Sharded by block or whole, with blocks that are computed again or kept, in 64 bits: gradients, validation, sampling.

argv: the recipe, and a folder for the second run of it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from composer import DataSpec, Trainer
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from callbacks.plateau import Plateau
from recipes.algorithms.modules.activation_checkpointing import recompute
from recipes.algorithms.powersgd.lever import PowerSGD
from recipes.algorithms.sharding.shard import shard
from recipes.config.recipe import Recipe, load_config
from recipes.engines.composer.model import ComposerTask
from recipes.engines.composer.trainer import build_trainer
from recipes.models.autoregressive.sampler import Choice, uniforms
from recipes.models.autoregressive.task import Autoregressive
from recipes.training.microbatches import samples_of, split, with_batch_means
from tests.recipes.algorithms.composer_levers import algorithms_of
from tests.recipes.engines.composer.inside import callback_of, lever_of

BATCH = 4


def make_task() -> Autoregressive:
    torch.manual_seed(0)
    task = Autoregressive(
        layers=3, width=16, heads=2, text_positions=5, text_vocabulary=10, side=4, codes=8, kernel=3
    ).double()  # fmt: skip
    for parameter in task.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return task


def gradients(task: Autoregressive) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in task.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def check_sharding() -> None:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(10, (BATCH, 5), generator=generator)
    for row, length in enumerate([4, 1, 5, 3]):  # 3 predicted tokens on the first rank, 6 on the second
        text[row, length:] = -1
    batch = {"text": text, "image": torch.randint(8, (BATCH, 16), generator=generator)}
    half = {name: tensor[dist.get_rank() * 2 :][:2] for name, tensor in batch.items()}
    half = with_batch_means(half, make_task(), torch.device("cpu"))
    uniform = uniforms(list(range(2 * BATCH)), 16).unflatten(0, (BATCH, 2))
    choice = Choice(guidance=2.0)

    whole = make_task()
    loss = whole(batch)["total"]
    loss.backward()
    wanted, evaluated, sampled = gradients(whole), whole.evaluate(batch)["loss"], whole.sample(text, uniform, choice)
    for by_block, again, late in ((True, False, False), (False, True, False), (True, True, True)):
        task = make_task()
        if again:
            recompute(task.blocks())
        shard(task, init_device_mesh("cpu", (2,)), by_block=by_block, reshard_after_forward=late)
        assert torch.equal(task.sample(text, uniform, choice), sampled)
        own = task.evaluate(half)["loss"]
        torch.testing.assert_close(own, evaluated[dist.get_rank() * 2 :][:2])
        mean = task(half)["total"]
        mean.backward()
        dist.all_reduce(mean.detach_())
        torch.testing.assert_close(mean / 2, loss.detach(), rtol=1e-6, atol=0)  # the mean of tokens is float32
        for name, gradient in gradients(task).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-6, atol=1e-9, msg=name)
    check_division(half, wanted)


def check_division(half: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """A step of Composer under DDP is that of the whole batch, also where ranks have one microbatch or two."""
    del half["text_tokens"]
    for microbatch in (1, 2):
        task = make_task()
        before = {name: parameter.detach().clone() for name, parameter in task.named_parameters()}
        Trainer(
            model=ComposerTask(task),
            train_dataloader=DataSpec([half], split_batch=split, get_num_samples_in_batch=samples_of),
            max_duration="1ba",
            optimizers=torch.optim.SGD(task.parameters(), lr=1.0),
            algorithms=algorithms_of([], task),
            device="cpu",
            device_train_microbatch_size=microbatch,
            progress_bar=False,
        ).fit()
        for name, parameter in task.named_parameters():
            torch.testing.assert_close(before[name] - parameter, wanted[name], rtol=1e-6, atol=1e-9, msg=name)


def check_16_bit_training(recipe: str, folder: Path) -> None:
    """A run with all of DALL-E's 16-bit training: two machines of one device, which stay the same to the last bit."""
    overrides = [
        f"output={folder}",
        "optimizer={name: adam16, lr: 1e-3, compiled: false}",
        "training.precision=fp32",
        "training.fsdp={strategy: FULL_SHARD, replicas: 2}",
        "training.grad_clip=null",
        "algorithms.scaling={name: resblock_grad_scaling}",
        "algorithms.averaging={name: powersgd, rank: 4, overlap: true, clip: 4.0}",
    ]
    trainer = build_trainer(load_config(recipe, overrides, Recipe))
    trainer.fit()
    averaging = lever_of(trainer, PowerSGD)
    assert averaging.skipped == 0 and averaging.overlapped is not None
    assert len(averaging.blocks[0]) == 4
    for parameter in trainer.state.model.parameters():
        assert isinstance(parameter, DTensor) and parameter.device_mesh.size() == 1
        first = parameter.to_local().detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, parameter.to_local())
    trainer.close()


def main() -> None:
    dist.init_process_group("gloo")
    check_sharding()
    trainer = build_trainer(load_config(sys.argv[1], [], Recipe))
    trainer.fit()
    schedule = callback_of(trainer, Plateau)
    plateaus = torch.tensor([schedule.rule.plateaus])
    trainer.close()
    both = [torch.zeros_like(plateaus) for _ in range(2)]
    dist.all_gather(both, plateaus)
    assert both[0] == both[1] > 0, both
    check_16_bit_training(sys.argv[1], Path(sys.argv[2]))
    print("all as it should be", flush=True)


if __name__ == "__main__":
    main()
