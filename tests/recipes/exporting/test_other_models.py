"""Exports of other models than diffusion: each has the format of its own."""

import filecmp
import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from data.system.files import write_json
from recipes.config.recipe import Recipe, load_config
from recipes.export import main
from recipes.generation.exports import draw
from tests.recipes.errors import last_error
from tests.recipes.exporting.runs import a_run

ROOT = Path(__file__).resolve().parents[3]
AUTOREGRESSIVE = [
    "model={layers: 2, width: 32, heads: 2, text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3}",
    "data={resolution: 32, positions: 16, workers: 0}",
    "evals.val={resolution: 32, positions: 16, workers: 0}",
]


def export(*arguments):
    main([str(argument) for argument in arguments])


def refuse(capsys, *arguments):
    return last_error(main, arguments, capsys)


def run_card(out):
    """Runs the lines of a model card as they are, in this checkout, which it asks for; returns what they define."""
    code, rest = (out / "README.md").read_text().split("```python\n")[1].split("```")
    assert len(code.splitlines()) == 3 and rest.startswith("\n\nRun these lines in a checkout of Precompose, which ")
    names = {}
    exec(code.replace(f'"{out.name}"', f'"{out}"'), names)
    return names


def test_a_token_model_draws_in_three_lines(token_recipe, tmp_path, capsys):
    path, task = a_run(token_recipe(tmp_path / "run", *AUTOREGRESSIVE, "training.device=cpu"))
    export(path, tmp_path / "out")
    assert capsys.readouterr().out.endswith("(native)\n")
    out = tmp_path / "out"
    assert {"transformer", "vocabulary.json", "image_encoder", "README.md"} <= {file.name for file in out.iterdir()}
    assert not (out / "transformer_ema").exists() and not (out / "done.json").exists()
    written, known = load_file(out / "transformer" / "model.safetensors"), task.network.state_dict()
    assert all(torch.equal(written[name], known[name] / 2) for name in known)
    names = run_card(out)
    assert names["images"].shape == (1, 32, 32, 3) and names["images"].dtype == np.uint8
    assert (names["images"] == draw(out, ["red heart"], seeds=[0], guidance=1.0)).all()
    # Where the vocabulary has gone, an export has it.
    config = tmp_path / "run" / "config.yaml"
    config.write_text(re.sub("vocabulary: .*json", "vocabulary: gone.json", config.read_text()))
    assert "gone.json: no such vocabulary; restore it; or give a folder" in refuse(capsys, path, tmp_path / "again")
    export(path, tmp_path / "again", "--data", out)
    assert filecmp.cmp(out / "vocabulary.json", tmp_path / "again" / "vocabulary.json", shallow=False)
    # Where another one is in its place, the run's own export has it.
    digest = hashlib.sha256((out / "vocabulary.json").read_bytes()).hexdigest()
    (tmp_path / "run" / "encoded.json").write_text(json.dumps({"vocabulary": digest}))
    (tmp_path / "other.json").write_text("{}")
    config.write_text(config.read_text().replace("vocabulary: gone.json", f"vocabulary: {tmp_path}/other.json"))
    error = refuse(capsys, path, tmp_path / "again")
    assert f"the vocabulary {tmp_path}/other.json (sha256 " in error and "--data FOLDER" in error
    shutil.copytree(out, tmp_path / "run" / "export")
    export(path, tmp_path / "again")
    assert filecmp.cmp(out / "vocabulary.json", tmp_path / "again" / "vocabulary.json", shallow=False)


def test_the_card_counts_the_images_of_all_sets(token_recipe, token_sets, tmp_path):
    """The manifest of an export is that of the first set."""
    more, run = tmp_path / "more", tmp_path / "run"
    shutil.copytree(token_sets / "val", more)
    path, _ = a_run(token_recipe(run, *AUTOREGRESSIVE, f"data.streams.more={{name: local, path: {more}}}"))
    counts = [json.loads((token_sets / name / "manifest.json").read_text())["samples"] for name in ("train", "val")]
    export(path, tmp_path / "out")
    assert f"| Training images | {sum(counts)} |" in (tmp_path / "out" / "README.md").read_text()
    # Where a set has gone, the run's own export says it; otherwise nothing is said.
    shutil.rmtree(more)
    export(path, tmp_path / "unknown")
    assert "Training images" not in (tmp_path / "unknown" / "README.md").read_text()
    shutil.copytree(tmp_path / "out", run / "export")
    export(path, tmp_path / "known")
    assert f"| Training images | {sum(counts)} |" in (tmp_path / "known" / "README.md").read_text()


