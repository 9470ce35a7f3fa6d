"""An evaluation from an export to its report, with real metrics on small models; interrupted and over two ranks."""

import io
import json
import math
import shutil
import tarfile
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from data.sources.folder import FolderSource
from recipes.config.build import build
from recipes.config.recipe import load_config
from recipes.evaluation import command, run
from recipes.evaluation.config import Evaluation
from recipes.evaluation.run import evaluate
from recipes.exporting.write import write_export
from recipes.models.latent_diffusion.pipeline import DiffusionPipeline
from recipes.scoring.reference import content, read_reference
from tests.recipes.errors import last_error
from tests.recipes.exporting.runs import a_run

USAGE = "recipes/evaluate.py EXPORT YAML"


@pytest.fixture(scope="module")
def export(small_recipe, tmp_path_factory):
    """A small diffusion model with new weights."""
    folder = tmp_path_factory.mktemp("evaluated")
    path, _ = a_run(small_recipe(folder / "run"), average=False)
    write_export(path, folder / "export", layout="native")
    return folder / "export"


@pytest.fixture
def write(tmp_path, drawings, clip_folder):
    """Writes the YAML of an evaluation with some changes, and gives its path."""

    def make(**changes):
        values = {
            "out": str(tmp_path / "report"),
            "reference": {"source": {"name": "tars", "urls": f"{drawings}/train/*.tar"}, "images": 12},
            "images": 7,
            "seed": 3,
            "metrics": ["fid", "kid", "precision_recall", "clip_score"],
            "extractor": {"kind": "contrastive", "path": str(clip_folder)},
            "clip": str(clip_folder),
            "sampling": {"steps": 2},
            "kid_subset_size": 5,
            "kid_subsets": 3,
            "chunk": 3,
            "device": "cpu",
        }
        (tmp_path / "evaluate.yaml").write_text(yaml.safe_dump(values | changes))
        return tmp_path / "evaluate.yaml"

    return make


def read(path, *overrides):
    return load_config(path, list(overrides), Evaluation)


def figures(result):
    return {row["label"]: row["figures"] for row in result["rows"]}


def test_a_report_with_everything(export, write, tmp_path, clip_folder, capsys, monkeypatch):
    path = write(
        blur=[0, 2],
        sweeps={"guidance": [1.0, 6.0], "sampler": ["ddim", None]},
        rerank={"by": str(clip_folder), "pools": [1, 3]},
    )
    command.main([str(export), str(path)], USAGE)
    said = capsys.readouterr().out
    assert f"rerank.by: {clip_folder} is also the model of clip_score" in said
    result = json.loads((tmp_path / "report" / "report.json").read_text())
    found = figures(result)
    swept = ["guidance 1.0", "guidance 6.0", "sampler ddim", "sampler None"]
    assert list(found) == ["blur 0", "blur 2", *swept, "pool 1", "pool 3"]
    assert all(np.isfinite(list(row.values())).all() for row in found.values())
    assert found["sampler None"] == found["blur 0"] != found["guidance 6.0"]
    assert found["pool 1"] == pytest.approx(found["blur 0"], rel=1e-2)  # the same images, but drawn in other batches
    assert found["pool 3"]["clip_score"] >= found["pool 1"]["clip_score"]
    assert found["blur 2"]["fid"] != found["blur 0"]["fid"]
    assert (tmp_path / "report" / "report.md").read_text() in said
    assert {file.name for file in (tmp_path / "report").glob("*.png")} == {"blur.png", "guidance.png", "pool.png"}
    # What the figures depend on.
    assert (
        result["images"] == 7 and result["seeds"] == "3 to 9" and result["reference"].startswith("12 pictures of tars")
    )
    assert str(clip_folder) in result["extractor"] and len(result["extractor hash"]) == 64
    assert (
        result["reranked by"] == f"{clip_folder}, sha256 {result['extractor hash']}" and result["precision"] == "fp32"
    )
    assert result["candidates"] == "up to 3 per caption, with the seeds 3 to 23"  # of 7 captions
    samples = read_reference(build(read(path).reference.source), 12, 3)
    assert result["reference content"] == content(samples) and "bicubic" in result["resize of the reference"]

    # Nothing is drawn again, and the reference is not read through the network again.
    def forbidden(*_, **__):
        raise AssertionError("it was done before")

    monkeypatch.setattr(DiffusionPipeline, "generate", forbidden)
    monkeypatch.setattr("recipes.scoring.reference.decoded", forbidden)
    assert figures(evaluate(export, read(path))) == found


