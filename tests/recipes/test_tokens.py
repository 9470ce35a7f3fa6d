"""The OpenMoji recipe on tokens, at a small width: trained on a set that the encode job wrote, resumed, exported, and
sampled from by generate.py."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from composer import Callback
from PIL import Image

from recipes.config.recipe import Recipe, load_config, to_yaml
from recipes.engines.composer.trainer import build_trainer
from recipes.generate import main
from recipes.generation.exports import family_of, find_network, load_pipeline
from recipes.models.autoregressive.pipeline import jobs
from recipes.models.autoregressive.task import Autoregressive
from recipes.scoring.reranking import Reranker, best
from tests.ranks import launch
from tests.recipes.errors import last_error

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model={layers: 4, width: 32, heads: 2, text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3}",
    "data={resolution: 32, positions: 16}",
    "data.workers=0",
    "evals.val={resolution: 32, positions: 16}",
    "optimizer.lr=2e-2",
    "schedule={name: plateau, warmup: 2ba, window: 3, patience: 1}",
    "training.duration=14ba",
    "training.global_batch=8",
    "training.eval_every=7ba",
    "training.device=cpu",
    "checkpoints={every: 6ba, keep: -1}",
    "callbacks={progress: {name: progress, seconds: 0}, throughput: null, lr_monitor: null}",
    "callbacks.token_grid={name: token_grid, every: 7ba, guidance: 2.0, temperature: 0.8, batch: 2}",
    "callbacks.token_grid.prompts=[a dot, a star, a wall]",
    "callbacks.export.every=7ba",
    "loggers={}",
]
CAPTIONS = ["a red dot", "a blue star"]


class Losses(Callback):
    def __init__(self):
        self.values = []

    def batch_end(self, state, logger):
        self.values.append(state.total_loss_dict["loss/train/total"])


@pytest.fixture(scope="module")
def small(token_recipe):
    """(output, overrides) -> the recipe on the small set."""
    return lambda output, *overrides: token_recipe(output, *SMALL, *overrides)


@pytest.fixture(scope="module")
def train(small):
    """(output, overrides) -> (recipe, losses, weights) of a finished run."""

    def run(output, *overrides):
        recipe = small(output, *overrides)
        trainer = build_trainer(recipe)
        losses = Losses()
        trainer.state.callbacks.append(losses)
        trainer.fit()
        trainer.close()
        weights = torch.cat([p.detach().flatten() for p in trainer.state.model.parameters()])
        return recipe, losses.values, weights

    return run


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory):
    return train(tmp_path_factory.mktemp("tokens") / "run")


@pytest.fixture(scope="module")
def export(trained):
    return Path(trained[0].output, "export")


def test_training_starts_at_the_uniform_loss_and_gets_below(trained):
    losses = trained[1]
    assert losses[0] == pytest.approx(math.log(280 + 32), rel=1e-5)
    assert np.mean(losses[-3:]) < 0.9 * losses[0] and len(losses) == 14


def test_what_a_run_writes(trained, export):
    assert {path.name for path in export.iterdir()} == {
        "transformer", "transformer_ema", "image_encoder", "vocabulary.json", "vocabulary.manifest.json",
        "manifest.json", "export.json", "done.json",
    }  # fmt: skip
    assert json.loads((export / "done.json").read_text())["resolution"] == 32
    grids = sorted(path.name for path in Path(trained[0].output, "samples").iterdir())
    assert grids == ["ba0000007.png", "ba0000014.png"]
    assert family_of(export).title == "token"
    assert find_network(export, None).name == "transformer_ema" and find_network(export, "raw").name == "transformer"


def test_a_resumed_run_is_the_whole_one(trained, train, tmp_path):
    recipe, losses, weights = trained
    (checkpoint,) = Path(recipe.output, "checkpoints").glob("*ba6-rank0.pt")
    _, resumed_losses, resumed = train(tmp_path / "run", f"checkpoints.load_path={checkpoint}")
    assert resumed_losses == losses[6:] and (resumed == weights).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.side=5", "side is 4, the recipe expects 5"),
        ("model.codes=33", "codes is 32, the recipe expects 33"),
        ("model.text_vocabulary=300", "text_vocabulary is 280, the recipe expects 300"),
        ("data.positions=12", "positions is 12, the recipe expects 16"),
    ],
)
def test_data_that_does_not_fit_is_refused_before_training(train, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "run", change)


@pytest.mark.slow
def test_two_ranks(small, tmp_path):
    """Sharded models equal whole ones; a sharded run draws its grids, exports what one process opens, and its ranks
    agree on plateaus; so does one with 16-bit training on two machines."""
    recipe = small(
        tmp_path / "run", "training.fsdp={}", "algorithms.again={name: activation_checkpointing}",
        "schedule={name: plateau, window: 1, patience: 1, threshold: 0.9, limit: 2}",
    )  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(to_yaml(recipe))
    script = Path(__file__).with_name("token_ranks.py")
    done = launch(2, script, tmp_path / "recipe.yaml", tmp_path / "machines", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert "all as it should be" in done.stdout
    assert [path.name for path in sorted((tmp_path / "run" / "samples").iterdir())] == [
        "ba0000007.png",
        "ba0000014.png",
    ]
    for run in ("run", "machines"):
        pictures = load_pipeline(tmp_path / run / "export", "cpu", "fp32").generate(["a dot"], seeds=[0])
        assert pictures.shape == (1, 32, 32, 3)


# --- generate.py -----------------------------------------------------------------------------------------------------


def make(tmp_path, export, *more, name="grid.png"):
    arguments = [export, "--prompts", *CAPTIONS, "--out", tmp_path / name, "--device", "cpu", *more]
    main([str(argument) for argument in arguments])
    return np.asarray(Image.open(tmp_path / name))


def refuse(capsys, *arguments):
    return last_error(main, arguments, capsys)


def test_the_last_grid_of_training_can_be_made_again(trained, export, tmp_path):
    prompts = ["--prompts", "a dot", "a star", "a wall", "--columns", "6", "--device", "cpu"]
    prompts += ["--guidance", "2", "--temperature", "0.8"]
    main([str(export), *prompts, "--out", str(tmp_path / "grid.png")])
    drawn = np.asarray(Image.open(Path(trained[0].output, "samples", "ba0000014.png")))
    assert (drawn == np.asarray(Image.open(tmp_path / "grid.png"))).all()


def test_pictures_depend_on_caption_and_seed_alone(export):
    pipeline = load_pipeline(export, "cpu", "fp32")
    captions = ["a", "a", "a", "b", "c"]
    together = pipeline.generate(captions, seeds=[0, 1, 2, 3, 4], batch=16)
    assert together.shape == (5, 32, 32, 3) and together.dtype == np.uint8
    assert (pipeline.generate(captions, seeds=[0, 1, 2, 3, 4], batch=2) == together).all()
    assert (pipeline.generate(["c", "a"], seeds=[4, 1], batch=1) == together[[4, 1]]).all()
    assert (together[0] != together[1]).any()
    half = load_pipeline(export, "cpu", "bf16")
    assert half.network.blocks[0].branch.out.weight.dtype == torch.bfloat16
    assert half.generate(captions, seeds=[0, 1, 2, 3, 4]).shape == together.shape


@pytest.mark.parametrize(
    ("captions", "batch", "expected"),
    [
        ("aab", 4, [("a", 2), ("b", 1)]),
        ("aabbcc", 4, [("ab", 2), ("c", 2)]),
        ("aaaaabbbbb", 2, [("a", 2), ("a", 2), ("a", 1), ("b", 2), ("b", 2), ("b", 1)]),
        ("abc", 2, [("ab", 1), ("c", 1)]),
    ],
)
def test_captions_are_batched_with_their_candidates(captions, batch, expected):
    found = [("".join(texts), each) for texts, each in jobs(list(captions), batch)]
    made = "".join(text * each for texts, each in found for text in texts)
    assert made == captions and all(len(texts) * each <= batch for texts, each in found)
    assert [each for _, each in found] == [each for _, each in expected] or found == expected


def test_completion_keeps_the_given_rows(export, tmp_path):
    pipeline = load_pipeline(export, "cpu", "fp32")
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(tmp_path / "picture.png")
    given = pipeline._given(tmp_path / "picture.png", 2)
    assert given.shape == (1, 8) and (given == pipeline._given(tmp_path / "picture.png", 4)[:, :8]).all()
    assert pipeline._given(tmp_path / "picture.png", None).shape == (1, 4)  # 15 of 32 rows are one of 4
    whole = pipeline.generate(CAPTIONS, seeds=[0, 1], picture=tmp_path / "picture.png", rows=4)
    assert (whole[0] == whole[1]).all()  # nothing is left to draw
    grid = make(tmp_path, export, "--picture", tmp_path / "picture.png", "--rows", "2")
    assert grid.shape[2] == 3


def test_the_best_candidates_are_kept(export, clip_folder, tmp_path):
    pipeline = load_pipeline(export, "cpu", "fp32")
    captions = [caption for caption in CAPTIONS for _ in range(5)]
    pictures = pipeline.generate(captions, seeds=list(range(10)))
    reranker, read = Reranker(str(clip_folder), "cpu"), []
    tokenize = reranker.tokenize
    reranker.tokenize = lambda texts: read.extend(texts) or tokenize(texts)
    scores = reranker.scores(captions, pictures, batch=3)
    assert read == CAPTIONS  # once, not once per candidate
    assert scores.shape == (10,) and (np.abs(scores) <= 1.0001).all() and len(set(scores.tolist())) > 5
    kept = best(scores, 5, 2)
    for caption in range(2):
        own = scores[5 * caption : 5 * caption + 5]
        assert scores[kept[2 * caption : 2 * caption + 2]].tolist() == sorted(own.tolist(), reverse=True)[:2]
    command = ["--candidates", "5", "--each", "2", "--rerank", clip_folder, "--columns", "4"]
    grid = make(tmp_path, export, *command)
    from data.image_grid import picture_grid

    expected = picture_grid(pictures[kept], [captions[i] for i in kept], 4)
    assert (grid == np.asarray(expected)).all()


def test_scores_are_those_of_open_clip(clip_folder):
    from data.tokenizers.clip_library import open_clip

    folder = f"local-dir:{clip_folder}"
    clip, _, preprocess = open_clip.create_model_and_transforms(folder)
    picture = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    with torch.no_grad():
        image = clip.eval().encode_image(preprocess(Image.fromarray(picture))[None], normalize=True)
        text = clip.encode_text(open_clip.get_tokenizer(folder)(["a dot"]), normalize=True)
    (score,) = Reranker(str(clip_folder), "cpu").scores(["a dot"], picture[None])
    assert score == pytest.approx((image @ text.T).item(), abs=1e-5)


def test_options_that_cannot_be(export, tmp_path, capsys, clip_folder):
    command = [export, "--prompts", "a", "--out", tmp_path / "x.png", "--device", "cpu"]
    said = refuse(capsys, *command, "--steps", "3")
    assert "--steps: an option of diffusion models; this export holds a token model" in said
    assert "--candidates: 1; give at least" in refuse(capsys, *command, "--each", "2", "--candidates", "1")
    assert "give the model that says which are best" in refuse(capsys, *command, "--candidates", "2")
    assert "--rows: give the picture" in refuse(capsys, *command, "--rows", "2")
    assert "temperature: 0.0" in refuse(capsys, *command, "--temperature", "0")
    assert "guidance: 1e+39; give a number of at most 1e+30" in refuse(capsys, *command, "--guidance", "1e39")
    assert "not readable as a picture" in refuse(capsys, *command, "--picture", export / "export.json")
    own = ["--picture", next((export.parent / "samples").iterdir()), "--rows", "5"]
    assert "--rows: 5; the grid of tokens has 4 rows" in refuse(capsys, *command, *own)
    assert "no file" in refuse(capsys, *command, "--candidates", "2", "--rerank", tmp_path / "none")
    assert "--rerank: of 1 per caption all are kept; give --cand" in refuse(capsys, *command, "--rerank", clip_folder)
    assert "--each: 0; give 1 or more" in refuse(capsys, *command, "--each", "0")


def test_an_export_without_its_parts(export, tmp_path, capsys):
    shutil.copytree(export, tmp_path / "export")
    (tmp_path / "export" / "vocabulary.json").unlink()
    error = refuse(capsys, tmp_path / "export", "--prompts", "a", "--out", tmp_path / "x.png")
    assert "no vocabulary" in error and not (tmp_path / "x.png").exists()


def test_the_published_sizes():
    from recipes.config.build import build_on_meta

    counts = {"12b": 12.3e9, "5b": 5.7e9, "2b": 2.9e9, "1b": 1.3e9}
    for name, count in counts.items():
        recipe = load_config(ROOT / "yamls" / f"dalle_{name}.yaml", [], Recipe, [])
        task = build_on_meta(recipe.model)
        assert isinstance(task, Autoregressive)
        assert sum(p.numel() for p in task.parameters()) == pytest.approx(count, rel=0.01)
        assert all(p.is_meta for p in task.parameters())
        assert task.network.layout.length == 1280 and task.sizes["width"] // task.sizes["heads"] == 64
