"""Checks that `lever_ranks` runs on two ranks, and `tensor_ranks` on four: models of which the first rank alone builds
the whole, against models that every rank builds."""

import random
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from recipes.algorithms.sharding.first_rank import FirstRankSends, loose_tensors, named_tensors
from recipes.algorithms.sharding.shards import own
from recipes.config.build import build
from recipes.config.recipe import Recipe, load_config
from recipes.engines import parts
from recipes.engines.first_weights import new_task
from recipes.models.task import Task
from recipes.training.lever import Lever
from recipes.training.levers import Levers
from tests.recipes.algorithms.sharding.fsdp_ranks import Storages
from tests.recipes.engines.recording import Recorder, assert_bit_equal, record
from tests.recipes.engines.shipped import RUN, SMALLER
from tests.recipes.training.fake_run import FakeRun

ROOT = Path(__file__).resolve().parents[4]
PARTS, BYTES, KINDS = "first weights of all recipes", "bytes of a start", "kinds of tensors that are sent"
RUNS, TENSOR = "runs from sent weights", "first weights over two dimensions"
FSDP = "training.fsdp={strategy: %s, wrap: %s, parameters: auto, replicas: %s, sync: microbatch, checkpoints: full}"
BY_BLOCK, WHOLE = FSDP % ("FULL_SHARD", "blocks", 1), FSDP % ("SHARD_GRAD_OP", "model", 1)
NO_SHARDS = "training.fsdp=null"
ALONE = "algorithms.powersgd=null"  # all ranks are one replica, whose gradients it does not average
# With one machine per rank, each has the whole model as its only shard.
MACHINES = FSDP % ("SHARD_GRAD_OP", "blocks", 2)
SLACK = 1 << 16  # states of generators, scales of gradients


def recipe_of(name: str, *changes: str) -> Recipe:
    """A small version of a shipped recipe, of which nothing but the model and its levers is built."""
    recipe = load_config(ROOT / "yamls" / f"{name}.yaml", [*RUN, *SMALLER[name][1], *changes], Recipe, missing=[])
    return replace(recipe, checkpoints=replace(recipe.checkpoints, load_weights=None))


def start(recipe: Recipe, sent: bool) -> Task:
    """The task as a run divides it, from new weights or those of `checkpoints.load_weights`."""
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    task = new_task(recipe, sent=sent)
    assert {t.is_meta for _, t in named_tensors(task)} == {sent and dist.get_rank() > 0}
    precision = "amp_bf16" if recipe.training.precision in ("auto", "fastest") else recipe.training.precision
    place = parts.Place(False, precision, dist.get_world_size())
    optimizer = build(recipe.optimizer, parameters=[p for p in task.parameters() if p.requires_grad], task=task)
    run = FakeRun(task, recipe.training.duration, precision=precision, optimizer=optimizer)
    levers = parts.build_levers(recipe, place, parts.context_of(recipe, task, None), 4)
    Levers(levers, last=[FirstRankSends(task)] if sent else []).prepare(run)
    return task


def generators() -> tuple:
    """The states of this rank's generators, as values that can be compared."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tolist(), *rest), torch.get_rng_state().tolist()


def check_same(recipe: Recipe, what: object) -> None:
    """This rank's part of every tensor, and the generators, are the same in every bit."""
    found = []
    for sent in (False, True):
        task = start(recipe, sent)
        named = [*task.named_parameters(), *task.named_buffers()]
        named += [((number, name), vars(module)[name]) for number, (module, name) in enumerate(loose_tensors(task))]
        tensors = {name: (type(tensor), tensor.requires_grad, own(tensor)) for name, tensor in named}
        found.append((tensors, generators()))
        del task
    (whole, before), (sent, after) = found
    assert list(whole) == list(sent), what
    for name, (kind, trained, tensor) in whole.items():
        assert (kind, trained) == sent[name][:2], (what, name)
        other = sent[name][2]
        assert tensor.dtype == other.dtype and tensor.stride() == other.stride(), (what, name)
        # FSDP2 pads shards, of which ranks may have unequal ones.
        assert tensor.untyped_storage().nbytes() == other.untyped_storage().nbytes(), (what, name)
        assert torch.equal(tensor, other), (what, name)
    assert before == after, what


