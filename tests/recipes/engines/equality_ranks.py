"""Run by test_equality.py on two ranks in the folder argv[1]: trains recipe.yaml under both engines, with DDP and with
FSDP2, lets runs go on from checkpoints of the same and of the other engine, trains low_rank.yaml under both engines,
and writes the differences to differences.json."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

from recipes.config.recipe import FSDP, Recipe, load_config
from recipes.engines.checkpoints.conversion import convert
from recipes.training.checkpoint_names import KINDS
from recipes.training.ranks import from_first_rank, is_first_rank
from tests.recipes.engines.recording import Recorder, differences, record


def main():
    out = Path(sys.argv[1])
    recipe = load_config(out / "recipe.yaml", [], Recipe)
    low_rank = load_config(out / "low_rank.yaml", [], Recipe)
    by_block = load_config(out / "recipe.yaml", ["algorithms.averages={name: block_all_reduce}"], Recipe)

    def run(engine, name, fsdp, **checkpoints):
        return record(
            engine,
            replace(
                recipe,
                output=str(out / name),
                training=replace(recipe.training, fsdp=fsdp),
                checkpoints=replace(recipe.checkpoints, **checkpoints),
            ),
            Recorder(with_digests=False),
        )

    found = {}
    full, sharded = FSDP(checkpoints="full"), FSDP(checkpoints="sharded")
    ddp = {engine: run(engine, f"ddp_{engine}", None) for engine in ("composer", "lightning")}
    fsdp = {
        "composer": run("composer", "fsdp_composer", sharded),
        "lightning": run("lightning", "fsdp_lightning", full),
    }
    assert [r.bucket_views for r in (*ddp.values(), *fsdp.values())] == [True, True, None, None]
    for recorded in ddp.values():  # two microbatches, of which the last one averages gradients
        assert recorded.synchronised == [(False, False), (True, True)] * len(recorded.losses)
    found["ddp"] = differences(ddp["composer"], ddp["lightning"])
    found["fsdp"] = differences(fsdp["composer"], fsdp["lightning"])
    for engine in ("composer", "lightning"):
        same = replace(by_block, output=str(out / f"by_block_{engine}"))
        averaged = record(engine, same, Recorder(with_digests=False))
        assert averaged.bucket_views is None
        found[f"block_all_reduce, {engine}"] = differences(ddp[engine], averaged)
    resumed = run("lightning", "ddp_again", None, load_path=str(middle(out / "ddp_lightning")))
    found["ddp resumed"] = differences(ddp["lightning"], resumed)
    begun = run("lightning", "fsdp_sharded", sharded)
    resumed = run("lightning", "fsdp_again", sharded, load_path=str(middle(out / "fsdp_sharded")))
    found["fsdp sharded, resumed"] = differences(begun, resumed)
    for engine, other in (("composer", "lightning"), ("lightning", "composer")):
        there = from_first_rank(moved(middle(out / f"fsdp_{engine}"), out / f"to_{other}", other))
        # What was converted is full, whatever the run then saves.
        crossed = run(other, f"to_{other}", sharded if other == "composer" else full, load_path=str(there))
        found[f"fsdp begun under {engine}"] = differences(fsdp[engine], crossed)
    resumed = run("composer", "fsdp_full", full, load_path=str(middle(out / "fsdp_composer")))
    found["fsdp sharded, resumed with full checkpoints"] = differences(fsdp["composer"], resumed)
    for name, is_sharded in {"to_composer": True, "fsdp_full": False}.items():
        assert KINDS["composer"].newest(out / name / "checkpoints").is_dir() == is_sharded
    averaged = {
        engine: record(engine, replace(low_rank, output=str(out / f"low_rank_{engine}")), Recorder(with_digests=False))
        for engine in ("composer", "lightning")
    }
    found["powersgd"] = differences(averaged["composer"], averaged["lightning"])
    if is_first_rank():
        (out / "differences.json").write_text(json.dumps(found))


def middle(output):
    """The checkpoint of batch 4."""
    return next(path for path in (output / "checkpoints").iterdir() if "-ba4" in path.name)


def moved(checkpoint, output, engine):
    """A converted copy of a checkpoint; the first rank's path counts."""
    if not is_first_rank():
        return None
    folder = output / "checkpoints"
    folder.mkdir(parents=True)
    copy = shutil.copytree if checkpoint.is_dir() else shutil.copy
    return convert(Path(copy(checkpoint, folder / checkpoint.name)), engine)


if __name__ == "__main__":
    main()
