"""Run by test_tensor_parallel.py on four ranks.

argv: recipes by model as JSON, a folder to work in, and a file for the reports.

The divided model against the whole one in 64 bits: losses, gradients, messages, updates, sampling. Then the first
weights of divided recipes (../sharding/first_rank_ranks.py), and the checks of runs.py.
"""

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from recipes.algorithms.gradients.clipping import clip_by_norm
from recipes.algorithms.modules.activation_checkpointing import recompute
from recipes.algorithms.powersgd.lever import PowerSGD
from recipes.algorithms.resilience.guard import block_norms
from recipes.algorithms.sharding.shard import shard, whole_weights
from recipes.algorithms.tensor_parallel.divide import divide
from recipes.algorithms.tensor_parallel.generators import share_generators
from recipes.algorithms.tensor_parallel.modules import ReadsLocal, TakesGathered
from recipes.models.autoregressive.sampler import Choice, uniforms
from recipes.models.autoregressive.task import Autoregressive
from recipes.models.language.task import Language
from recipes.models.latent_diffusion.dit import DiT
from recipes.models.latent_diffusion.rectified_flow import RectifiedFlow
from recipes.models.latent_diffusion.task import LatentDiffusion
from recipes.models.task import Task
from recipes.planning.tensor_parallel import messages, sent_bytes
from tests.recipes.algorithms.sharding.first_rank_ranks import CHECKS_OF_FOUR
from tests.recipes.algorithms.tensor_parallel.runs import CHECKS as RUNS

RANKS, BATCH = 4, 4
CPU = torch.device("cpu")
# 19 tokens: neither 2 nor 4 devices have equally many. The last kind of layer but one permutes positions.
SIZES = {"layers": 3, "width": 16, "heads": 4, "text_positions": 8, "text_vocabulary": 11, "side": 4, "codes": 8}
TEXT = {"layers": 2, "width": 16, "heads": 4, "positions": 12, "vocabulary": 32}
PATCHES = {"layers": 2, "width": 16, "heads": 4, "text_width": 12, "latent_channels": 3, "text_layers": 1}


def make_task(dropout: float | None = None, layers: int = SIZES["layers"]) -> Task:
    """DALL-E's transformer, or a language model with dropout."""
    torch.manual_seed(0)
    if dropout is None:
        task = Autoregressive(**SIZES | {"layers": layers}, kernel=3, attention="local").double()
    else:
        task = Language(**TEXT, dropout=dropout).double()
    for module in task.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 0.1  # not PyTorch's
    for parameter in task.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return task


def make_dit() -> LatentDiffusion:
    """A diffusion transformer with a block over the text, and cross-attention to it."""
    torch.manual_seed(0)
    task = LatentDiffusion(denoiser=DiT(**PATCHES), objective=RectifiedFlow()).double()
    for parameter in task.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return task


def make_latents() -> dict[str, torch.Tensor]:
    """Samples with the numbers from which their noise is drawn: 6 patches, and 5 positions of text."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(BATCH, 3, 4, 6, generator=generator, dtype=torch.float64)
    text = torch.randn(BATCH, 5, 12, generator=generator, dtype=torch.float64)
    return {"latents": latents, "text": text, "draws": torch.arange(BATCH), "seed": torch.arange(BATCH)}


def make_batch() -> dict[str, torch.Tensor]:
    """The samples of both models."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(11, (BATCH, 8), generator=generator)
    for row, length in enumerate([4, 1, 8, 3]):
        text[row, length:] = -1
    batch = {"text": text, "image": torch.randint(8, (BATCH, 16), generator=generator)}
    batch["tokens"] = torch.randint(32, (BATCH, 13), generator=generator)
    tokens = (text[:, 1:] >= 0).sum(1).double().mean()
    return batch | {"text_tokens": tokens.expand(BATCH)}


@dataclass(frozen=True)
class Layout:
    """How a model is divided over four ranks, and whether its blocks are computed again in the backward pass."""

    replicas: int
    shards: int
    devices: int
    sequence: bool = False
    again: bool = False