@torch.no_grad()
def check_parts(folder: Path) -> None:
    """All shipped recipes with their levers, sharded by block and as a whole, over replicas, or divided by tensors."""
    low_rank = ("dalle_12b", "dalle_2b")
    for name in SMALLER:
        kinds = [(WHOLE,) if name == "openmoji_text" else (BY_BLOCK,)]
        kinds += [(WHOLE,)] if name in ("sd2_base", "openmoji_diffusion") else []
        kinds = [(*kind, ALONE) for kind in kinds] + [(MACHINES,)] if name in low_rank else kinds
        if name.startswith(("dalle", "gpt2")):
            kinds.append((NO_SHARDS, "training.tensor_parallel=2", *([ALONE] if name in low_rank else [])))
        for changes in kinds:
            changes = [*changes, *(["algorithms.compile=null"] if name.startswith("dalle") else [])]
            check_same(recipe_of(name, *changes), (name, changes))
    recipe = recipe_of("openmoji_diffusion", BY_BLOCK)
    recipe.checkpoints.load_weights = str(folder / "nothing")  # which the first rank alone looks for
    try:
        new_task(recipe, sent=True)
    except (FileNotFoundError, ValueError) as error:
        assert type(error) is (FileNotFoundError if dist.get_rank() == 0 else ValueError)
        assert f"{folder / 'nothing'}" in str(error) and "\n" not in str(error)
    else:
        raise AssertionError("weights that do not exist were loaded")


@torch.no_grad()
def check_two_dimensions(recipes: dict[str, str], folder: Path) -> None:
    """Four ranks: tensor parallelism with shards or with replicas, shards with replicas."""
    more = ["algorithms.compile=null", "model.width=24"]  # 24 rows of biases: not all parts are alike
    for name in ("dalle_2b", "gpt2_1b"):
        alone = [ALONE] if name == "dalle_2b" else []
        compiled = more if name == "dalle_2b" else ["model.width=24"]
        for changes in ([BY_BLOCK, *alone], [NO_SHARDS, *alone]):
            changes = [*compiled, *changes, "training.tensor_parallel=2"]
            check_same(recipe_of(name, *changes), (name, changes))
    check_same(recipe_of("dalle_2b", *more, MACHINES), "replicas")
    check_same(recipe_of("dalle_2b", *more, MACHINES, "training.tensor_parallel=2"), "replicas of groups")


class Peak(Storages):
    """The most bytes that are alive after any operator that allocates memory."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = len(self.known)
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if len(self.known) > known:
            self.most = max(self.most, self.live_bytes())
        return result


@torch.no_grad()
def check_bytes(folder: Path) -> None:
    """Beside its own parts, a rank that is not the first holds one parameter at a time."""
    for name, changes in (
        ("dalle_12b", ["model.layers=8", "algorithms.compile=null", BY_BLOCK, ALONE]),
        ("gpt2_1b", ["model.layers=12", NO_SHARDS, "training.tensor_parallel=2"]),
    ):
        recipe, most = recipe_of(name, *changes), []
        for sent in (False, True):
            with Peak() as peak:
                task = start(recipe, sent)
            most.append(peak.most)
        held = sum(own(tensor).nbytes for _, tensor in named_tensors(task))
        whole = sum(tensor.nbytes for _, tensor in named_tensors(task))
        largest = max(tensor.nbytes for _, tensor in named_tensors(task))
        limit = held + 2 * largest + SLACK  # and what the rank takes out of it
        assert most[0] >= whole > 1.2 * limit, (name, most, whole, limit)
        assert (most[1] < limit) == (dist.get_rank() > 0), (name, most, whole, limit)


@contextmanager
def built_by_every_rank():
    """A context in which every rank builds the whole model of a run."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(parts, "new_task", lambda recipe, **_: new_task(recipe, sent=False)))
        stack.enter_context(mock.patch.object(parts, "FirstRankSends", lambda task: Lever()))
        yield