def test_samples_of_the_reference_without_a_caption_are_left_out_and_counted(tmp_path, capsys):
    """For the empty caption an image was drawn, and its picture was said not to decode."""
    for name, caption in {"a": b"a dot", "b": b" \n", "c": b"caf\xe9", "d": None}.items():
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
        if caption is not None:
            (tmp_path / f"{name}.txt").write_bytes(caption)
    source = FolderSource(path=str(tmp_path))
    assert [sample.key for sample in read_reference(source, None, 0)] == ["a"]
    said = "reference: 3 of 4 samples are left out: caption_not_utf8 1, empty_caption 1, missing_caption 1"
    assert said in capsys.readouterr().out
    assert [sample.key for sample in read_reference(source, None, 0, pictures=False)] == ["a"]
    assert not capsys.readouterr().out


@pytest.mark.parametrize("changed", ["scheduler", "null_text"])
def test_images_are_drawn_again_by_another_scheduler_or_null_caption(export, write, tmp_path, changed):
    """The figures were those of the images that were drawn before."""
    copy = shutil.copytree(export, tmp_path / "export")
    before = figures(evaluate(copy, read(write())))
    if changed == "scheduler":
        file = copy / "scheduler" / "scheduler_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"beta_end": 0.02}))
    else:
        np.save(copy / "null_text.npy", np.load(copy / "null_text.npy") + 1)
    after = figures(evaluate(copy, read(write())))
    assert after == figures(evaluate(copy, read(write(out=str(tmp_path / "other"))))) != before


def test_a_contrastive_model_with_another_config_is_another_one(export, write, tmp_path, clip_folder):
    """Its weights are the same, and its features are not: neither those of images nor those of the reference."""
    model = shutil.copytree(clip_folder, tmp_path / "clip")
    same = {"extractor": {"kind": "contrastive", "path": str(model)}, "clip": str(model)}
    before = figures(evaluate(export, read(write(**same))))
    file = model / "open_clip_config.json"
    config = json.loads(file.read_text())
    config["preprocess_cfg"] = config.get("preprocess_cfg", {}) | {"mean": [0.1, 0.9, 0.4]}
    file.write_text(json.dumps(config))
    after = figures(evaluate(export, read(write(**same))))
    assert after == figures(evaluate(export, read(write(**same, out=str(tmp_path / "other"))))) != before


@pytest.mark.parametrize("changed", ["precision", "extractor", "clip", "rerank"])
def test_nothing_is_kept_of_an_evaluation_by_other_means(export, write, tmp_path, clip_folder, changed):
    """In the same folder: all chunks are drawn again, and figures are those of a new folder."""
    model = shutil.copytree(clip_folder, tmp_path / "clip")
    config = json.loads((model / "open_clip_config.json").read_text())
    config["preprocess_cfg"] = config.get("preprocess_cfg", {}) | {"mean": [0.1, 0.9, 0.4]}
    (model / "open_clip_config.json").write_text(json.dumps(config))
    options = {"rerank": {"by": str(clip_folder), "pools": [1, 4]}} if changed == "rerank" else {}
    change = {
        "precision": {"precision": "bf16"},
        "extractor": {"extractor": {"kind": "contrastive", "path": str(model)}},
        "clip": {"clip": str(model)},
        "rerank": {"rerank": {"by": str(model), "pools": [1, 4]}},
    }[changed]
    evaluate(export, read(write(**options)))
    chunks = len(list((tmp_path / "report" / "work").iterdir()))
    after = figures(evaluate(export, read(write(**change))))
    assert len(list((tmp_path / "report" / "work").iterdir())) == 2 * chunks > 0
    assert after == figures(evaluate(export, read(write(**change, out=str(tmp_path / "other")))))


