"""What a dry run says: the model's size, the arithmetic of batches, and what would be written."""

import re
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from data.cost import Epoch, Plan, size_text
from data.encoded.manifest import Manifest
from recipes.config.build import build, build_on_meta
from recipes.config.components import COMPONENTS
from recipes.config.recipe import FSDP, Recipe, Training, load_config
from recipes.config.schema import Checker
from recipes.planning.costs import cost_of
from recipes.planning.devices import Devices
from recipes.planning.dry_run import describe_run, survey
from recipes.planning.length import Length, length_of
from recipes.training.clock import Clock, Interval, parse_duration

ROOT = Path(__file__).resolve().parents[3]
YAMLS = sorted(path.name for path in (ROOT / "yamls").glob("*.yaml") if "\nmodel:" in path.read_text())
SMALL = ["model.denoiser.channels=[32,32]", "model.denoiser.attention=[true,false]", "model.denoiser.heads=[1,1]"]
FURTHER = ("optimizer", "algorithms.", "start", "within ")  # lines that only some recipes have
SHORT = [*SMALL, "schedule.warmup=0ba"]  # that of sd2_base is longer than short runs, which their length says


@pytest.fixture(autouse=True)
def elsewhere(built_once, tmp_path, monkeypatch):
    """Dry runs in an empty folder, on one device."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def dry(yaml, *overrides):
    """The lines that a dry run prints."""
    missing = []
    recipe = load_config(ROOT / "yamls" / yaml, list(overrides), Recipe, missing)
    return describe_run(recipe, missing).splitlines()


def write_manifest(folder, samples=100, scaling_factor=0.18215):
    """A manifest as precompute/encode.py writes it for Stable Diffusion 2."""
    folder.mkdir(parents=True)
    common = {"weights_hash": "x", "precision": "fp16"}
    image = common | {"component": {"name": "kl_vae", "path": "a/vae"}, "id": "v", "channels": 4, "downsample": 8}
    text = common | {"component": {"name": "hf_clip_text", "path": "a/b"}, "id": "t", "layer": "penultimate"}
    Manifest(
        image_encoder=image | {"scaling_factor": scaling_factor, "shift_factor": 0.0},
        text_encoder=text | {"tokenizer": "t", "length": 77, "width": 1024},
        resolutions=[256, 512],
        crop="center",
        upscale=False,
        seed=17,
        filter={},
        dtype="float16",
        normalisation="",
        caption_policy="",
        columns={},
        samples=samples,
        rejected={},
        reencoded=0,
        upscaled={},
        shards=1,
        bytes=0,
        latents={},
        request={},
        software={},
    ).write(folder)


def test_stable_diffusion_2(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert dry("sd2_base.yaml") == [
        "model: latent_diffusion, 865,910,724 parameters, 865,910,724 of them trained",
        "memory: 13.9 GB on each device for weights, gradients, two moments in fp32, and 3.5 GB for the buckets in "
        "which gradients are averaged; activations come on top",
        "batch: 2,048 samples per step over 8 devices (WORLD_SIZE), 256 on each, in 4 microbatches of 64",
        "between 8 replicas: each device sends 6.1 GB per step, all in 32-bit",
        "run: 550,000 steps, 1,126,400,000 samples",
        "validation val: 55 times, every 10000ba",
        "checkpoints: 55 times, every 10000ba, and after 60 minutes without one, about 10.4 GB each, 3 kept (31.2 GB), "
        "in runs/sd2_base/checkpoints",
        "callbacks.sample_grid: 55 times, every 10000ba, a grid of 8 images, in runs/sd2_base/samples",
        "callbacks.export: 55 times, every 10000ba, 3.5 GB of weights, in runs/sd2_base/export",
        f"missing: data.streams.train.path: `runs/sd2/latents_256/train` does not exist (looked in {tmp_path})",
        f"missing: evals.val.streams.val.path: `runs/sd2/latents_256/val` does not exist (looked in {tmp_path})",
    ]
    assert list(tmp_path.iterdir()) == [], "a dry run writes nothing"


def test_buckets_of_ddp(monkeypatch):
    """Gradients of a single microbatch lie in them; those of several are summed elsewhere first."""
    for world, microbatch, buckets in ((8, 256, False), (8, 128, True), (8, "auto", True), (1, 16, False)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        lines = dry("sd2_base.yaml", f"training.microbatch={microbatch}")
        assert ("3.5 GB for the buckets" in lines[1]) == buckets


def test_averages_by_block(monkeypatch):
    """Those in 16 bits lie beside the gradients, however many microbatches there are."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    lever = "algorithms.x={name: block_all_reduce, wire: %s}"
    assert dry("sd2_base.yaml", lever % "fp32") == dry("sd2_base.yaml")
    for microbatch in (64, 256):
        lines = dry("sd2_base.yaml", lever % "bf16", f"training.microbatch={microbatch}")
        assert "buckets" not in lines[1]
        assert "algorithms.x: 1.7 GB more on each device for the gradients that are sent" in lines
        assert "between 8 replicas: each device sends 3.0 GB per step, all in bf16" in lines
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "algorithms.x: not used with one process" in dry("sd2_base.yaml", lever % "bf16")


