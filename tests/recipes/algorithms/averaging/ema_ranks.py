"""Checks that `lever_ranks` runs on two ranks: averages of sharded models against one of the whole model."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from composer import Event, State
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from recipes.algorithms.averaging.average import Average, HostAverage
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.sharding.shard import divide_by_ranks_on_cpu
from recipes.algorithms.sharding.shards import own
from recipes.algorithms.sharding.shards import whole as whole_of
from recipes.engines.checkpoints.sharded_files import Sharded

KEEP = 0.8
# Batches after which Composer saves: before the average begins, at its beginning, later, and at the end.
SAVED = (3, 5, 8, 12)


def network() -> nn.Module:
    torch.manual_seed(0)
    # 5 rows do not divide by two ranks, and the last bias has one element: one rank has nothing of it.
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch(step)).square().mean().backward()  # the same batch on each rank: the mean is one rank's gradient
    optimizer.step()
    optimizer.zero_grad()


def near(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def check_average(kind: type[Average], reshard_after_forward: bool, folder: Path) -> None:
    """Train, average, validate in between, save and load; every figure against the whole model's."""
    divide_by_ranks_on_cpu()
    shard = partial(fsdp2, reshard_after_forward=reshard_after_forward)
    plain, sharded = network(), shard(network())
    with torch.no_grad():
        sharded(batch(90))  # which leaves parameters gathered
    averages = Average(plain), kind(sharded)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, sharded)]
    for step in range(6):
        for model, average, optimizer in zip((plain, sharded), averages, optimizers, strict=True):
            average.before_step()
            step_of(model, optimizer, step)
            average.update(KEEP)
        if step in (2, 4):  # a forward pass alone leaves parameters gathered
            outputs = []
            with torch.no_grad():
                sharded(batch(90))
                for model, average in zip((plain, sharded), averages, strict=True):
                    average.put_in()
                    outputs.append(model(batch(99)))
                    average.take_out()
            near(*outputs)
    near(sharded(batch(98)), plain(batch(98)))
    whole, sharded_average = averages
    size = sum(t.numel() for t in whole.shadow)
    assert sharded_average.bytes <= 0.6 * 4 * size, (sharded_average.bytes, size)
    held = torch.tensor(float(sharded_average.bytes))
    dist.all_reduce(held)
    assert held == 4 * size

    tensors = sharded_average.tensors()
    gathered = {name: whole_of(tensor) for name, tensor in tensors.items()}
    for name, want in zip(whole.names, whole.shadow, strict=True):
        assert tensors[name].to_local().data_ptr() == sharded_average.shadow[whole.names.index(name)].data_ptr()
        near(gathered[name], want)
    for form in (tensors, gathered):
        again = kind(shard(network()))
        again.load(form)
        for a, b in zip(again.shadow, sharded_average.shadow, strict=True):
            assert torch.equal(a, b)
    for parameter, first in zip(again.parameters, kind(shard(network())).shadow, strict=True):
        assert torch.equal(own(parameter), first)  # loading an average leaves the weights


def fsdp2(model: nn.Module, reshard_after_forward: bool) -> nn.Module:
    for layer in model[:4]:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, reshard_after_forward=reshard_after_forward)
    model = fully_shard(model, reshard_after_forward=reshard_after_forward)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


def due(state: State, event: Event) -> bool:
    return event == Event.BATCH_CHECKPOINT and state.timestamp.batch.value in SAVED


def check_composer(folder: Path) -> None:
    """FSDP2 under Composer with full and sharded checkpoints: resuming changes nothing; DDP reads the full ones."""
    from tests.recipes.algorithms.averaging.test_scheduled_ema import trainer

    for kind in ("full", "sharded", None):
        arguments = {"decay": 0.7, "start": "5ba", "every": 2}
        ema = ScheduledEMA(**arguments)
        saved = str(folder / str(kind))
        made = trainer(ema, checkpoints=kind, folder=saved, due=due)
        made.fit()
        assert any(isinstance(p, DTensor) for p in made.state.model.parameters()) == (kind is not None)
        for batch_number in SAVED[:3]:
            pattern = f"*-ba{batch_number}" if kind == "sharded" else f"*-ba{batch_number}-rank0.pt"
            path = str(next(Path(saved).glob(pattern)))
            if kind == "sharded":
                held = Sharded.open(Path(path)).metadata.state_dict_metadata
                averages = {f"levers.ScheduledEMA.average.{name}" for name in ema.average.names}
                assert averages & held.keys() == (averages if batch_number >= 5 else set())
            other = ScheduledEMA(**arguments)
            resumed = trainer(other, checkpoints=kind, load_path=path)
            resumed.fit()
            local = [torch.cat([own(p).flatten() for p in t.state.model.parameters()]) for t in (made, resumed)]
            assert torch.equal(*local), (kind, batch_number)
            assert other.begun == ema.begun == 5
            assert all(torch.equal(a, b) for a, b in zip(other.average.shadow, ema.average.shadow, strict=True))
        if kind == "full":
            plain = ScheduledEMA(**arguments)
            trainer(plain, load_path=str(next(Path(saved).glob("*-ba12-rank0.pt"))))
            unsharded = plain.average.tensors()
            assert all(torch.equal(whole_of(t), unsharded[name]) for name, t in ema.average.tensors().items())


CHECKS = {
    f"{kind.__name__}, reshard_after_forward={reshard}": partial(check_average, kind, reshard)
    for kind in (Average, HostAverage)
    for reshard in (True, False)
} | {"average in Composer's checkpoints": check_composer}