def test_any_number_of_ranks_and_any_batch(export, write, tmp_path, monkeypatch):
    alone = figures(evaluate(export, read(write())))
    path = write(out=str(tmp_path / "two"), batch=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    held, threads, draw, score = [], [], run.captions_of, run.figures

    def captions_of(samples, *others):
        held.append(sum(len(sample.image) for sample in samples))
        return draw(samples, *others)

    def figures_of(*arguments):
        threads.append(torch.get_num_threads())
        return score(*arguments)

    monkeypatch.setattr(run, "captions_of", captions_of)
    monkeypatch.setattr(run, "figures", figures_of)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(3))
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as launchers do
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        result = evaluate(export, read(path))
        assert (result is None) == (rank == "1")
        assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
    assert held[0] == 0 < held[1]  # only the first rank looks at the pictures
    assert threads == [3]  # and it computes the figures alone
    for label, row in figures(result).items():
        for name, value in row.items():
            # Another batch may round a pixel to the next level.
            assert value == pytest.approx(alone[label][name], rel=0.02, abs=1e-3), name


def test_a_reference_of_the_size_of_the_images(export, write, tmp_path):
    """A resolution that is swept has the figures of an evaluation at that resolution."""
    swept = figures(evaluate(export, read(write(sweeps={"resolution": [16, 32]}))))
    other = write(out=str(tmp_path / "other"), sampling={"steps": 2, "resolution": 32})
    assert swept["resolution 32"] == figures(evaluate(export, read(other)))["blur 0"]
    assert swept["resolution 16"] == swept["blur 0"] != swept["resolution 32"]


def test_a_reference_without_images_that_the_training_set_has(write, tmp_path, drawings):
    inner = {"name": "tars", "urls": f"{drawings}/train/*.tar"}
    source = build(read(write(reference={"source": inner})).reference.source)
    shard, samples = source.shards()[0], read_reference(source, None, 0)
    places = [{"shard": shard, "key": sample.key} for sample in source.read(shard)][:2]
    pairs = [{"similarity": 0.99, "image": place, "other": place} for place in places]
    (tmp_path / "shared.json").write_text(json.dumps({"threshold": 0.9, "pairs": pairs}))
    unshared = {"name": "unshared", "source": inner, "shared": str(tmp_path / "shared.json")}
    left = read_reference(build(read(write(reference={"source": unshared})).reference.source), None, 0)
    assert len(left) == len(samples) - 2 and content(left) == content(samples[2:]) != content(samples)


def refuse(export, path, capsys):
    return last_error(partial(command.main, usage=USAGE), [export, path], capsys)


def test_options_that_are_true_or_false(write, tmp_path, capsys):
    """--cuda-graph and --no-cuda-graph of models of tokens. A text would count as true."""
    (tmp_path / "export.json").write_text(json.dumps({"family": "autoregressive", "network": "transformer"}))
    for change in ({"sampling": {"cuda_graph": False}}, {"sampling": {}, "sweeps": {"cuda_graph": [True, None]}}):
        command.check_options(read(write(**change)), tmp_path)
    for wrong in ("never", 0):
        expected = f"sampling.cuda_graph: {wrong!r}; give true or false"
        assert expected in refuse(tmp_path, write(sampling={"cuda_graph": wrong}), capsys)


