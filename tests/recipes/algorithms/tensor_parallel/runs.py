"""Runs of recipes on four ranks, each divided in another way, against one in which every rank has the whole model."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from recipes.config.recipe import Recipe, load_config
from recipes.engines.checkpoints.conversion import convert, from_composer, read_composer
from recipes.models.autoregressive.task import load_transformer
from recipes.models.latent_diffusion.dit import DiT
from recipes.training.checkpoint_names import REST
from tests.recipes.engines.recording import Recorder, record
from tests.recipes.engines.stacked import stacked

SEQUENCE = "training.sequence_parallel=true"
NO_EXPORT = "callbacks.export=null"
UNSAVED = "checkpoints.save=false"
KEPT = "algorithms.activation_checkpointing=null"
TWO = "training.microbatch=4"  # two microbatches of all 8 samples, which the only group has
# One machine per group, between which PowerSGD of full rank averages and clips.
MACHINES = [
    "training.grad_clip=null",
    "training.fsdp={replicas: 2, checkpoints: full}",
    "algorithms.powersgd={name: powersgd, rank: 128, clip: 0.5, wire: 32-bit, buffer: 32-bit}",
]


class Drawn(Recorder):
    """Also says in how many states the ranks' generators are after the last batch."""

    def step_end(self, run):
        super().step_end(run)
        self.state = torch.get_rng_state().numpy().tobytes()

    def states(self) -> int:
        found = [b""] * dist.get_world_size()
        dist.all_gather_object(found, self.state)
        return len(set(found))


def check_runs(recipes: dict[str, str], folder: Path) -> None:
    """Runs under both engines, and resumed on other numbers of devices, against one without division.

    From a sharded checkpoint of tensor 2 x shards 2 to tensor 4, from a full one of whole models to tensor 2, and from
    a full one that was made of a sharded one of an earlier version.
    """

    def run(name: str, engine: str, devices: int, *changes: str) -> Recorder:
        own = [f"output={folder / name}", f"training.engine={engine}", f"training.tensor_parallel={devices}"]
        recipe = load_config(recipes["autoregressive"], [*own, *changes], Recipe)
        return record(engine, recipe, Recorder(False, False))

    def middle(name: str) -> str:
        found = (path for path in (folder / name / "checkpoints").iterdir() if "-ba2" in path.name)
        return f"checkpoints.load_path={next(found)}"

    sharded = "training.fsdp={checkpoints: sharded}"
    grid = "callbacks.token_grid={name: token_grid, prompts: [a dot, a star], batch: 2}"
    plain = run("plain", "lightning", 1)
    runs = {
        "composer": run("composer", "composer", 2, sharded, grid),
        "lightning": run("lightning", "lightning", 4, SEQUENCE, TWO),
        "composer again": run("composer_again", "composer", 4, sharded, middle("composer"), NO_EXPORT, TWO),
        "two machines": run("two_machines", "lightning", 2, *MACHINES, middle("plain"), NO_EXPORT),
    }
    earlier = f"checkpoints.load_path={of_earlier_version(folder / 'composer', folder / 'earlier')}"
    changes = [*MACHINES, earlier, NO_EXPORT, SEQUENCE, KEPT, UNSAVED]
    runs["machines, sequence"] = run("sequence", "lightning", 2, *changes)
    for name, other in runs.items():
        compare(plain, other, name)
    short = ["training.duration=2ba", "evals.val=null", UNSAVED, NO_EXPORT]
    scaling = "algorithms={scheduled_ema: null, scaling: {name: resblock_grad_scaling}}"
    scaled = run("scaled", "lightning", 4, scaling, SEQUENCE, TWO, *short)
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


def of_earlier_version(run: Path, folder: Path) -> Path:
    """A sharded checkpoint of batch 2, written as by a version with stacked queries, keys and values, and converted."""
    if dist.get_rank() == 0:
        new = next(path for path in (run / "checkpoints").iterdir() if "-ba2" in path.name)
        state = stacked(from_composer(read_composer(new)))
        assert any(".branch.qkv." in name for name in state["weights"])
        parts = {name: state.pop(name) for name in ("weights", "optimizer")}
        dcp.save(parts, checkpoint_id=folder / new.name, no_dist=True)
        torch.save(state, folder / new.name / REST)
        convert(folder / new.name, "lightning")
    dist.barrier()
    return next(folder.glob("*.ckpt"))