def divided(
    layout: Layout, dropout: float | None = None, make: Callable[..., Task] = make_task
) -> tuple[Task, DeviceMesh]:
    task = make() if dropout is None else make(dropout)
    if layout.again:
        recompute(task.recomputed_blocks())
    names = ("replicate", "shard", "tensor")
    sizes = (layout.replicas, layout.shards, layout.devices)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    divide(task, task.tensor_plan(), mesh["tensor"], CPU, layout.sequence)
    if layout.shards > 1:
        shard(task, mesh["shard"])
    return task, mesh


def own_samples(batch: dict[str, torch.Tensor], mesh: DeviceMesh, over: str = "shard") -> dict[str, torch.Tensor]:
    """The samples of this rank's group. Replicas compute the same ones, unless the batch is divided over them."""
    each = BATCH // mesh[over].size()
    return {name: tensor[each * mesh.get_local_rank(over) :][:each] for name, tensor in batch.items()}


def averaging(part: Task, mesh: DeviceMesh, clip: float | None = None) -> Callable[[], None]:
    """What averages a divided model's gradients between replicas by PowerSGD of full rank."""
    powersgd = PowerSGD(part, rank=128, clip=clip, wire="32-bit", buffer="32-bit")
    placements = powersgd.divide(mesh)
    shard(part, mesh["shard"], dimensions=placements)
    run = mock.Mock(precision="fp32")
    powersgd.begin(run)
    return lambda: powersgd.average_gradients(run)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Messages:
    """The messages of one group: (kind, values of the whole tensor) -> how many; and the bytes that a device sends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.counts, self.bytes = group, Counter(), 0.0

    def __enter__(self) -> "Messages":
        # The tensor whose size is that of the whole is the first argument, or the second one.
        kinds = {"all_reduce": ("all_reduce", 0), "all_gather_into_tensor": ("all_gather", 0)}
        kinds["reduce_scatter_tensor"] = ("reduce_scatter", 1)
        self.patches = [mock.patch.object(dist, name, self._counting(name, *kind)) for name, kind in kinds.items()]
        for patch in self.patches:
            patch.start()
        return self

    def _counting(self, name: str, kind: str, place: int):
        original = getattr(dist, name)

        def counting(*tensors, group=None, **kwargs):
            if group is self.group:
                whole, devices = tensors[place], group.size()
                self.counts[kind, whole.numel()] += 1
                self.bytes += (1 + (kind == "all_reduce")) * (devices - 1) / devices * whole.nbytes
            return original(*tensors, group=group, **kwargs)

        return counting

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


LAYOUTS = [Layout(*sizes, again=again) for sizes in ((2, 1, 2), (1, 2, 2)) for again in (False, True)]
LAYOUTS += [Layout(1, 1, 4), Layout(2, 1, 2, True), Layout(1, 1, 4, True, True), Layout(1, 2, 2, True)]
MACHINES_64 = Layout(2, 1, 2)


def check_gradients(recipes: dict[str, str], folder: Path) -> None:
    """Losses, gradients, messages and sampling of tensor 2, tensor 4, and tensor 2 times shards 2. Losses and gradients
    of tensor 2 on two machines, between which PowerSGD averages."""
    batch, task = make_batch(), make_task()
    uniform, choice = uniforms(list(range(2 * BATCH)), 16).unflatten(0, (BATCH, 2)), Choice(guidance=2.0)
    loss = task(batch)["total"]
    loss.backward()
    evaluated, sampled = task.evaluate(batch)["loss"], task.sample(batch["text"], uniform, choice)
    norm = clip_by_norm(_copies(task), 0.1)
    for layout in LAYOUTS:
        part, mesh = divided(layout)
        weights = whole_weights(part) if layout.shards > 1 else {n: whole(t) for n, t in part.state_dict().items()}
        if dist.get_rank() == 0:
            assert all(torch.equal(weights[name], tensor) for name, tensor in make_task().state_dict().items())
        assert layout.again or torch.equal(part.sample(batch["text"], uniform, choice), sampled)
        own = own_samples(batch, mesh)
        for module in part.modules() if layout.sequence and not layout.again else ():
            if isinstance(module, TakesGathered):
                module.product = torch.zeros(())  # as a pass leaves it that failed halfway
        torch.testing.assert_close(part.evaluate(own)["loss"], own_samples({"x": evaluated}, mesh)["x"])
        check_pass(part, own, loss, task, mesh, layout)
        norms = [row["gradients"] for row in block_norms(part)]
        torch.testing.assert_close(norms, [row["gradients"] for row in block_norms(task)], rtol=1e-5, atol=0)
        torch.testing.assert_close(clip_by_norm(part.parameters(), 0.1), norm, rtol=1e-8, atol=0)
        held = sum(p.to_local().numel() for p in part.parameters())
        assert held < 1.3 * sum(p.numel() for p in part.parameters()) / (layout.shards * layout.devices)
    part, mesh = divided(MACHINES_64)
    average = averaging(part, mesh)
    check_pass(part, own_samples(batch, mesh, "replicate"), loss, task, mesh, MACHINES_64, average)


def check_pass(
    part: Task,
    own: dict[str, torch.Tensor],
    loss: torch.Tensor,
    task: Task,
    mesh: DeviceMesh,
    layout: Layout,
    average: Callable[[], None] | None = None,
) -> None:
    """A forward and backward pass of the divided model, against the whole one's loss and gradients, and its messages
    against the formulas of the dry run."""
    with Messages(mesh.get_group("tensor")) as sent:
        found = part(own)["total"]
        in_forward = sent.counts.copy()
        found.backward()
    assert not any(module.computes for module in part.modules() if isinstance(module, ReadsLocal))
    assert all(module.product is None for module in part.modules() if isinstance(module, TakesGathered))
    if average is not None:
        average()
    plan, samples = task.tensor_plan().for_batch(own), len(own["text"])
    again = {module for block in task.recomputed_blocks() for module in block.modules()} if layout.again else ()
    wanted = messages(plan, samples, layout.devices, layout.sequence, again)
    counts = Counter()
    for message in wanted:
        counts[message.kind, message.values] += message.count
    assert sent.counts == counts, (layout, sent.counts, counts)
    if not layout.sequence:
        stream = samples * plan.positions * plan.width
        branches = sum(not branch.of_text for branch in plan.branches)
        assert counts["all_reduce", stream] >= 4 * branches // 2
        assert in_forward["all_reduce", stream] == branches + plan.embeds
    mean = found.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / RANKS, loss.detach(), rtol=1e-8, atol=0)
    gradients = {name: parameter.grad for name, parameter in task.named_parameters()}
    for name, parameter in part.named_parameters():
        where = f"{name}, {layout}"
        torch.testing.assert_close(whole(parameter.grad), gradients[name], rtol=1e-8, atol=1e-12, msg=where)


def check_dit(recipes: dict[str, str], folder: Path) -> None:
    """A diffusion transformer: losses, gradients and messages, with adaLN norms, text and cross-attention."""
    batch, task = make_latents(), make_dit()
    loss = task(batch)["total"]
    loss.backward()
    evaluated = task.evaluate(batch)["loss"]
    for layout in (Layout(2, 1, 2), Layout(1, 1, 4, again=True), Layout(1, 2, 2)):
        part, mesh = divided(layout, make=make_dit)
        weights = whole_weights(part) if layout.shards > 1 else {n: whole(t) for n, t in part.state_dict().items()}
        if dist.get_rank() == 0:
            assert all(torch.equal(weights[name], tensor) for name, tensor in make_dit().state_dict().items())
        own = own_samples(batch, mesh)
        torch.testing.assert_close(part.evaluate(own)["loss"], own_samples({"x": evaluated}, mesh)["x"])
        check_pass(part, own, loss, task, mesh, layout)


def check_dropout(recipes: dict[str, str], folder: Path) -> None:
    """A language model with dropout: outside of divided regions the same numbers on all devices, inside other ones.

    The whole model draws as the devices of a group would: for each device's heads, and with sequence parallelism also
    for each device's positions, from a generator that is seeded by a common number and by the device's place.
    """
    batch = make_batch()
    for layout in (Layout(2, 1, 2), Layout(1, 1, 4, again=True), Layout(1, 1, 4, True), Layout(2, 1, 2, True, True)):
        task = make_task(0.3)
        _draw_as_devices(task, layout)
        torch.manual_seed(5)
        loss = task(batch)["total"]
        loss.backward()
        after = torch.get_rng_state()
        part, mesh = divided(layout, 0.3)
        torch.manual_seed(5 if mesh.get_local_rank("tensor") == 0 else 6)
        share_generators(mesh.get_group("tensor"), CPU)
        check_pass(part, batch, loss, task, mesh, layout)
        task = make_task(0.3)
        _draw_as_devices(task, replace(layout, sequence=False))
        with torch.no_grad():  # the stream is whole: all devices drop the same values of it
            dropped = [torch.manual_seed(5) and model(batch)["total"] for model in (task, part)]
        torch.testing.assert_close(*dropped, rtol=1e-8, atol=0)
        torch.set_rng_state(after)
        evaluated = part.eval().evaluate(batch)["loss"]
        assert torch.equal(torch.get_rng_state(), after)  # which draws nothing
        whole_loss = make_task(0.3).eval().evaluate(batch)["loss"]
        torch.testing.assert_close(evaluated, whole_loss, rtol=1e-8, atol=0)


def _draw_as_devices(task: Task, layout: Layout) -> None:
    """Make a whole model draw the numbers that a group of devices would, each for its own part."""
    plan = task.tensor_plan()
    parts = {plan.draws[0]: 1}  # dimension of heads
    parts |= dict.fromkeys(plan.dropouts, 1) if layout.sequence else {}  # of positions
    for module, dimension in parts.items():
        plain = module.forward

        def forward(*inputs: torch.Tensor, plain=plain, dimension=dimension) -> torch.Tensor:
            seed, found = int(torch.randint(1 << 62, ())), []
            for device, part in enumerate(zip(*(x.chunk(layout.devices, dimension) for x in inputs), strict=True)):
                with torch.random.fork_rng([]):
                    torch.manual_seed(seed + device)
                    found.append(plain(*part))
            return torch.cat(found, dimension)

        module.forward = forward


def check_kept(recipes: dict[str, str], folder: Path) -> None:
    """With sequence parallelism, the layers of each of N devices keep an N-th for the backward pass, and no more."""
    batch = make_batch()
    for dropout in (None, 0.3):
        kept = [kept_bytes(make_task(dropout), batch)]
        kept += [kept_bytes(divided(Layout(2, 1, 2, sequence), dropout)[0], batch) for sequence in (False, True)]
        assert kept[2] == kept[0] / 2 < kept[1], kept


def kept_bytes(task: Task, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the tensors that the layers of a model keep for the backward pass, except for its weights and masks."""
    weights = {p.to_local().data_ptr() if isinstance(p, DTensor) else p.data_ptr() for p in task.parameters()}
    found: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights and tensor.dtype != torch.bool:
            alive.append(tensor)  # so that no other one gets its memory
            found[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    alive: list[torch.Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    first, last = task.blocks()[0], task.blocks()[-1]
    first.register_forward_pre_hook(lambda *_: hooks.__enter__())
    last.register_forward_hook(lambda *_: hooks.__exit__())
    task(batch)
    return sum(found.values())


def _copies(task: Autoregressive) -> list[torch.nn.Parameter]:
    """Parameters with gradients of their own, for clipping."""
    found = []
    for parameter in task.parameters():
        found.append(torch.nn.Parameter(parameter.detach().clone()))
        found[-1].grad = parameter.grad.clone()
    return found


def check_low(recipes: dict[str, str], folder: Path) -> None:
    """Under autocast, devices send as many bytes as the dry run says: 16-bit numbers between branches."""
    batch = make_batch()
    for sequence, again in ((False, False), (True, False), (True, True)):
        layout = Layout(2, 1, 2, sequence, again)
        part, mesh = divided(layout, make=lambda: make_task().float())
        with Messages(mesh.get_group("tensor")) as sent:
            with torch.autocast("cpu", torch.bfloat16):
                loss = part(batch)["total"]
            loss.backward()
        plan = part.tensor_plan().for_batch(batch)
        modules = {module for block in part.recomputed_blocks() for module in block.modules()} if again else ()
        options = {"sequence": sequence, "again": modules}
        assert sent.bytes == sent_bytes(plan, BATCH, 2, value=2, loss_value=2, **options), layout


def check_tied(recipes: dict[str, str], folder: Path) -> None:
    """A parameter of two modules is one after the model has been divided."""

    def norms(task: Task) -> list[torch.nn.LayerNorm]:
        return [module for module in task.modules() if isinstance(module, torch.nn.LayerNorm)][:2]

    def make() -> Task:
        first, second = norms(task := make_task())
        second.weight = first.weight
        return task

    first, second = norms(divided(MACHINES_64, make=make)[0])
    assert first.weight is second.weight and first.bias is not second.bias


def check_updates(recipes: dict[str, str], folder: Path) -> None:
    """Five updates with clipping end in the same weights. Biases of keys are not trained: their gradients are rounding
    noise, which Adam magnifies. PowerSGD between two machines clips by the norm that it finds without decompressing."""

    def make() -> Task:
        task = make_task(layers=2)
        for name, parameter in task.named_parameters():
            parameter.requires_grad_(not name.endswith("k.bias"))
        return task

    batch, task = make_batch(), make()
    part, mesh = divided(Layout(1, 2, 2), make=make)
    replica, machines = divided(MACHINES_64, make=make)
    runs = [
        (part, own_samples(batch, mesh), lambda: clip_by_norm([p for p in part.parameters() if p.requires_grad], 0.5)),
        (replica, own_samples(batch, machines, "replicate"), averaging(replica, machines, 0.5)),
        (task, batch, lambda: clip_by_norm([p for p in task.parameters() if p.requires_grad], 0.5)),
    ]
    ends = []
    for model, samples, clip in runs:
        if model is task and dist.get_rank():  # one rank is enough to compare
            return
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
        for _ in range(5):
            optimizer.zero_grad()
            model(samples)["total"].backward()
            clip()
            optimizer.step()
        ends.append({name: whole(parameter.detach()) for name, parameter in model.named_parameters()})
    *divided_ends, end = ends
    assert (end["network.norm.weight"] - make().network.norm.weight).abs().max() > 1e-3
    for name, tensor in end.items():
        for other in divided_ends:
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-6, msg=name)


def check_compiled(recipes: dict[str, str], folder: Path) -> None:
    """A compiled block is one graph, messages included, and its gradients are the same. With sequence parallelism, too,
    where blocks gather their inputs again in the backward pass, or are computed again as a whole."""
    batch, task = make_batch(), make_task()
    task(batch)["total"].backward()
    # Attention and MLP, then one of them each, since compiling takes seconds.
    compiled = {Layout(2, 1, 2): [0, 1], Layout(2, 1, 2, True): [0], Layout(2, 1, 2, True, True): [1]}
    for layout, numbers in compiled.items():
        part, mesh = divided(layout)
        if mesh.get_local_rank("replicate"):  # which would compile the same once more
            continue
        for number in numbers:
            part.blocks()[number].compile(backend="eager", fullgraph=True)  # an error if it were several graphs
        part(batch)["total"].backward()
        for (name, parameter), plain in zip(part.named_parameters(), task.parameters(), strict=True):
            where = f"{name}, {layout}"
            torch.testing.assert_close(whole(parameter.grad), plain.grad, rtol=1e-8, atol=1e-12, msg=where)


CHECKS = {
    "gradients": check_gradients,
    "dit": check_dit,
    "dropout": check_dropout,
    "kept": check_kept,
    "low": check_low,
    "tied": check_tied,
    "updates": check_updates,
    "compiled": check_compiled,
    **CHECKS_OF_FOUR,
    **RUNS,
}


def main(recipes: dict[str, str], folder: Path, report: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.set_num_threads(1)
    results = {}
    for name, check in CHECKS.items():
        try:
            check(recipes, folder)
            results[name] = "passed"
        except BaseException:
            results[name] = traceback.format_exc()
        report.with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(results))
        if results[name] != "passed":  # the other ranks may wait for this one
            os._exit(1)
        dist.barrier()
    os._exit(0)  # without waiting for Composer's threads


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