def test_what_cannot_be_evaluated(export, write, tmp_path, capsys):
    assert "no such export" in refuse(tmp_path / "none", write(), capsys)
    assert "no exported run" in refuse(tmp_path, write(), capsys)
    assert "kid needs 50 generated pictures, and there are 7" in refuse(export, write(kid_subset_size=50), capsys)
    assert "images: 13 wanted, and the reference has 12 captions" in refuse(export, write(images=13), capsys)
    assert "sampling.temperature: no option of diffusion models" in refuse(
        export, write(sampling={"temperature": 1.0}), capsys
    )
    for steps in ("ten", 2.5, True):
        assert f"sampling.steps: {steps!r}; give an integer" in refuse(export, write(sampling={"steps": steps}), capsys)
    assert "sweeps.guidance: 'x'; give a number" in refuse(export, write(sweeps={"guidance": [1, "x"]}), capsys)
    assert "sampling.sampler: {a: 1}; give a text" in refuse(export, write(sampling={"sampler": {"a": 1}}), capsys)
    assert "sampling.guidance: nan; give a number of" in refuse(export, write(sampling={"guidance": math.nan}), capsys)
    assert "sweeps.sampler: `x` is unknown to" in refuse(export, write(sweeps={"sampler": ["x"]}), capsys)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.png").touch()
    (tmp_path / "empty" / "t.csv").write_text("file,text\n")
    nothing = {"source": {"name": "folder", "path": str(tmp_path / "empty"), "captions": "t.csv"}}
    assert "reference" in refuse(export, write(reference=nothing), capsys)
    assert "metrics" in refuse(export, write(metrics=["fidd"]), capsys)
    missing = {"kind": "inception", "path": str(tmp_path / "none.pth")}
    assert "extractor.path: no file" in refuse(export, write(extractor=missing), capsys)
    assert not list((tmp_path / "report").glob("*.json"))


def test_too_few_pictures_that_decode(export, write, drawings, tmp_path, capsys, monkeypatch):
    """They are missed before anything is drawn."""
    with tarfile.open(drawings / "train" / "00000.tar") as whole, tarfile.open(tmp_path / "cut.tar", "w") as cut:
        for number, member in enumerate(whole):
            content = whole.extractfile(member).read()
            member.size = len(content := content[:40] if number < 2 and member.name.endswith("png") else content)
            cut.addfile(member, io.BytesIO(content))
        samples = sum(name.endswith("png") for name in whole.getnames())
    monkeypatch.setattr(DiffusionPipeline, "generate", lambda *_, **__: pytest.fail("images are drawn"))
    source = {"name": "tars", "urls": str(tmp_path / "cut.tar")}
    path = write(reference={"source": source}, images=None, kid_subset_size=samples)
    error = refuse(export, path, capsys)
    assert f"kid needs {samples} reference pictures, and there are {samples - 1}" in error


def test_a_dry_run_counts(export, write, capsys, clip_folder):
    path = write(sweeps={"guidance": [1.0, 2.0]}, rerank={"by": str(clip_folder), "pools": [1, 8]})
    command.main([str(export), str(path), "--dry-run"], USAGE)
    assert "11 images per caption" in capsys.readouterr().out


@pytest.mark.slow
def test_inception_with_weights_from_a_file(tmp_path):
    import torch
    from safetensors.torch import save_file
    from torch_fidelity import feature_extractor_inceptionv3 as theirs

    from recipes.scoring.extractors import inception

    class New(theirs.FeatureExtractorInceptionV3):
        def load_state_dict(self, *_, **__):
            pass

    torch.manual_seed(0)
    torch.save({}, tmp_path / "none.pth")
    known = New("inception-v3-compat", ["2048", "logits_unbiased"], str(tmp_path / "none.pth"))
    save_file(known.state_dict(), tmp_path / "weights.safetensors")
    extractor = inception(str(tmp_path / "weights.safetensors"), "cpu")
    pictures = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    found = extractor(pictures)
    features, logits = known(torch.from_numpy(pictures).permute(0, 3, 1, 2).contiguous())
    assert found["features"].shape == (2, 2048) and found["logits"].shape == (2, 1008)
    np.testing.assert_allclose(found["features"], features.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["logits"], logits.numpy(), rtol=1e-5, atol=1e-6)
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="does not fit InceptionV3"):
        inception(str(tmp_path / "other.safetensors"), "cpu")
