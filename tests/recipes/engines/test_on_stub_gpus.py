"""Small versions of shipped recipes on two ranks, each with a GPU that computes nothing: what they ask of NCCL."""

import json
from pathlib import Path

import pytest

from recipes.config.recipe import Recipe, load_config, to_yaml
from tests.recipes.engines.shipped import BATCHES, small
from tests.stub_gpu import needs_stub_gpu

pytestmark = [pytest.mark.timeout(1200), needs_stub_gpu]
RANKS = 2
AVERAGES = "algorithms.averages={name: block_all_reduce}"
GRAPHS = "algorithms.graphs={name: cuda_graphs}"
SLOW = "algorithms.compile=null"
LONGER = 10  # batches of the search for a microbatch
# Recipe and the way in which it is divided -> engine, changes.
RUNS = {
    "sd2_base ddp": ("lightning", []),
    "sd2_base fsdp": ("composer", [SLOW]),
    "sd2_base graphs": ("composer", [GRAPHS, AVERAGES]),
    "sd2_base search": ("lightning", [GRAPHS, AVERAGES, f"training={{microbatch: auto, duration: {LONGER}ba}}"]),
    "dalle_1b ddp": ("lightning", [SLOW]),  # with weights that are averaged in host memory
    "dalle_2b ddp": ("composer", []),  # with powersgd
    "dalle_12b fsdp": ("composer", [SLOW]),  # with powersgd between replicas
    "dalle_12b tensor": ("lightning", ["training.tensor_parallel=2", "algorithms.powersgd=null"]),
}


@pytest.fixture(scope="module")
def seen(request, stub_gpu, tmp_path_factory):
    """(run -> what each rank has seen of it, the collectives of each rank)."""
    folder = tmp_path_factory.mktemp("gpus")
    sets = {name: request.getfixturevalue(name) for name in ("latent_sets", "token_sets")}
    plan = {}
    for run, (engine, changes) in RUNS.items():
        name, kind = run.split()
        path = folder / f"{name}_{kind}.yaml"
        path.write_text(to_yaml(small(name, sets, folder / kind / name, sharded=kind == "fsdp")))
        here = ["training={device: gpu, tensor_parallel: 1}", *changes]
        path.write_text(to_yaml(load_config(path, here, Recipe)))
        plan[run] = (engine, str(path))
    (folder / "recipes.json").write_text(json.dumps(plan))
    done = stub_gpu(
        Path(__file__).with_name("on_stub_gpu.py"),
        folder,
        ranks=RANKS,
        timeout=1100,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",  # memory that no kernel has written is zero
    )
    missing = {"error": "it was not reached:\n" + done.stdout[-2000:] + done.stderr[-12000:]}
    files = [folder / f"seen.{rank}.json" for rank in range(RANKS)]
    found = [json.loads(file.read_text()) if file.is_file() else {} for file in files]
    collectives = [folder / f"collectives.{rank}" for rank in range(RANKS)]
    return (
        {run: [of_rank.get(run, missing) for of_rank in found] for run in plan},
        [file.read_text().splitlines() if file.is_file() else [] for file in collectives],
    )


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_it_runs_to_its_end(seen, run):
    for report in seen[0][run]:
        if "error" in report:
            pytest.fail(report["error"], pytrace=False)
        assert len(report["losses"]) == (LONGER if "search" in run else BATCHES)
        assert report["validated"] and report["strays"] == 0
        assert report["found"] == ([4] if "search" in run else [])
        assert (report["captured"] > 0) == (run in ("sd2_base graphs", "sd2_base search"))


@pytest.mark.slow
def test_ranks_call_the_same_collectives(seen):
    """In one order, with the same sizes: with NCCL, ranks that differ wait for each other for ever."""
    first, second = seen[1]
    kinds = {line.split()[0] for line in first}
    assert kinds >= {"all_reduce", "all_gather", "reduce_scatter"}
    assert kinds & {"send", "all_to_all"}  # an exchange between all, by the version of PyTorch
    assert first == second
