"""Run on two ranks by test_scheduled_ema.py: averages of sharded models against one of the whole model."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor

from recipes.algorithms.averaging.average import Average, HostAverage, own

KEEP = 0.8


def network() -> nn.Module:
    torch.manual_seed(0)
    # 5 rows do not divide by two ranks, and the last bias has one element: one rank has nothing of it.
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def right_mean_on_cpu() -> None:
    """PyTorch 2.7 with gloo sums where FSDP2 asks for the mean; divide first."""
    if torch.__version__.startswith("2.7"):
        _fsdp_collectives._get_gradient_divide_factors = lambda *args, **kwargs: (float(dist.get_world_size()), 1.0)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(batch(step)).square().mean().backward()  # the same batch on each rank: the mean is one rank's gradient
    optimizer.step()
    optimizer.zero_grad()


def near(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def check(shard, kind: type[Average], part: float) -> None:
    """Train, average, validate in between, save and load; every figure against the whole model's."""
    plain, sharded = network(), shard(network())
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
    assert sharded_average.bytes <= part * 4 * size, (sharded_average.bytes, size)
    held = torch.tensor(float(sharded_average.bytes))
    dist.all_reduce(held)
    assert held <= 4 * size + 64  # flat parameters are padded

    tensors = sharded_average.whole()
    if dist.get_rank() == 0:
        for name, want in zip(whole.names, whole.shadow, strict=True):
            near(tensors[name], want)
    else:
        assert not tensors or "FullySharded" in repr(sharded)
    lists = [tensors]
    dist.broadcast_object_list(lists)
    again = kind(shard(network()))
    again.load(lists[0])
    for a, b in zip(again.shadow, sharded_average.shadow, strict=True):
        assert torch.equal(a, b)
    for parameter, first in zip(again.parameters, kind(shard(network())).shadow, strict=True):
        assert torch.equal(own(parameter), first)  # loading an average leaves the weights


def fsdp2(reshard_after_forward: bool):
    def shard(model: nn.Module) -> nn.Module:
        for layer in model[:4]:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, reshard_after_forward=reshard_after_forward)
        model = fully_shard(model, reshard_after_forward=reshard_after_forward)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return model

    return shard


def fsdp1(model: nn.Module) -> nn.Module:
    model[0] = FullyShardedDataParallel(
        model[0], sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True, device_id=torch.device("cpu")
    )
    return FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True, device_id=torch.device("cpu")
    )


def check_composer(folder: Path) -> None:
    """FSDP2 under Composer with full and sharded checkpoints: resuming changes nothing; DDP reads the full ones."""
    from composer.utils import FSDP2Config
    from test_scheduled_ema import ScheduledEMA, trainer

    for kind in ("full", "sharded", None):

        def options(kind=kind):
            config = {"fsdp": FSDP2Config(state_dict_type=kind, reshard_after_forward=False)}
            return {"parallelism_config": config if kind else None}

        arguments = {"decay": 0.7, "start": "5ba", "every": 2}
        ema = ScheduledEMA(**arguments)
        saved = str(folder / str(kind))
        made = trainer(ema, save_folder=saved, save_interval="1ba", **options())
        made.fit()
        for batch_number in (3, 5, 8):
            pattern = f"*-ba{batch_number}" if kind == "sharded" else f"*-ba{batch_number}-rank0.pt"
            path = str(next(Path(saved).glob(pattern)))
            other = ScheduledEMA(**arguments)
            resumed = trainer(other, load_path=path, **options())
            resumed.fit()
            local = [torch.cat([own(p).flatten() for p in t.state.model.parameters()]) for t in (made, resumed)]
            assert torch.equal(*local), (kind, batch_number)
            assert other.begun == ema.begun == 5
            assert all(torch.equal(a, b) for a, b in zip(other.average.shadow, ema.average.shadow, strict=True))
        if kind == "full":
            plain = ScheduledEMA(**arguments)
            trainer(plain, load_path=str(next(Path(saved).glob("*-ba12-rank0.pt"))))
            whole, unsharded = ema.average.whole(), plain.average.whole()
            if dist.get_rank() == 0:
                assert all(torch.equal(whole[name], unsharded[name]) for name in unsharded)


def main() -> None:
    os.environ.setdefault("NODE_RANK", "0")  # Composer asks for it
    dist.init_process_group("gloo")
    right_mean_on_cpu()
    torch.set_num_threads(1)
    for kind in (Average, HostAverage):
        for reshard_after_forward in (True, False):
            check(fsdp2(reshard_after_forward), kind, part=0.6)
        check(fsdp1, kind, part=0.6)
    check_composer(Path(sys.argv[1]))
    print("all as it should be", flush=True)
    dist.barrier()
    os._exit(0)  # Composer's threads


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
