"""Small versions of the shipped training recipes, in the precision that a GPU would train it in."""

import json
import math
from pathlib import Path

import pytest

from recipes.config.recipe import to_yaml
from tests.ranks import launch
from tests.recipes.engines.shipped import BATCHES, ELSEWHERE, RUNS, SMALLER, small, training_recipes

pytestmark = pytest.mark.timeout(1600)  # thirty small runs in one launch, on a machine that may be busy
FORMATS = {"amp_bf16": "torch.bfloat16", "amp_fp16": "torch.float16", "fp32": "torch.float16"}  # fp32: scaled blocks


def test_none_is_left_out():
    assert sorted((*SMALLER, *ELSEWHERE)) == training_recipes()


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Runs of the recipes on two ranks, in one launch: (recipe, kind) -> what each rank saw.

    Of two runs of a recipe one is of one engine and the other of the other. test_on_stub_gpu.py has them the other way
    round.
    """
    folder = tmp_path_factory.mktemp("shipped")
    sets = {name: request.getfixturevalue(name) for name in ("latent_sets", "token_sets", "text_sets", "drawings")}
    engines, plan, recipes = ("composer", "lightning"), {}, {}
    for name, kind in RUNS:
        sharded = kind == "fsdp"
        recipes[name, kind] = small(name, sets, folder / kind / name, sharded=sharded)
        path = folder / f"{name}_{kind}.yaml"
        path.write_text(to_yaml(recipes[name, kind]))
        plan[f"{name} {kind}"] = (engines[(list(SMALLER).index(name) + sharded) % 2], str(path))
    (folder / "recipes.json").write_text(json.dumps(plan))
    done = launch(2, Path(__file__).with_name("shipped_ranks.py"), folder, timeout=1500)
    files = [folder / f"seen.{rank}.json" for rank in range(2)]
    reports = [json.loads(file.read_text()) if file.is_file() else {} for file in files]
    missing = {"error": "it was not reached:\n" + done.stdout[-2000:] + done.stderr[-4000:]}
    seen = {key: [report.get(" ".join(key), missing) for report in reports] for key in recipes}
    return recipes, seen


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_it_trains_in_its_precision(runs, name, kind):
    recipes, seen = runs
    for rank, report in enumerate(seen[name, kind]):
        if "error" in report:
            pytest.fail(f"rank {rank}: {report['error']}", pytrace=False)
    one, other = seen[name, kind]
    recipe = recipes[name, kind]
    assert len(one["losses"]) == BATCHES and all(math.isfinite(loss) for loss in one["losses"])
    assert one["digests"] == other["digests"] and len(set(one["digests"])) == BATCHES  # weights move, and stay alike
    assert FORMATS[recipe.training.precision] in one["formats"]
    assert one["validated"] and one["validated"] == other["validated"]
    assert (Path(recipe.output) / "export" / "export.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLER)
def test_ddp_and_fsdp_agree(runs, name):
    """16-bit products differ in their order of summation alone."""
    seen = runs[1]
    ddp, fsdp = seen[name, "ddp"][0], seen[name, "fsdp"][0]
    assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=0.02)
    assert fsdp["flops"] == ddp["flops"] > 0