def check_runs(recipe_file: str, folder: Path) -> None:
    """Losses, weights and averages of whole runs with dropout of captions: from new weights, and from their export."""
    changes = ["training.duration=3ba", "training.eval_every=3ba", "checkpoints.save=false", "data.caption_dropout=0.5"]
    changes += ["callbacks.sample_grid=null", "algorithms.ema.start=0ba"]
    load = f"checkpoints.load_weights={folder / 'composer' / 'export'}"
    for engine, more in (
        ("composer", ["training.fsdp={strategy: FULL_SHARD}"]),
        ("lightning", ["training.fsdp={wrap: model}", load, "callbacks.export=null"]),
    ):

        def run(name: str, changes=(*changes, *more, f"training.engine={engine}")) -> Recorder:
            recipe = load_config(recipe_file, [*changes, f"output={folder / name}"], Recipe)
            return record(recipe.training.engine, recipe)

        sent = run(engine)
        with built_by_every_rank():
            built = run(f"{engine}_built")
        assert_bit_equal(built, sent)
        assert len(sent.losses) == 3 and len(set(sent.digests)) > 1  # the rate of the first batches is 0


class Masked(nn.Module):
    """Tensors of every kind that a model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.tied = nn.Linear(4, 3)
        self.tied.weight = self.layer.weight
        self.again = self.layer.bias
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("table", torch.arange(5.0) + 0.5, persistent=False)
        self.mask = torch.ones(3, 3, dtype=torch.bool).tril()
        self.tied.mask = self.mask
        self.scale = torch.tensor(0.25, dtype=torch.float64)
        self.nothing = torch.zeros(0)
        self.single = torch.arange(4.0)[3::2]  # contiguous, with a stride of 2
        self.repeated = torch.arange(3.0)[:, None].expand(3, 4)  # a view, in whose memory values stand once

    def blocks(self) -> list[nn.Module]:
        return []


@torch.no_grad()
def check_kinds(folder: Path) -> None:
    """Buffers, masks, numbers, and parameters that modules share."""
    first = dist.get_rank() == 0
    with torch.device("cpu" if first else "meta"):
        task = Masked()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if first:
            nn.init.normal_(task.layer.weight)
            wanted = task
        else:
            wanted = Masked()
            nn.init.normal_(wanted.layer.weight)
    sends = FirstRankSends(task)
    run = FakeRun(task)
    sends.change_modules(run)
    sends.shard(run)
    assert task.tied.weight is task.layer.weight and task.again is task.layer.bias and task.tied.mask is task.mask
    for name in ("count", "table", "mask", "scale", "nothing", "single", "repeated"):
        value, other = getattr(task, name), getattr(wanted, name)
        assert value.dtype == other.dtype and torch.equal(value, other), name
    assert dict(task.named_buffers()).keys() == {"count", "table"} and list(task.state_dict())[-1] != "table"
    assert list(task.state_dict()) == list(wanted.state_dict())
    sums = torch.stack([task.layer.weight.double().sum(), task.tied.bias.double().sum()])
    both = [torch.zeros_like(sums) for _ in range(2)]
    dist.all_gather(both, sums)
    assert torch.equal(*both) and torch.all(both[0] != 0)
    check_refusal(first)


def check_refusal(first: bool) -> None:
    """Ranks without values find tensors that they would not receive; the first rank ends with them."""
    with torch.device("cpu" if first else "meta"):
        task = Masked()
        task.masks = [torch.zeros(2)]
    try:
        FirstRankSends(task).change_modules(FakeRun(task))
    except ValueError as error:
        assert str(error).startswith("Masked: masks holds tensors, ") and "\n" not in str(error)
    else:
        raise AssertionError("this rank goes on")


def checks(folder: Path) -> dict:
    """Checks by name, with the recipes of a folder."""
    found = {PARTS: check_parts, BYTES: check_bytes, KINDS: check_kinds}
    return found | {RUNS: lambda work: check_runs(str(folder / "runs.yaml"), work)}


CHECKS_OF_FOUR = {TENSOR: check_two_dimensions}