def test_other_models_keep_their_own_format(tmp_path, drawings):
    source = [f"data.source.urls={drawings}/train/*.tar", "evals.val=null", f"output={tmp_path}/run"]
    small = ["model={channels: [8, 16], norm_groups: 4}", "training.device=cpu"]
    recipe = load_config(ROOT / "yamls" / "openmoji_vae.yaml", [*source, *small], Recipe)
    path, task = a_run(recipe, average=False)
    export(path, tmp_path / "out")
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(tmp_path / "out", low_cpu_mem_usage=False)
    known = task.network.state_dict()
    assert all(torch.equal(tensor, known[name]) for name, tensor in vae.state_dict().items())
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith(f"# {recipe.run_name}\n")  # no empty metadata
    assert "checkout" not in card


def test_averaged_weights_do_not_get_the_scaling_factor_of_others(tmp_path, drawings, capsys):
    """A checkpoint has the moments of the latents of the weights of training, which the averaged ones do not have."""
    source = [f"data.source.urls={drawings}/train/*.tar", "evals.val=null", f"output={tmp_path}/run"]
    small = ["model={channels: [8, 16], norm_groups: 4}", "training.device=cpu"]
    path, task = a_run(load_config(ROOT / "yamls" / "openmoji_vae.yaml", [*source, *small], Recipe))
    for weights in ([], ["--weights", "ema"]):
        error = refuse(capsys, path, tmp_path / "out", *weights)
        assert f"take {tmp_path}/run/export, which the run writes, or give --weights raw" in error
        assert not (tmp_path / "out").exists()
    export(path, tmp_path / "out", "--weights", "raw")
    written = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in task.network.state_dict().items())


def test_the_card_of_a_dvae_opens_it(tmp_path, drawings):
    source = [f"data.source.urls={drawings}/train/*.tar", "evals.val=null", f"output={tmp_path}/run"]
    small = ["model={codes: 8, hidden: 8, blocks: 1}", "training.device=cpu"]
    path, task = a_run(load_config(ROOT / "yamls" / "openmoji_dvae.yaml", [*source, *small], Recipe), average=False)
    export(path, tmp_path / "out")
    written, known = run_card(tmp_path / "out")["network"].state_dict(), task.network.state_dict()
    assert all(torch.equal(written[name], known[name]) for name in known)


def test_a_language_model_has_its_vocabulary(text_sets, tmp_path, capsys):
    paths = [f"data.streams.{name}.path={text_sets}/{name}" for name in ("docs", "captions")]
    paths += [f"evals.val.streams.val.path={text_sets}/docs_val", f"output={tmp_path}/run", "training.device=cpu"]
    sizes = "model={layers: 1, width: 8, heads: 1, positions: 16, vocabulary: 320}"
    recipe = load_config(ROOT / "yamls" / "docs_gpt2.yaml", [*paths, sizes], Recipe)
    recipe.checkpoints.load_weights = f"{tmp_path}/gone/export"
    path, task = a_run(recipe)
    write_json(tmp_path / "run" / "export" / "export.json", {"started_from": "phase_1"})
    export(path, tmp_path / "out")
    assert "| Started from | weights of phase_1 |" in (tmp_path / "out" / "README.md").read_text()
    written, known = run_card(tmp_path / "out")["network"].state_dict(), task.network.state_dict()
    assert all(torch.equal(written[name], known[name] / 2) for name in known)
    vocabulary = (text_sets / "docs" / "vocabulary.json").read_bytes()
    assert (tmp_path / "out" / "vocabulary.json").read_bytes() == vocabulary
    # Where the set has gone, the run's own export has it.
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(text_sets), "gone"))
    assert "vocabulary.json: not there" in refuse(capsys, path, tmp_path / "again")
    shutil.copytree(tmp_path / "out", tmp_path / "run" / "export", dirs_exist_ok=True)
    assert "vocabulary.json: not there" in refuse(capsys, path, tmp_path / "again", "--data", tmp_path)
    export(path, tmp_path / "again")
    assert (tmp_path / "again" / "vocabulary.json").read_bytes() == vocabulary
