"""Checks that `lever_ranks` runs on two ranks: sharded models against one process, then whole runs of recipes."""

import gc
import json
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from composer import Callback, Logger, State
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.algorithms.gradients.clipping import clip_by_norm
from recipes.algorithms.modules.activation_checkpointing import recompute, recomputed_modules
from recipes.algorithms.sharding.shard import NORMS, shard, whole_weights
from recipes.config.build import build
from recipes.config.recipe import FSDP, Recipe, load_config
from recipes.models.contrastive.task import ContrastiveText
from recipes.models.latent_diffusion.task import LatentDiffusion
from recipes.planning.devices import Devices
from recipes.planning.footprint import shard_traffic

# What every recipe of the launch has.
RUN = [
    "training.duration=4ba",
    "checkpoints.every=2ba",
    "checkpoints.keep=-1",
    "training.eval_every=2ba",
    "training.grad_clip=0.1",
    "algorithms.ema={name: scheduled_ema, decay: 0.5, start: 1ba}",
    "callbacks.export={name: export}",
    "callbacks.sample_grid={name: sample_grid, prompts: [dots, stars], steps: 2, every: 3ba}",
    "data.caption_dropout=0.0",
]
# What nobody reads of a run whose weights are compared.
WEIGHTS_ALONE = ["checkpoints.save=false", "callbacks.export=null", "callbacks.sample_grid=null"]
# Of whole runs: a megabyte of anything else is little beside its weights.
WIDER = "model.denoiser.width=128"
GRADIENTS, LOW_PRECISION, RUNS = "gradients of shards", "shards in low precision", "recipes with shards"
UNITS, CONTRASTIVE = "units of a published U-Net", "a contrastive model with shards"
CONTRASTIVE_SIZES = {"width": 16, "layers": 2, "heads": 2, "context_length": 8, "vocabulary": 50, "picture_size": 16}
CONTRASTIVE_SIZES |= {"patch_size": 8, "picture_width": 32, "picture_layers": 1, "embedding": 8}
ROOT = Path(__file__).resolve().parents[4]
BATCH = 4
# Of the small U-Net: what a CPU multiplies in 64 bits takes most of the time.
NARROW = ["model.denoiser.channels=[8,16]", "model.denoiser.norm_groups=4", "model.objective.eval_timesteps=[50,950]"]
# How a model is sharded, and whether its blocks are computed again in the backward pass.
MESH_OPTIONS = [
    ({"by_block": True, "reshard_after_forward": False}, False),
    ({"by_block": False, "reshard_after_forward": False}, True),
    ({"by_block": True, "reshard_after_forward": True}, False),
    # Norms apart from the rest, in a format that loses nothing of theirs.
    ({"by_block": True, "parameters": torch.float64}, False),
    ({"by_block": True, "parameters": torch.float64, "reshard_after_forward": True}, True),
    ({"by_block": False, "parameters": torch.float64}, False),
]


class FixedNoise(LatentDiffusion):
    """Noise and timesteps come with the batch, so that any number of ranks sees the same."""

    def forward(self, batch):
        self.given = batch["latents"].dtype
        losses = self.objective(
            lambda x, t: self.denoiser(x, t, batch["text"]), batch["latents"], batch["noise"], batch["timesteps"]
        )
        return {"total": losses.mean()}


def make_task(recipe: Recipe) -> LatentDiffusion:
    torch.manual_seed(0)
    task = build(recipe.model)
    task.__class__ = FixedNoise
    for parameter in task.parameters():  # norms' gains would all be 1, which 16 bits hold exactly
        parameter.data += 0.01 * torch.randn_like(parameter)
    return task


def make_batch(task: LatentDiffusion, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, task.denoiser.latent_channels, 8, 8)
    floats = {
        "latents": torch.randn(shape, generator=generator, dtype=dtype),
        "noise": torch.randn(shape, generator=generator, dtype=dtype),
        "text": torch.randn(BATCH, 12, task.denoiser.text_width, generator=generator, dtype=dtype),
    }
    return {**floats, "timesteps": torch.tensor([10, 300, 600, 990]), "seed": torch.arange(BATCH)}