def check_resumed_dropout(recipes: dict[str, str], folder: Path) -> None:
    """Language models with dropout that go on after batch 1 of 2 draw the same numbers, in and outside of branches. On
    devices that have samples of their own from then on, they draw other numbers."""
    for engine, model, changes in (("composer", "language 2", [SEQUENCE]), ("lightning", "language 4", [TWO])):

        def run(name: str, *more: str, engine=engine, model=model, changes=changes) -> Recorder:
            own = [f"output={folder / name}", f"training.engine={engine}"]
            recipe = load_config(recipes[model], [*own, *changes, *more], Recipe)
            return record(engine, recipe, Drawn(False, False))

        first = run(f"dropout_{engine}")
        checkpoints = (folder / f"dropout_{engine}" / "checkpoints").iterdir()
        middle = next(path for path in checkpoints if "-ba1" in path.name)
        again = run(f"dropout_{engine}_again", f"checkpoints.load_path={middle}", UNSAVED)
        assert again.losses == first.losses[1:] and len(again.losses) == 1, (engine, again.losses, first.losses)
        figures = [dict(one.evals[-1][2]) for one in (first, again)]
        assert figures[0] == figures[1] and set(figures[0]) == {"loss", "perplexity"}
        whole = ["training={tensor_parallel: 1, sequence_parallel: false, microbatch: 2, fsdp: {}}", NO_EXPORT]
        whole += [UNSAVED, "evals.val=null"]
        apart = run(f"dropout_{engine}_apart", f"checkpoints.load_path={middle}", *whole)
        assert [one.states() for one in (first, again, apart)] == [4 // int(model[-1]), 4 // int(model[-1]), 4]


def check_resumed_dit(recipes: dict[str, str], folder: Path) -> None:
    """A diffusion transformer's run that goes on from a sharded checkpoint of tensor 2 x shards 2 on tensor 4, with the
    same samples' noise. Both sample images, of which each device computes a part."""

    def run(name: str, devices: int, *changes: str) -> Recorder:
        own = [f"output={folder / name}", f"training.tensor_parallel={devices}"]
        return record("composer", load_config(recipes["dit"], [*own, *changes], Recipe), Recorder(False, False))

    first = run("dit", 2)
    middle = next(path for path in (folder / "dit" / "checkpoints").iterdir() if "-ba2" in path.name)
    again = run("dit_again", 4, f"checkpoints.load_path={middle}", UNSAVED, NO_EXPORT, TWO)
    compare(first, again, "dit")
    if dist.get_rank() == 0:
        for network, weights in (("transformer", first.weights), ("transformer_ema", first.average)):
            exported = DiT.open(folder / "dit" / "export" / network).state_dict()
            assert weights.keys() == {f"denoiser.{name}" for name in exported}
            assert all(torch.equal(tensor, weights[f"denoiser.{name}"]) for name, tensor in exported.items())


def compare(plain: Recorder, run: Recorder, label: str) -> None:
    """The batches that both have, and everything at the end."""
    batches = len(run.losses)
    assert batches in (2, 4)
    torch.testing.assert_close(run.losses, plain.losses[-batches:], rtol=1e-4, atol=0)
    assert run.samples == plain.samples  # each counts once, however many devices compute it
    assert [a[:2] for a in run.evals] == [b[:2] for b in plain.evals][-len(run.evals) :]
    assert dist.get_rank() or set(run.average) == set(plain.average)  # gathered to the first rank
    for one, other in ((run.weights, plain.weights), (run.average, plain.average)):
        wrong = [name for name in one if not name.endswith("k.bias") and not close(one[name], other[name])]
        assert not wrong, (label, wrong)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Within a hundredth of what six updates move a weight."""
    return (one - other).abs().max().item() < 2e-4


CHECKS = {"runs": check_runs, "resumed_dropout": check_resumed_dropout, "resumed_dit": check_resumed_dit}
