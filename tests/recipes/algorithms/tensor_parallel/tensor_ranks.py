"""Run by test_tensor_parallel.py on four ranks.

argv: a recipe, a folder to work in, and a file for the reports.

The divided model against the whole one in 64 bits: losses, gradients, messages, updates, sampling. Then runs of the
recipe under both engines, each divided in another way, against one in which every rank has the whole model.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from recipes.algorithms.gradients.clipping import clip_by_norm
from recipes.algorithms.modules.activation_checkpointing import recompute
from recipes.algorithms.resilience.guard import block_norms
from recipes.algorithms.sharding.shard import shard, whole_weights
from recipes.algorithms.tensor_parallel import collectives
from recipes.algorithms.tensor_parallel.divide import divide
from recipes.config.recipe import Recipe, load_config
from recipes.models.autoregressive.sampler import Choice, uniforms
from recipes.models.autoregressive.task import Autoregressive, load_transformer
from recipes.planning.tensor_parallel import messages, sent_bytes
from tests.recipes.engines.recording import Recorder, record

RANKS, BATCH = 4, 4
CPU = torch.device("cpu")
# 19 tokens: neither 2 nor 4 devices have equally many.
SIZES = {"layers": 3, "width": 16, "heads": 4, "text_positions": 5, "text_vocabulary": 11, "side": 4, "codes": 8}


def make_task() -> Autoregressive:
    torch.manual_seed(0)
    task = Autoregressive(**SIZES, kernel=3).double()
    for parameter in task.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return task


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(11, (BATCH, 5), generator=generator)
    for row, length in enumerate([4, 1, 5, 3]):
        text[row, length:] = -1
    batch = {"text": text, "image": torch.randint(8, (BATCH, 16), generator=generator)}
    tokens = (text[:, 1:] >= 0).sum(1).double().mean()
    return batch | {"text_tokens": tokens.expand(BATCH)}


def divided(replicas: int, shards: int, devices: int, again: bool = False) -> tuple[Autoregressive, DeviceMesh]:
    task = make_task()
    if again:
        recompute(task.blocks())
    names = ("replicate", "shard", "tensor")
    mesh = init_device_mesh("cpu", (replicas, shards, devices), mesh_dim_names=names)
    divide(task, task.tensor_plan(), mesh["tensor"], CPU)
    if shards > 1:
        shard(task, mesh["shard"])
    return task, mesh


def own_samples(batch: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """The samples of this rank's group; replicas compute the same ones here."""
    each = BATCH // mesh["shard"].size()
    return {name: tensor[each * mesh.get_local_rank("shard") :][:each] for name, tensor in batch.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Messages:
    """The all-reduces of one group, and the values that they gather."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.sizes, self.gathered = group, [], []

    def __enter__(self) -> "Messages":
        reduce, gather = dist.all_reduce, dist.all_gather_into_tensor

        def counting_reduce(tensor, *args, group=None, **kwargs):
            if group is self.group:
                self.sizes.append(tensor.numel())
            return reduce(tensor, *args, group=group, **kwargs)

        def counting_gather(out, own, *args, group=None, **kwargs):
            if group is self.group:
                self.gathered.append(own.numel())
            return gather(out, own, *args, group=group, **kwargs)

        self.patches = [
            mock.patch.object(collectives.dist, "all_reduce", counting_reduce),
            mock.patch.object(collectives.dist, "all_gather_into_tensor", counting_gather),
        ]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


def check_gradients(recipe: str, folder: Path) -> None:
    """Losses, gradients, messages and sampling of tensor 2, tensor 4, and tensor 2 times shards 2."""
    batch, task = make_batch(), make_task()
    uniform, choice = uniforms(list(range(2 * BATCH)), 16).unflatten(0, (BATCH, 2)), Choice(guidance=2.0)
    loss = task(batch)["total"]
    loss.backward()
    wanted = {name: parameter.grad for name, parameter in task.named_parameters()}
    evaluated, sampled = task.evaluate(batch)["loss"], task.sample(batch["text"], uniform, choice)
    norm = clip_by_norm(_copies(task), 0.1)
    for layout in ((2, 1, 2), (1, 1, 4), (1, 2, 2)):
        for again in (False, True):
            part, mesh = divided(*layout, again)
            weights = whole_weights(part) if layout[1] > 1 else {n: whole(t) for n, t in part.state_dict().items()}
            if dist.get_rank() == 0:
                assert all(torch.equal(weights[name], tensor) for name, tensor in make_task().state_dict().items())
            assert again or torch.equal(part.sample(batch["text"], uniform, choice), sampled)
            own = own_samples(batch, mesh)
            torch.testing.assert_close(part.evaluate(own)["loss"], own_samples({"x": evaluated}, mesh)["x"])
            with Messages(mesh.get_group("tensor")) as sent:
                found = part(own)["total"]
                in_forward = len(sent.sizes)
                found.backward()
            check_messages(sent, in_forward, len(own["text"]), layout[2])
            mean = found.detach().clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(mean / RANKS, loss.detach(), rtol=1e-8, atol=0)
            for name, parameter in part.named_parameters():
                torch.testing.assert_close(whole(parameter.grad), wanted[name], rtol=1e-8, atol=1e-12, msg=name)
            norms = [row["gradients"] for row in block_norms(part)]
            torch.testing.assert_close(norms, [row["gradients"] for row in block_norms(task)], rtol=1e-5, atol=0)
            torch.testing.assert_close(clip_by_norm(part.parameters(), 0.1), norm, rtol=1e-8, atol=0)
            held = sum(p.to_local().numel() for p in part.parameters())
            assert held < 1.3 * sum(p.numel() for p in part.parameters()) / (layout[1] * layout[2])


def _copies(task: Autoregressive) -> list[torch.nn.Parameter]:
    """Parameters with gradients of their own, for clipping."""
    found = []
    for parameter in task.parameters():
        found.append(torch.nn.Parameter(parameter.detach().clone()))
        found[-1].grad = parameter.grad.clone()
    return found


def check_messages(sent: Messages, in_forward: int, samples: int, devices: int) -> None:
    """Two all-reduces forward and two backward per layer, and those of the loss, as the formulas of the dry run say."""
    plan = make_task().tensor_plan()
    count, values = messages(plan, samples)
    assert count == 4 * SIZES["layers"] and in_forward == count // 2
    rows = samples * plan.predicted
    assert sent.sizes == [values] * (count // 2) + [rows * 16] + [values] * (count // 2)
    assert sent.gathered == [2 * rows]
    ring = sum(8 * 2 * (devices - 1) / devices * size for size in sent.sizes) + 4 * (devices - 1) * 2 * rows
    assert sent_bytes(plan, samples, devices, value=8, loss_value=8) == ring


def check_updates(recipe: str, folder: Path) -> None:
    """50 updates with clipping end in the same weights. Biases of keys are left out: their gradients are rounding
    noise, which Adam magnifies."""
    batch, task = make_batch(), make_task()
    part, mesh = divided(1, 2, 2)
    own = own_samples(batch, mesh)
    ends = []
    for model, samples in ((part, own), (task, batch)):
        if model is task and dist.get_rank():  # one rank is enough to compare
            return
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith("k.bias"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
        for _ in range(50):
            optimizer.zero_grad()
            model(samples)["total"].backward()
            clip_by_norm([p for p in model.parameters() if p.requires_grad], 0.5)
            optimizer.step()
        ends.append({name: whole(parameter.detach()) for name, parameter in model.named_parameters()})
    assert (ends[1]["network.norm.weight"] - make_task().network.norm.weight).abs().max() > 1e-3
    for name, tensor in ends[1].items():
        torch.testing.assert_close(ends[0][name], tensor, rtol=0, atol=1e-6, msg=name)


def check_compiled(recipe: str, folder: Path) -> None:
    """A compiled block is one graph, messages included, and its gradients are the same."""
    batch, task = make_batch(), make_task()
    task(batch)["total"].backward()
    part, _ = divided(2, 1, 2)
    for block in part.blocks()[:2]:  # an attention block and an MLP
        block.compile(backend="eager", fullgraph=True)  # an error if it were several graphs
    part(batch)["total"].backward()
    for (name, parameter), plain in zip(part.named_parameters(), task.parameters(), strict=True):
        torch.testing.assert_close(whole(parameter.grad), plain.grad, rtol=1e-8, atol=1e-12, msg=name)


def check_runs(recipe: str, folder: Path) -> None:
    """Runs under both engines, and resumed on other numbers of devices, against one without division.

    From a sharded checkpoint of tensor 2 x shards 2 to tensor 4, and from a full one of whole models to tensor 2.
    """

    def run(name: str, engine: str, devices: int, *changes: str) -> Recorder:
        own = [f"output={folder / name}", f"training.engine={engine}", f"training.tensor_parallel={devices}"]
        return record(engine, load_config(recipe, [*own, *changes], Recipe), Recorder(with_digests=False))

    def middle(name: str) -> str:
        found = (path for path in (folder / name / "checkpoints").iterdir() if "-ba2" in path.name)
        return f"checkpoints.load_path={next(found)}"

    sharded = "training.fsdp={checkpoints: sharded}"
    grid = "callbacks.token_grid={name: token_grid, prompts: [a dot, a star], batch: 2}"
    plain = run("plain", "lightning", 1)
    runs = {
        "composer": run("composer", "composer", 2, sharded, grid),
        "lightning": run("lightning", "lightning", 4),
        "composer again": run("composer_again", "composer", 4, sharded, middle("composer"), NO_EXPORT),
        "two machines": run("two_machines", "lightning", 2, *MACHINES, middle("plain"), NO_EXPORT),
    }
    for name, other in runs.items():
        compare(plain, other, name)
    short = ["training.duration=2ba", "checkpoints.save=false", NO_EXPORT]
    scaling = "algorithms={scheduled_ema: null, scaling: {name: resblock_grad_scaling}}"
    scaled = run("scaled", "lightning", 4, scaling, *short)
    torch.testing.assert_close(scaled.losses, plain.losses[:2], rtol=1e-3, atol=0)  # in fp16
    # Four groups would validate on two samples twice, so that figures are those of runs with as many groups.
    for one, other in (("composer", "two machines"), ("lightning", "composer again")):
        figures = [runs[name].evals[-1][2] for name in (one, other)]
        torch.testing.assert_close(*(list(values.values()) for values in figures), rtol=1e-4, atol=0)
    if dist.get_rank() == 0:
        for name in ("composer", "lightning"):
            for network in ("transformer", "transformer_ema"):
                one, other = (
                    load_transformer(folder / which / "export" / network).state_dict() for which in ("plain", name)
                )
                wrong = [key for key in one if not key.endswith("k.bias") and not close(one[key], other[key])]
                assert not wrong, (name, network, wrong)


def compare(plain: Recorder, run: Recorder, label: str) -> None:
    """The batches that both have, and everything at the end."""
    batches = len(run.losses)
    assert batches in (2, 4)
    torch.testing.assert_close(run.losses, plain.losses[-batches:], rtol=1e-4, atol=0)
    assert [a[:2] for a in run.evals] == [b[:2] for b in plain.evals][-len(run.evals) :]
    assert dist.get_rank() or set(run.average) == set(plain.average)  # gathered to the first rank
    for one, other in ((run.weights, plain.weights), (run.average, plain.average)):
        wrong = [name for name in one if not name.endswith("k.bias") and not close(one[name], other[name])]
        assert not wrong, (label, wrong)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Within a hundredth of what six updates move a weight."""
    return (one - other).abs().max().item() < 2e-4


NO_EXPORT = "callbacks.export=null"
# One machine per group, between which PowerSGD of full rank averages and clips.
MACHINES = [
    "training.grad_clip=null",
    "training.fsdp={replicas: 2, checkpoints: full}",
    "algorithms.powersgd={name: powersgd, rank: 128, clip: 0.5, wire: 32-bit, buffer: 32-bit}",
]
CHECKS = {
    "gradients": check_gradients,
    "updates": check_updates,
    "compiled": check_compiled,
    "runs": check_runs,
}


def main(recipe: str, folder: Path, report: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    results = {}
    for name, check in CHECKS.items():
        try:
            check(recipe, folder)
            results[name] = "passed"
        except BaseException:
            results[name] = traceback.format_exc()
        report.with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(results))
        if results[name] != "passed":  # the other ranks may wait for this one
            os._exit(1)
        dist.barrier()
    os._exit(0)  # without waiting for Composer's threads


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