def part(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    half = BATCH // 2
    return {name: tensor[dist.get_rank() * half :][:half] for name, tensor in batch.items()}


def gradients(task: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in task.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def check_gradients(recipe_file: str, folder: Path) -> None:
    """Loss and gradients of two ranks with half a batch each are those of one process with all of it.

    In 64 bits: with few channels per group, 32 bits are off by 1e-3 in some gradients, whatever the number of ranks.
    """
    recipe = load_config(recipe_file, NARROW, Recipe)
    whole = make_task(recipe).double()
    batch = make_batch(whole, torch.float64)
    loss = whole(batch)["total"]
    loss.backward()
    wanted = gradients(whole)
    weights = whole.state_dict()
    evaluated = whole.evaluate(batch)["loss"]
    denoised = whole.denoise(batch["latents"], batch["timesteps"], batch["text"]).detach()
    largest = max(float(g.abs().max()) for g in wanted.values())
    near = {"rtol": 1e-8, "atol": 1e-10 * largest}
    # Where parameters have a format of their own, the gradients of these are summed in 32 bits.
    summed = {"rtol": 1e-4, "atol": 1e-6 * largest}
    for options, recomputed in MESH_OPTIONS:
        task = make_task(recipe).double()
        task.to(memory_format=torch.channels_last)
        if recomputed:
            recompute(task.recomputed_blocks())
        again = recomputed_modules(task)
        assert len(again) == recomputed * len(task.recomputed_blocks())
        units = shard(task, init_device_mesh("cpu", (2,)), recomputed=again, **options)
        apart = "parameters" in options
        rounded = own_format(task, options["by_block"]) if apart else set()
        # The norms of a model that is one unit: those of each block, or of each part that is computed again, and the
        # one at the end of the U-Net.
        norms = 0 if options["by_block"] or not apart else len(again or task.blocks()) + 1
        assert units == 1 + options["by_block"] * len(task.blocks()) + norms
        assert all(isinstance(p, DTensor) for p in task.parameters())
        size = sum(p.to_local().numel() for p in task.parameters()) / sum(p.numel() for p in task.parameters())
        assert 0.4 < size < 0.6
        # Validation and sampling come first, so that what they gather is still there.
        with torch.no_grad():
            own = task.evaluate(part(batch))["loss"]
            torch.testing.assert_close(own, part({"loss": evaluated})["loss"], **near)
            made = task.denoise(batch["latents"], batch["timesteps"], batch["text"])
            torch.testing.assert_close(made, denoised, rtol=1e-8, atol=1e-8)
        for _ in range(2):  # what the first step leaves must not enter the second
            task.zero_grad()
            with mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gather:
                mean = task(part(batch))["total"]
                mean.backward()
            dist.all_reduce(mean.detach_())
            torch.testing.assert_close(mean / 2, loss.detach(), **near)
            for name, parameter in task.named_parameters():  # this rank's rows: the other one compares its own
                close = summed if name in rounded else near
                rows = distribute_tensor(wanted[name], parameter.device_mesh, parameter.placements, src_data_rank=None)
                found = parameter.grad.to_local()
                torch.testing.assert_close(found, rows.to_local(), **close, msg=lambda m, n=name: f"{n} {m}")
        # torch 2.7 names its arguments.
        made = [call.kwargs.get("output_tensor", *call.args[:1]) for call in gather.mock_calls]
        check_traffic(task, options, sum(tensor.numel() for tensor in made))
        gathered = whole_weights(task)
        assert bool(gathered) == (dist.get_rank() == 0)
        for name, tensor in gathered.items():
            assert torch.equal(tensor, weights[name]), name


def check_traffic(task: LatentDiffusion, options: dict[str, object], gathered: int) -> None:
    """The planner knows to the last one how many weights a pass gathers."""
    fsdp = FSDP(strategy="FULL_SHARD" if options.get("reshard_after_forward") else "SHARD_GRAD_OP")
    parts = task.blocks() if options["by_block"] else []
    apart = "parameters" in options
    units = [sum(p.numel() for p in part.parameters()) - apart * norm_values(part) for part in parts]
    units.append(sum(p.numel() for p in task.parameters()) - sum(units))
    half, _ = shard_traffic(fsdp, Devices(2, 1), units, 0, 1)  # each of two ranks has half of the weights already
    assert gathered == 2 * half, (options, gathered, 2 * half)


def own_format(task: LatentDiffusion, by_block: bool) -> set[str]:
    """Names of the parameters whose format `parameters` sets: those of blocks or of the whole task, without norms."""
    norms = {id(p) for m in task.modules() if isinstance(m, NORMS) for p in m.parameters()}
    chosen = {id(p) for part in (task.blocks() if by_block else [task]) for p in part.parameters()} - norms
    return {name for name, p in task.named_parameters() if id(p) in chosen}


def norm_values(part: torch.nn.Module) -> int:
    return sum(p.numel() for m in part.modules() if isinstance(m, NORMS) for p in m.parameters())


def check_low_precision(recipe_file: str, folder: Path) -> None:
    """bf16 parameters, 32-bit norms, shards and gradients; no further from 32 bits than autocast without shards."""
    # More than one channel per group: otherwise 16 bits are too few for these gradients, sharded or not.
    recipe = load_config(recipe_file, ["model.denoiser.norm_groups=8"], Recipe)
    whole = make_task(recipe)
    batch = make_batch(whole)
    whole(batch)["total"].backward()
    exact = gradients(whole)
    whole.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = whole(batch)["total"]
    loss.backward()
    autocast_error = distance(gradients(whole), exact)

    task = make_task(recipe)
    seen: dict[str, torch.dtype] = {}
    units = shard(task, init_device_mesh("cpu", (2,)), parameters=torch.bfloat16)
    norms = [n for n, m in task.named_modules() if isinstance(m, torch.nn.GroupNorm | torch.nn.LayerNorm)]
    assert units == 1 + len(task.blocks()) < len(norms)
    low = own_format(task, by_block=True)
    for name, module in task.named_modules():
        if isinstance(getattr(module, "weight", None), torch.nn.Parameter):
            module.register_forward_pre_hook(lambda m, _, name=name: seen.__setitem__(name, m.weight.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        mean = task(part(batch))["total"]
    with mock.patch.object(dist, "reduce_scatter_tensor", wraps=dist.reduce_scatter_tensor) as reduce:
        mean.backward()
    assert task.given == torch.float32 and {call.kwargs["input"].dtype for call in reduce.mock_calls} == {torch.float32}
    assert seen.keys() >= set(norms)
    for name, dtype in seen.items():
        assert dtype == (torch.bfloat16 if f"{name}.weight" in low else torch.float32), (name, dtype)
    assert mean.dtype == torch.float32
    for name, parameter in task.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
    error = distance(gradients(task), exact)
    assert 0 < error < 1.5 * autocast_error < 0.1, (error, autocast_error)
    optimizer = torch.optim.AdamW(task.parameters())
    optimizer.step()
    assert all(s["exp_avg"].dtype == torch.float32 for s in optimizer.state.values())


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """L2 norm of the difference of all gradients, as a share of theirs."""
    difference = torch.cat([(found[name] - exact[name]).reshape(-1) for name in exact])
    return float(difference.norm() / torch.cat([g.reshape(-1) for g in exact.values()]).norm())


def check_units(recipe_file: str, folder: Path) -> None:
    """The U-Net of Stable Diffusion 2, at small width: few units, as each costs the host time in each pass."""
    narrow = ["model.denoiser.channels=[32,32,32,32]", "model.denoiser.heads=[1,1,1,1]", "model.denoiser.text_width=8"]
    task = build(load_config(ROOT / "yamls" / "sd2_base.yaml", narrow, Recipe, missing=[]).model)
    norms = sum(isinstance(m, NORMS) for m in task.modules())
    assert norms == 109, norms
    units = shard(task, init_device_mesh("cpu", (2,)), parameters=torch.bfloat16)
    # Four levels on the way down, the middle, four on the way up; the rest.
    assert units == 9 + 1


def check_contrastive(folder: Path) -> None:
    """A model of towers and one number, sharded over two ranks: its updates are those of one process that averages the
    losses of both halves, and in low precision the number keeps its 32 bits."""
    generator = torch.Generator().manual_seed(1)
    batch = {
        "image": torch.randint(256, (BATCH, 3, 16, 16), generator=generator, dtype=torch.uint8),
        "tokens": torch.randint(1, 50, (BATCH, 8), generator=generator),
    }

    def trained(sharded: bool) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]], list[float]]:
        torch.manual_seed(0)
        task, found, norms = ContrastiveText(**CONTRASTIVE_SIZES), [], []
        if sharded:
            shard(task, init_device_mesh("cpu", (2,)), by_block=False)
        optimizer = torch.optim.SGD(task.parameters(), lr=1.0)
        for _ in range(3):
            optimizer.zero_grad()
            halves = [part(batch)] if sharded else [{n: t[:2] for n, t in batch.items()}]
            halves += [] if sharded else [{n: t[2:] for n, t in batch.items()}]
            (sum(task(half)["total"] for half in halves) / len(halves)).backward()
            norms.append(float(clip_by_norm(task.parameters(), 0.5)))
            found.append(gradients(task))
            optimizer.step()
        weights = whole_weights(task) if sharded else task.state_dict()
        return weights, found, norms

    whole, wanted, norms = trained(False)
    weights, found, sharded_norms = trained(True)
    near = {"rtol": 1e-5, "atol": 1e-6}
    assert all(norm > 0.5 for norm in norms)  # clipped
    torch.testing.assert_close(sharded_norms, norms, **near)
    torch.testing.assert_close(found, wanted, **near)
    torch.testing.assert_close(weights, whole if weights else {}, **near)

    torch.manual_seed(0)
    task, seen = ContrastiveText(**CONTRASTIVE_SIZES), []
    shard(task, init_device_mesh("cpu", (2,)), by_block=False, parameters=torch.bfloat16)
    task.logit_scale.register_forward_hook(lambda module, args, out: seen.append((module.log.dtype, out.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        task(part(batch))["total"].backward()
    assert seen == [(torch.float32, torch.float32)]
    assert all(p.grad.dtype == torch.float32 for p in task.parameters())


def check_runs(recipe_file: str, out: Path) -> None:
    """Recipes of two ranks: FSDP trains to what DDP trains to, resumes exactly, and writes what one process opens."""
    runs = {
        "ddp": [],
        "sharded": ["training.fsdp={}"],
        "full": [
            "training.fsdp={wrap: model, checkpoints: full}",
            "algorithms.recompute={name: activation_checkpointing}",
        ],
    }
    final = {}
    for name, overrides in runs.items():
        overrides = [f"output={out}/{name}", *overrides]
        final[name] = fit(recipe_file, overrides, Live())
        if name != "ddp":
            again = [f"output={out}/{name}-again", f"checkpoints.load_path={checkpoint(out / name, name)}"]
            resumed = fit(recipe_file, [*overrides, *again, *WEIGHTS_ALONE])
            for key, tensor in final[name].items():
                assert torch.equal(resumed[key], tensor), (name, key)
            for key, tensor in final["ddp"].items():
                # Adam divides small gradients by their own size: 1e-5 there becomes a part of a step (lr 2e-3).
                torch.testing.assert_close(final[name][key], tensor, rtol=1e-3, atol=1e-4, msg=f"{name} {key}")


def checkpoint(run: Path, kind: str) -> Path:
    return run / "checkpoints" / ("ep0-ba2" if kind == "sharded" else "ep0-ba2-rank0.pt")


class Storages(TorchDispatchMode):
    """Knows the storages that operators took and gave, as long as somebody refers to them.

    Python's collector knows tensors, too, but a list of its objects takes hold of those that other threads are about to
    free, which may end the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: set[StorageWeakRef] = set()
        self.notes = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if self.notes:
            self._note((args, tuple((kwargs or {}).values()), result))
        return result

    def _note(self, value: object) -> None:
        """Notes a tensor, or those in lists and tuples."""
        if isinstance(value, list | tuple):
            for inner in value:
                self._note(inner)
        elif isinstance(value, torch.Tensor):
            local = value._local_tensor if isinstance(value, DTensor) else value
            if type(local) in (torch.Tensor, torch.nn.Parameter) and local.device.type == "cpu":
                self.known.add(StorageWeakRef(local.untyped_storage()))

    def live_bytes(self) -> int:
        """Bytes of the storages that somebody refers to."""
        self.known = {storage for storage in self.known if not storage.expired()}
        held = [torch.UntypedStorage._new_with_weak_ptr(storage.cdata) for storage in self.known]
        return sum(storage.nbytes() for storage in held if storage is not None)


class Live(Callback):
    """The most bytes that are alive between steps: weights, gradients, moments, the average, and anything else."""

    def __init__(self) -> None:
        self.most = 0
        self.storages = Storages()
        gc.collect()
        gc.freeze()  # what was there before is not searched for cycles, which takes half a second every time

    def batch_end(self, state: State, logger: Logger) -> None:
        gc.collect()
        self.most = max(self.most, self.storages.live_bytes())
        if state.timestamp.batch == state.max_duration:  # validation, images and files of the end are in no step
            self.storages.notes = False


def fit(recipe_file: str, overrides: list[str], live: Live | None = None) -> dict[str, torch.Tensor]:
    from recipes.engines.composer.trainer import build_trainer

    recipe = load_config(recipe_file, overrides, Recipe)
    trainer = build_trainer(recipe)
    if live is None:
        trainer.fit()
    else:  # its mode sees each operator, which takes most of the time
        trainer.state.callbacks.append(live)
        with live.storages:
            trainer.fit()
        Path(recipe.output, f"live.{dist.get_rank()}.json").write_text(json.dumps(live.most))
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in trainer.state.model.named_parameters()
    }
    trainer.close()
    dist.barrier()
    return {name.removeprefix("module."): tensor for name, tensor in weights.items()}


def checks(folder: Path) -> dict:
    """Checks by name, with the recipes of a folder: of the small U-Net, and of the small transformer for whole runs."""
    functions = {GRADIENTS: check_gradients, LOW_PRECISION: check_low_precision, UNITS: check_units}
    unet = {name: partial(function, str(folder / "unet.yaml")) for name, function in functions.items()}
    return unet | {CONTRASTIVE: check_contrastive, RUNS: partial(check_runs, str(folder / "runs.yaml"))}