EMA = "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9999, last: 50000ba%s}"
SHARDED = "training.fsdp={strategy: %s, wrap: %s, replicas: %d}"


def test_the_average(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    lines = dry("sd2_base.yaml", EMA % "", "training.fsdp=null")
    assert "algorithms.scheduled_ema: 3.5 GB more on each device for the average, in the last 50000ba" in lines
    assert any("about 10.4 GB each, 13.9 GB with the average, 3 kept (41.6 GB)" in line for line in lines)
    assert any("3.5 GB of weights, 6.9 GB with the averaged ones, in" in line for line in lines)
    host = (
        "algorithms.scheduled_ema: 6.9 GB of host memory for each device for the average and a copy, from the start on"
    )
    assert host in dry(
        "sd2_base.yaml",
        "training.fsdp=null",
        "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.99, every: 25, device: cpu}",
    )
    sharded = dry("sd2_base.yaml", EMA % "", SHARDED % ("SHARD_GRAD_OP", "blocks", 1))
    assert "algorithms.scheduled_ema: 433.0 MB more on each device for the average, in the last 50000ba" in sharded
    # An autoencoder's export has the average in the place of the weights.
    average = "algorithms.scheduled_ema={name: scheduled_ema, decay: 0.9, start: 0.5dur}"
    lines = dry("openmoji_vae.yaml", average, "training.global_batch=8")
    assert any(line.startswith("algorithms.scheduled_ema: ") and line.endswith(", from 0.5dur on") for line in lines)
    assert not any("with the averaged ones" in line for line in lines)


@pytest.mark.parametrize(
    ("strategy", "wrap", "replicas", "text"),
    [  # 865,910,724 parameters of 16 bytes, divided; gathered ones of 2
        ("SHARD_GRAD_OP", "blocks", 1, "1.7 GB on each device for weights, gradients, two moments in fp32, 1/8 of all, "
         "and 1.7 GB for gathered weights in bf16 (fp32 outside of blocks)"),
        ("FULL_SHARD", "model", 2, "3.5 GB on each device for weights, gradients, two moments in fp32, 1/4 of all, "
         "and 1.7 GB for gathered weights in bf16"),
    ],
)  # fmt: skip
def test_sharded(monkeypatch, strategy, wrap, replicas, text):
    monkeypatch.setenv("WORLD_SIZE", "8")
    lines = dry("sd2_base.yaml", SHARDED % (strategy, wrap, replicas))
    assert lines[1] == f"memory: {text}; activations come on top"


def test_two_blocks_are_gathered_at_once_beside_the_rest(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    task = build_on_meta(load_config(ROOT / "yamls" / "sd2_base.yaml", [], Recipe, []).model)
    norms = {id(p) for m in task.modules() if isinstance(m, nn.GroupNorm | nn.LayerNorm) for p in m.parameters()}
    blocks = [sum(p.numel() for p in block.parameters() if id(p) not in norms) for block in task.blocks()]
    count = sum(p.numel() for p in task.parameters())
    assert 2 * max(blocks) < sum(blocks) < count
    lines = dry("sd2_base.yaml", SHARDED % ("FULL_SHARD", "blocks", 1))
    (line,) = [line for line in lines if line.startswith("memory")]
    assert f"{size_text(2 * 2 * max(blocks) + 4 * (count - sum(blocks)))} for gathered weights in bf16" in line
    with pytest.raises(ValueError, match="training.fsdp.replicas: 3 does not divide 8 devices"):
        dry("sd2_base.yaml", SHARDED % ("FULL_SHARD", "blocks", 3))


@pytest.mark.parametrize(("name", "width", "rank", "saved"), [("12b", 3968, 896, "86%"), ("5b", 2688, 640, "85%"),
                                                              ("2b", 1920, 512, "83%")])  # fmt: skip
def test_low_rank_traffic_is_that_of_the_published_table(monkeypatch, name, width, rank, saved):
    """Ramesh et al. 2021, tables 1 and 2: of 12 d^2 values per layer, r (2 + m) / (2 d m) are sent."""
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    lines = dry(f"dalle_{name}.yaml")
    parameters = int(re.search(r"([\d,]+) parameters", lines[0])[1].replace(",", ""))
    start = f"start: {size_text(4 * parameters)} of host memory on the first machine, for the whole model until it has"
    assert f"{start} been divided" in lines
    (memory,) = [line for line in lines if line.startswith("algorithms.powersgd: ")]
    # Per layer and device: Q and Q' of 6 matrices of `width` columns, and P of 4 of width / 8 rows and 2 of width / 2.
    factors = 64 * 4 * (rank / 8) * width * (2 * 6 + 4 / 8 + 2 / 2)
    assert f"{size_text(2 * 64 * 12 * width**2 / 8 + factors)} more on each device" in memory
    (line,) = [line for line in lines if line.startswith("between ")]
    plain = 2 * 7 / 8 * 2 * 64 * 12 * width**2 / 8  # a ring of 8 machines, 16-bit values, 64 layers, an eighth of each
    sent = plain * 5 * rank / (8 * width)
    assert f"{size_text(sent)} for the blocks' matrices (uncompressed {size_text(plain)} in" in line
    assert f"of which {saved} are saved" in line
    others = float(re.search(r"and ([\d.]+) MB for the rest", line)[1]) * 1e6
    lines = dry(f"dalle_{name}.yaml", "algorithms.powersgd=null")
    (line,) = [line for line in lines if line.startswith("between ")]
    sent = float(re.search(r"sends ([\d.]+) GB per step, all in 32-bit", line)[1]) * 1e9
    assert sent == pytest.approx(2 * plain + others, abs=6e7)
    monkeypatch.setenv("WORLD_SIZE", "8")
    alone = "algorithms.powersgd: there is only one replica of the model"
    assert any(line.startswith(alone) for line in dry(f"dalle_{name}.yaml"))


def test_16_bit_weights_take_what_the_paper_says():
    """Ramesh et al. 2021, section 2.5: the 12-billion-parameter model is "about 24 GB" in 16 bits."""
    overrides = ["algorithms.powersgd=null", "training.fsdp=null", "training.grad_clip=4.0"]
    low = 64 * 12 * 3968**2
    lines = dry("dalle_12b.yaml", *overrides, "algorithms.resblock_grad_scaling.weights=fp16")
    (line,) = [line for line in lines if line.startswith("memory: ")]
    assert "(in 16 bits for the blocks' matrices, 24.2 GB each)" in line and size_text(2 * low) == "24.2 GB"
    (plain,) = [line for line in dry("dalle_12b.yaml", *overrides) if line.startswith("memory: ")]
    sizes = [float(re.match(r"memory: ([\d.]+) GB", text)[1]) for text in (line, plain)]
    assert sizes[1] - sizes[0] == pytest.approx(2 * 2 * low / 1e9, abs=0.1)


def test_what_sharding_sends(monkeypatch):
    """Rings: (m - 1) / m of the bf16 weights and of the 32-bit gradients, as often as they are sent."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    weights, gradients = (3 / 4 * size * 865_910_724 / 1e9 for size in (2, 4))
    task = build_on_meta(load_config(ROOT / "yamls" / "sd2_base.yaml", [], Recipe, []).model)
    blocks = 3 / 4 * 2 * sum(p.numel() for block in task.blocks() for p in block.parameters()) / 1e9
    # What lies outside of the blocks is gathered once per pass by torch 2.7, and twice by torch 2.11.
    again = 2 * (weights + (blocks if torch.__version__ < (2, 8) else weights))
    for strategy, sync, gathers, sums in (
        ("SHARD_GRAD_OP", "microbatch", 2 * weights, 2), ("SHARD_GRAD_OP", "batch", weights, 1),
        ("FULL_SHARD", "microbatch", again, 2), ("FULL_SHARD", "batch", again, 1),
    ):  # fmt: skip
        sharded = SHARDED % (strategy, "blocks", 2)
        lines = dry("sd2_base.yaml", sharded, f"training.fsdp.sync={sync}", "training.microbatch=128")
        sent = f"{gathers:.1f} GB of weights and {sums * gradients:.1f} GB of gradients per step"
        assert f"within 4 shards: each device sends {sent}" in lines
        assert "between 2 replicas: each device sends 865.9 MB per step, all in 32-bit" in lines
        assert ("3.5 GB for gradients of all in fp32" in lines[1]) == (sync == "batch")
    (line,) = [line for line in dry("sd2_base.yaml", "training.fsdp=null") if line.startswith("between ")]
    assert line == "between 8 replicas: each device sends 6.1 GB per step, all in 32-bit"


def test_16_bit_moments_take_half_as_does_one_moment():
    whole, low, one = (
        next(
            line for line in dry("dalle_1b.yaml", f"optimizer={{name: {name}, lr: 1e-3}}") if line.startswith("memory")
        )
        for name in ("adamw", "adam16", "muon, adamw_lr: 1e-3")
    )
    matrices = 24 * 12 * 2048**2
    assert whole.startswith("memory: 21.0 GB on each device for weights, gradients, two moments in fp32")
    half = f"memory: {(16 * 1_310_445_568 - 4 * matrices) / 1e9:.1f} GB on each device"
    assert low.startswith(half) and one.startswith(half) and "one moment in fp32 of matrices" in one


def test_no_memory_is_taken_for_weights():
    recipe = load_config(ROOT / "yamls" / "sd2_base.yaml", [], Recipe, [])
    assert all(parameter.is_meta for parameter in build_on_meta(recipe.model).parameters())


@pytest.mark.parametrize("yaml", [name for name in YAMLS if name != "sd2_base.yaml"])
def test_every_shipped_recipe_can_be_tried(yaml):
    lines = dry(yaml)
    assert [line.split(":")[0] for line in lines if not line.startswith(FURTHER)][:4] == [
        "model",
        "memory",
        "batch",
        "run",
    ]
    assert any(line.startswith("checkpoints: ") for line in lines)


def test_epochs_are_known_from_a_manifest(tmp_path):
    write_manifest(tmp_path / "runs/sd2/latents_256/train", samples=1000)
    write_manifest(tmp_path / "runs/sd2/latents_256/val", samples=50)
    lines = dry("sd2_base.yaml", *SHORT, "training.duration=3ep", "training.global_batch=300", "checkpoints.every=1ep")
    assert "run: 9 steps, 2,700 samples, 3.00 epochs of 3 steps" in lines
    assert "validation val: 1 time, every 10000ba, over 50 samples" in lines
    assert any(line.startswith("checkpoints: 3 times, every 1ep, ") for line in lines)
    assert not [line for line in lines if line.startswith("missing")]
    lines = dry(
        "sd2_base.yaml", *SHORT, "data.streams.train.repeat=0.5", "data.drop_last=false", "training.duration=1ep"
    )
    assert "run: 1 step, 500 samples, 1.00 epochs of 1 step" in lines
    with pytest.raises(ValueError, match="training.global_batch: 2048 is more than the 1000 samples of an epoch"):
        dry("sd2_base.yaml", *SMALL)


def test_tokens_are_held_against_the_model(token_sets, tmp_path):
    checker = Checker(COMPONENTS)

    def samples(requirements, **changes):
        streams = {"a": {"name": "local", "path": str(token_sets / "train"), "repeat": 2.0}}
        values = {
            "name": "tokens",
            "streams": streams,
            "resolution": 32,
            "vocabulary": str(token_sets / "vocabulary.json"),
        }
        component = checker.component("data", {**values, **changes}, "data")
        assert not checker.errors
        task = SimpleNamespace(requirements=lambda: requirements)
        plan = Plan(task=task, parameters=0, trained=0, replicas=1, shards=1, output="", averaged=False, build=build)
        return cost_of(component, plan).epoch.samples

    needs = {"text_positions": 256, "text_vocabulary": 280, "codes": 32, "side": 4}
    assert samples(needs) == 80
    sets = {label: {"name": "local", "path": str(token_sets / label), "repeat": 0.3} for label in ("train", "val")}
    assert samples(needs, streams=sets | {"train": sets["train"] | {"repeat": 0.51}}) == 20 + 1  # of 40 and 6
    assert samples(needs | {"text_vocabulary": 16384}, vocabulary=str(tmp_path / "none.json")) == 80  # not made yet
    for name, wrong in (("text_positions", 64), ("text_vocabulary", 16384), ("codes", 8192), ("side", 32)):
        with pytest.raises(ValueError, match=f"{name} is .*, the recipe expects {wrong}"):
            samples(needs | {name: wrong})


def test_epochs_without_a_manifest():
    lines = dry("sd2_base.yaml", *SMALL, "training.duration=2ep", "checkpoints.keep=-1")
    assert "run: 2ep; the number of steps depends on data that is not on this machine or has no manifest" in lines
    assert any(line.startswith("checkpoints: every 10000ba, and after 60 minutes without one, ") for line in lines)
    lines = dry("sd2_base.yaml", *SHORT, "training.duration=2ep", "data.epoch_size=4096")
    assert "run: 4 steps, 8,192 samples, 2.00 epochs of 2 steps" in lines


FID = "callbacks.fid={name: fid, extractor: contrastive, path: runs/no/export, reference: {name: %s}}"


def test_inputs_that_only_components_can_look_for(tmp_path):
    """What is not here is a line, as for a path that a key names; what is here must be what it should."""
    lines = dry("openmoji_diffusion.yaml", FID % "tars, urls: no.tar")
    tars = "callbacks.fid.reference.urls: no file no.tar: check the path and the brace range"
    assert f"missing: {tars}" in lines
    assert any(line.startswith("missing: callbacks.fid.path: `runs/no/export` does not exist") for line in lines)
    lines = dry("openmoji_diffusion.yaml", FID % "folder, path: no")
    assert [line.split("`")[0] for line in lines if ".fid.ref" in line] == ["missing: callbacks.fid.reference.path: "]
    (tmp_path / "no").mkdir()
    (tmp_path / "no" / "a.png").touch()
    (tmp_path / "no" / "b.txt").touch()
    with pytest.raises(ValueError, match="^callbacks.fid.reference.captions: no image in no has a .txt file"):
        dry("openmoji_diffusion.yaml", FID % "folder, path: no")
    assert "missing: data.source.urls: no file " in "\n".join(dry("openmoji_vae.yaml"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.denoiser.patch_size=3", "grid_multiple is 8, the recipe expects a multiple of 3; give the deno"),
        ("data.text=txt", "train: no column `txt`; the set has key, caption, "),
    ],
)
def test_what_a_manifest_says_of_the_denoiser_and_the_text(quick_recipe, tmp_path, override, message):
    with pytest.raises(ValueError, match=message):
        survey(quick_recipe(tmp_path, override))


def test_a_manifest_that_does_not_fit_is_refused(tmp_path):
    write_manifest(tmp_path / "runs/sd2/latents_256/train", samples=5000, scaling_factor=1.0)
    with pytest.raises(ValueError, match="scaling_factor is 1.0, the recipe expects 0.18215"):
        dry("sd2_base.yaml", *SMALL)


def test_a_batch_that_does_not_divide(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="training.global_batch: 2048 does not divide over 3 devices"):
        dry("sd2_base.yaml", *SMALL)


@pytest.mark.parametrize(
    ("world", "machine", "message"),
    [
        ("4", "8", "^LOCAL_WORLD_SIZE: 8 devices of each machine are more than all 4"),
        ("0", "1", "^WORLD_SIZE: '0' is not a number of devices"),
        ("x", "1", "^WORLD_SIZE: 'x' is not a number of devices"),
        ("16", "-8", "^LOCAL_WORLD_SIZE: '-8' is not a number of devices"),
        ("20", "8", "^training.fsdp.replicas: machines needs whole machines; 20 devices .* not a multiple of 8"),
    ],
)
def test_devices_that_no_launcher_would_start(monkeypatch, world, machine, message):
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", machine)
    with pytest.raises(ValueError, match=message):
        Devices.of_environment(Training(duration="1ba", global_batch=240, fsdp=FSDP(replicas="machines")))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["training.microbatch=null"], "32 on each, in 1 microbatch of 32"),
        (["training.microbatch=auto"], "32 on each, in the largest microbatches that fit into memory"),
        (["training.microbatch=20"], "32 on each, in 2 microbatches of 20, the last of 12"),
        (["training.microbatch=64"], "32 on each, in 1 microbatch of 32"),
    ],
)
def test_batches(overrides, text):
    assert dry("openmoji_text.yaml", "training.global_batch=32", *overrides)[2].endswith(text)


def test_nothing_saved():
    assert "checkpoints: none" in dry("openmoji_vae.yaml", "checkpoints.save=false")
    assert not any("reconstructions" in line for line in dry("openmoji_vae.yaml", "callbacks.reconstructions=null"))


@pytest.mark.parametrize(
    ("every", "times"),
    [
        (None, 1),
        ("100ba", 1),
        ("1000ba", 1),
        ("50ba", 2),
        ("30ba", 4),
        ("1ba", 100),
        ("0.1dur", 10),
        ("1ep", 4),
        ("80sp", 10),
        ("1sp", 100),
    ],
)
def test_how_often_something_is_due(every, times):
    assert Length(steps=100, epoch_steps=25, batch=8).times(every) == times


def test_lengths_that_are_not_whole_numbers():
    """0.02 * 207 is slightly less than 4.14, and the last batch of 100 samples has fewer than 8."""
    assert Length(steps=207, epoch_steps=None, batch=8).times("0.02dur") == 50
    training = SimpleNamespace(global_batch=8, duration="100sp")
    assert length_of(SimpleNamespace(training=training), Epoch(None)).steps == 13


@pytest.mark.parametrize("duration", ["3ep", "52ba", "309sp", "310sp", "100sp"])
def test_the_last_batch_of_an_epoch_may_have_fewer_samples(duration):
    """An epoch of 103 samples has 17 batches of 6, and one of a single sample."""
    training = SimpleNamespace(global_batch=6, duration=duration)
    found = length_of(SimpleNamespace(training=training), Epoch(103, incomplete_batch=True))
    sizes = cycle([6] * 17 + [1])
    steps = samples = 0
    number, unit = parse_duration(duration)
    while {"ep": steps / 18, "ba": steps, "sp": samples}[unit] < number:
        steps, samples = steps + 1, samples + next(sizes)
    assert (found.steps, found.samples) == (steps, samples)
    whole = length_of(SimpleNamespace(training=training), Epoch(103))
    assert whole.samples == 6 * whole.steps


def test_all_ranks_have_equally_many_samples_of_an_epoch(tmp_path, monkeypatch):
    """Of 27 samples each of two ranks has 14, which are two batches of 7."""
    write_manifest(tmp_path / "runs/sd2/latents_256/train", samples=27)
    monkeypatch.setenv("WORLD_SIZE", "2")
    lines = dry("sd2_base.yaml", *SHORT, "evals.val=null", "training.duration=3ep", "training.global_batch=14")
    assert "run: 6 steps, 84 samples, 3.00 epochs of 2 steps" in lines
    recipe = SimpleNamespace(training=SimpleNamespace(global_batch=14, duration="3ep"))
    for incomplete, alone in ((False, (3, 42)), (True, (6, 81))):
        found = length_of(recipe, Epoch(27, incomplete), ranks=2)
        assert (found.epoch_steps, found.steps, found.samples) == (2, 6, 84)
        found = length_of(recipe, Epoch(27, incomplete))
        assert (found.steps, found.samples) == alone


@pytest.mark.parametrize("batch", [48, 75, 600])
def test_samples_that_are_whole_batches(batch):
    assert [Length(None, None, batch).steps_in(f"{steps * batch}sp") for steps in range(1, 300)] == [*range(1, 300)]


def test_the_host_memory_of_exports_and_full_checkpoints(monkeypatch):
    """Of a model that is divided; `benchmarks/checkpoint_memory.py` measures it."""
    monkeypatch.setenv("WORLD_SIZE", "64")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    written = "callbacks.export: %s of host memory on the first machine while the weights are written"
    for kind in ("sharded", "full"):
        lines = dry("dalle_12b.yaml", f"training.fsdp.checkpoints={kind}")
        full = "checkpoints: 196.7 GB of host memory on the first machine for each, in which it is gathered"
        assert (full in lines) == (kind == "full")
        # Pieces of 256 MiB, and the last tensor of one, such as the unembedding of 24,576 codes and tokens.
        at_once = (256 * 2**20 + 4 * 24576 * 3968) / 1e6
        assert written % f"{at_once:.1f} MB" in lines
    assert written % "3.5 GB" in dry("sd2_base.yaml", "training.fsdp={}")
    assert written % "6.9 GB" in dry("sd2_base.yaml", "training.fsdp={}", EMA % "")
    assert not [line for line in dry("sd2_base.yaml", "training.fsdp=null") if "host memory" in line]


@pytest.mark.parametrize("every", ["3sp", "8sp", "9sp", "13sp", "75sp", "1ba", "2.5ba", "7ba", "0.1dur", "0.3dur"])
def test_as_many_times_as_the_run_acts(every):
    """Also where multiples of the interval lie within batches: the batch in which one lies acts, and the last one."""
    for steps in range(1, 40):
        due = Interval(every)
        clocks = (Clock(k, 8 * k, 0, f"{steps}ba", before=(k - 1, 8 * (k - 1), 0)) for k in range(1, steps + 1))
        assert Length(steps, None, 8).times(every) == sum(map(due, clocks)), steps


@pytest.mark.parametrize("epoch", [Epoch(103), Epoch(103, incomplete_batch=True)])
@pytest.mark.parametrize("duration", ["46ba", "3ep", "38sp", "310sp"])
@pytest.mark.parametrize("every", ["6sp", "13sp", "52sp", "103sp", "7ba", "1ep", "2ep", "0.3dur", "0.23dur", "0.07dur"])
def test_as_many_times_as_the_run_acts_in_epochs(every, duration, epoch):
    """Also where epochs end with a batch of a single sample, and where shares of a run are samples."""
    found = length_of(SimpleNamespace(training=SimpleNamespace(global_batch=6, duration=duration)), epoch)
    sizes = cycle([6] * 17 + [1] * epoch.incomplete_batch)
    due, clock, acts = Interval(every), Clock(0, 0, 0, duration, found.epoch_steps), 0
    while not clock.ended:
        batch, sample, ended = clock.batch + 1, clock.sample + next(sizes), clock.epoch
        for epochs in (ended, batch // found.epoch_steps):  # the end of a step, and that of an epoch
            before = (clock.batch, clock.sample, clock.epoch)
            clock = Clock(batch, sample, epochs, duration, found.epoch_steps, before=before)
            acts += due(clock)
    assert found.times(every) == acts
