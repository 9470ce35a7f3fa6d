"""Small versions of the shipped training recipes on a GPU that computes nothing: all that the host does for a GPU."""

import json
from pathlib import Path

import pytest

from recipes.config.recipe import Recipe, load_config, to_yaml
from tests.recipes.engines.shipped import BATCHES, RUNS, SMALLER, small
from tests.stub_gpu import needs_stub_gpu

pytestmark = [pytest.mark.timeout(1600), needs_stub_gpu]
ENGINES = ("composer", "lightning")
# With CUDA graphs too: PyTorch's own kernels and compiled blocks, scaled ones, and networks without blocks.
GRAPHED = {"sd2_base": "blocks", "dalle_1b": "blocks", "dalle_12b": "blocks", "openmoji_text": "whole"}
# With adam16, muon and amp_fp16, the host reads whether gradients are finite before it launches the update, and with
# resblock_grad_scaling, which blocks have overflowed.
READS = {"dalle_12b": 2, "dalle_2b": 2, "dvae": 1, "openmoji_dalle": 1, "openmoji_dvae": 1, "openmoji_vae": 1}
AVERAGED = ("dalle_12b", "dalle_2b")  # in host memory; FSDP2 under one engine each


@pytest.fixture(scope="module")
def seen(request, stub_gpu, tmp_path_factory):
    """Runs of the recipes in one process, with and without FSDP2: (recipe, kind) -> what was seen of it.

    Some go on with FSDP2 from the checkpoint that they wrote at their end.
    """
    folder = tmp_path_factory.mktemp("recipes")
    sets = {name: request.getfixturevalue(name) for name in ("latent_sets", "token_sets", "text_sets", "drawings")}
    plan = {}
    for name, kind in RUNS:
        sharded = kind == "fsdp"
        recipe = small(name, sets, folder / kind / name, sharded=sharded)
        # Two microbatches a step, as on each of two ranks.
        changes = ["training={device: gpu, tensor_parallel: 1, microbatch: 4}"]
        if "powersgd" in recipe.algorithms:  # which needs several machines, as tensor parallelism several GPUs
            changes += ["algorithms.powersgd=null"] + ["training.fsdp.replicas=1"] * sharded
        if name == "sd2_base":
            changes.append("algorithms.noise={name: noise_of_samples}")
        path = folder / f"{name}_{kind}.yaml"
        path.write_text(to_yaml(recipe))
        path.write_text(to_yaml(load_config(path, changes, Recipe)))
        plan[f"{name} {kind}"] = (ENGINES[(list(SMALLER).index(name) + sharded + 1) % 2], str(path))
    for name, captured in GRAPHED.items():
        engine, path = plan[f"{name} ddp"]
        engine, whole = next(other for other in ENGINES if other != engine), Path(path)
        changes = [f"output={folder}/graphs/{name}"]
        changes.append(f"algorithms.graphs={{name: cuda_graphs, whole: {str(captured == 'whole').lower()}}}")
        if "activation_checkpointing" in load_config(whole, [], Recipe).algorithms:  # which reads random states
            changes.append("algorithms.activation_checkpointing=null")
        path = folder / f"{name}_graphs.yaml"
        path.write_text(to_yaml(load_config(whole, changes, Recipe)))
        plan[f"{name} graphs"] = (engine, str(path))
    changes = ["training={microbatch: auto, global_batch: 4, duration: 9ba}", f"output={folder}/auto"]
    (folder / "auto.yaml").write_text(to_yaml(load_config(folder / "sd2_base_graphs.yaml", changes, Recipe)))
    plan["sd2_base auto"] = ("lightning", str(folder / "auto.yaml"))
    for name in AVERAGED:
        engine, path = plan[f"{name} fsdp"]
        longer = [f"training.duration={BATCHES + 1}ba", "checkpoints.allow_changes=[training, algorithms]"]
        longer.append("algorithms.compile=null")  # which what is loaded does not depend on
        (folder / f"{name}_again.yaml").write_text(to_yaml(load_config(path, longer, Recipe)))
        plan[f"{name} again"] = (engine, str(folder / f"{name}_again.yaml"))
    (folder / "recipes.json").write_text(json.dumps(plan))
    done = stub_gpu(
        Path(__file__).with_name("on_stub_gpu.py"),
        folder,
        timeout=1500,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",  # memory that no kernel has written is zero
    )
    file = folder / "seen.0.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    missing = {"error": "it was not reached:\n" + done.stdout[-2000:] + done.stderr[-12000:]}
    return {tuple(name.split()): found.get(name, missing) for name in plan}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_it_runs_to_its_end(seen, name, kind):
    report = seen[name, kind]
    if "error" in report:
        pytest.fail(report["error"], pytrace=False)
    assert len(report["losses"]) == BATCHES
    assert report["validated"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_how_often_the_host_waits_in_a_step(seen, engine):
    """Under Lightning only to read what decides on an update, where the optimizer does not skip it by itself."""
    waits = {run: report["waits"] for run, report in seen.items() if report.get("engine") == engine}
    assert len(waits) > 10
    for (name, kind), found in waits.items():
        thread = 1 if name in (*AVERAGED, "dalle_1b") else 0  # the one that averages in host memory
        # One wait is due to the stub, whose magnitude of gradients is on the host. Composer waits for the size of the
        # batch, the loss and times, and copies a zero for each part of a loss.
        limit = 1 + READS.get(name, 0) + (6 if engine == "composer" else 0) + thread
        assert found <= limit, f"{name}, {kind}: {found}"


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHED)
def test_it_runs_with_graphs(seen, name):
    report = seen[name, "graphs"]
    if "error" in report:
        pytest.fail(report["error"], pytrace=False)
    assert len(report["losses"]) == BATCHES
    assert report["captured"] > 0 and report["strays"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", AVERAGED)
def test_it_goes_on_from_its_sharded_checkpoint(seen, name):
    report = seen[name, "again"]
    if "error" in report:
        pytest.fail(report["error"], pytrace=False)
    assert len(report["losses"]) == 1


@pytest.mark.slow
def test_it_searches_for_its_microbatch_before_it_captures(seen):
    report = seen["sd2_base", "auto"]
    if "error" in report:
        pytest.fail(report["error"], pytrace=False)
    assert report["found"] == [4] and report["captured"] > 0 and report["strays"] == 0
