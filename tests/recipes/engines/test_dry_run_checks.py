"""Dry runs refuse what the run would refuse, in its words, and nothing that only this machine does not support."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from recipes.config.build import build, build_on_meta
from recipes.config.recipe import Recipe, load_config
from recipes.engines import dry_run_checks
from recipes.engines.dry_run_checks import check_on_meta
from recipes.planning.dry_run import problems
from tests.recipes.exporting.runs import a_run

ROOT = Path(__file__).resolve().parents[3]
YAMLS = sorted(path.name for path in (ROOT / "yamls").glob("*.yaml") if "\ntraining:" in path.read_text())
BF16 = "training.precision=amp_bf16"
GRAPHS = "algorithms.graphs={name: cuda_graphs}"
RECOMPUTED = "algorithms.y={name: activation_checkpointing}"
FID = "callbacks.x={name: fid, reference: {name: folder, path: nowhere}%s}"
MACHINES = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}


@pytest.fixture(autouse=True)
def elsewhere(built_once, tmp_path, monkeypatch):
    """An empty folder, and one device."""
    monkeypatch.chdir(tmp_path)
    for name in MACHINES:
        monkeypatch.delenv(name, raising=False)


def read(yaml, *overrides):
    return load_config(ROOT / "yamls" / f"{yaml}.yaml", list(overrides), Recipe, [])


@pytest.mark.parametrize("environment", [{}, MACHINES], ids=["one device", "two machines"])
@pytest.mark.parametrize("yaml", YAMLS)
def test_every_recipe(yaml, environment, monkeypatch, tmp_path, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    check_on_meta(read(yaml.removesuffix(".yaml"), "training.global_batch=2048"))
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_tensors_that_the_first_rank_would_not_send(monkeypatch):
    """The run itself would refuse them on all ranks but the first, once all have started."""

    def listed(component):
        task = build_on_meta(component)
        task.masks = [torch.zeros(2, device="meta")]
        return task

    monkeypatch.setattr(dry_run_checks, "build_on_meta", listed)
    check_on_meta(read("gpt2_1b", "training.fsdp={}"))  # one device holds the whole
    for name, value in MACHINES.items():
        monkeypatch.setenv(name, value)
    check_on_meta(read("gpt2_1b"))
    with pytest.raises(ValueError, match="^Language: masks holds tensors, .*; register each as a buffer"):
        check_on_meta(read("gpt2_1b", "training.fsdp={}"))


@pytest.mark.parametrize(
    ("yaml", "overrides", "message"),
    [
        ("openmoji_text", ["algorithms.x={name: activation_checkpointing}"], "the model names no blocks"),
        ("openmoji_dalle", ["algorithms.x={name: attention}"], "attention block to change; remove the lever"),
        ("openmoji_dalle", ["algorithms.x={name: channels_last}"], "over images to change; remove the lever"),
        ("openmoji_text", ["algorithms.x={name: compile}"], "the model names no blocks; set whole: true"),
        (
            "openmoji_unet",
            ["algorithms.x={name: compile, mode: reduce-overhead}", "training.fsdp={}"],
            "mode reduce-overhead captures CUDA graphs, .*; use mode default",
        ),
        (
            "openmoji_dalle",
            ["algorithms.x={name: compile, mode: max-autotune}", "training.tensor_parallel=5"],
            "mode max-autotune captures CUDA graphs, .*; use mode max-autotune-no-cudagraphs",
        ),
        ("openmoji_unet", ["algorithms.x={name: block_all_reduce}", "training.fsdp={}"], "whole copies .*; remove it"),
        ("openmoji_unet", [GRAPHS, "training.fsdp={}"], "cuda_graphs: parameters must keep their addresses"),
        ("openmoji_text", [GRAPHS], "the model names no blocks; set whole: true"),
        ("openmoji_unet", [GRAPHS, RECOMPUTED], "cannot be captured; remove one of them"),
        (
            "openmoji_unet",
            [GRAPHS, "algorithms.x={name: compile, mode: max-autotune}"],
            "compile captures graphs, too, with mode max-autotune; use mode max-autotune-no-cudagraphs",
        ),
        (
            "openmoji_unet",
            [GRAPHS, "algorithms.x={name: compile, whole: true}"],
            "blocks inside of a compiled network cannot be captured; set whole: true",
        ),
        (
            "openmoji_unet",
            ["algorithms.x={name: compile, fullgraph: true}", "training.fsdp={wrap: model}", BF16],
            "training.fsdp gathers GroupNorm inside of a compiled module",
        ),
        (
            "openmoji_unet",
            ["algorithms.x={name: compile, fullgraph: true, whole: true}", "training.fsdp={parameters: fp32}", BF16],
            "training.fsdp gathers .*Block2D inside of a compiled module",
        ),
        ("openmoji_dalle", ["algorithms.x={name: cudnn_benchmark}"], "the model has no convolution"),
        ("openmoji_text", ["training.microbatch=1"], "training.microbatch: 1 leaves the model one sample at a time"),
        (
            "openmoji_text",
            ["training.microbatch=9"],
            "training.microbatch: 9 leaves the model one sample alone, the last of the 64 of a device",
        ),
        ("openmoji_text", ["training.global_batch=1"], "training.global_batch: 1 leaves the model one sample"),
        ("openmoji_text", ["algorithms.x={name: fp8}"], "fp8: nothing to change"),
        ("openmoji_dalle", ["algorithms.x={name: fused_geglu}"], "no GEGLU of diffusers to fuse; remove the lever"),
        ("openmoji_dalle", ["algorithms.x={name: fused_group_norm}"], "no GroupNorm of a diffusers block to fuse"),
        ("openmoji_dalle", ["algorithms.x={name: lean_blocks}"], "no residual, transformer or upsampling block"),
        ("openmoji_dvae", ["algorithms.x={name: low_precision_norms}", BF16], "no plain GroupNorm or LayerNorm"),
        ("openmoji_dalle", ["algorithms.x={name: noise_of_samples}"], "draws no noise for samples"),
        ("openmoji_dalle", ["algorithms.x={name: resblock_grad_scaling}", BF16], "training.precision is amp_bf16"),
        (
            "openmoji_dalle",
            ["algorithms.x={name: resblock_grad_scaling, weights: fp16}", "training.precision=fp32"],
            "weights: fp16 needs the optimizer adam16",
        ),
        ("openmoji_dalle", ["algorithms.x={name: powersgd, rank: 4, overlap: true}"], "overlap needs training.fsdp"),
        ("openmoji_diffusion", ["algorithms.x={name: scheduled_ema, decay: 0.9}"], "at most one ScheduledEMA"),
        ("openmoji_diffusion", ["algorithms.scheduled_ema.start=1000ba"], "leaves nothing to average"),
        ("openmoji_diffusion", ["algorithms.scheduled_ema.decay=null"], "give either decay or half_life"),
        ("openmoji_diffusion", ["schedule={name: cosine, warmup: 2000sp}"], "a warm-up of 2000sp cannot be taken"),
        ("openmoji_diffusion", ["training.fsdp={parameters: bf16}", "training.precision=fp32"], "^training.fsdp.param"),
        ("openmoji_diffusion", ["callbacks.x={name: gradient_scales}"], "the run has no resblock_grad_scaling"),
        (
            "openmoji_diffusion",
            ["callbacks.x={name: sample_grid, prompts: [a]}"],
            "callbacks: sample_grid and x are both sample_grid, .*; remove one of them",
        ),
        ("openmoji_vae", ["callbacks.x={name: reconstructions}"], "reconstructions and x are both reconstructions"),
        ("openmoji_diffusion", ["callbacks.x={name: throughput}"], "throughput and x are both throughput"),
        (
            "openmoji_dalle",
            [
                "algorithms.x={name: resblock_grad_scaling}",
                "training.precision=fp32",
                "callbacks.x={name: gradient_scales}",
                "callbacks.y={name: gradient_scales, every: 1ba}",
            ],
            "x and y are both gradient_scales",
        ),
        ("openmoji_diffusion", ["callbacks.x={name: sample_grid, prompts: [a], steps: 0}"], "steps: 0; give 1 or more"),
        ("openmoji_diffusion", ["callbacks.x={name: sample_grid, prompts: [a], batch: 0}"], "batch: 0; give 1 or more"),
        (
            "openmoji_diffusion",
            ["callbacks.x={name: sample_grid, prompts: [a], sampler: no}"],
            "^callbacks.x.sampler: `no` is unknown to rectified_flow; allowed: euler",
        ),
        ("openmoji_diffusion", ["callbacks.sample_grid.every=0ba"], "^callbacks.sample_grid.every: `0ba`; give an int"),
        ("openmoji_unet", ["callbacks.x={name: sample_grid, prompts: [a], steps: 1000}"], "steps must be below the"),
        (
            "openmoji_unet",
            ["callbacks.x={name: sample_grid, prompts: [a], steps: 600, sampler: ddim}"],
            "600 steps of ddim begin at timestep 600",
        ),
        ("openmoji_dalle", ["callbacks.x={name: token_grid, prompts: [a], temperature: 0}"], "temperature: 0.0; give"),
        ("openmoji_dalle", [f"callbacks.token_grid.seed={2**64}"], "seed: 18446744073709551616; give a number below 2"),
        ("openmoji_diffusion", [FID % f", seed: {2**64}"], "seed: 18446744073709551616; give a number below 2"),
        ("docs_gpt2", ["callbacks.x={name: sample_grid, prompts: [a]}"], "a Language is no diffusion model"),
        ("openmoji_vae", ["callbacks.x={name: token_grid, prompts: [a]}"], "a KLAutoencoder draws no tokens of images"),
        ("openmoji_vae", [FID % ""], "fid: a KLAutoencoder draws no images of captions"),
        ("openmoji_diffusion", [FID % ", images: 1"], "fid needs 2 generated pictures, and there are 1"),
        ("openmoji_diffusion", [FID % ", extractor: contrastive"], "fid: path is missing"),
        ("openmoji_diffusion", [FID % ", sampling: {stesp: 1}"], "fid: sampling.stesp: no option of"),
        ("openmoji_dalle", [FID % ", sampling: {top_k: 0}"], "top_k: 0; give 1 or more"),
        ("openmoji_dalle", [FID % ", sampling: {top_k: 2.5}"], r"fid: sampling.top_k: 2.5; give int \| None"),
        ("openmoji_diffusion", [FID % ", sampling: {steps: x}"], "fid: sampling.steps: 'x'; give int"),
        ("openmoji_diffusion", [FID % ", seed: -1"], "fid: seed: -1; give 0 or more"),
        ("openmoji_text", ["callbacks.x={name: exponents}"], "exponents: ContrastiveText does not say which"),
        ("openmoji_dvae", ["callbacks.x={name: scheduled_value, value: y, start: 1, end: 2}"], "has no value `y`"),
    ],
)
def test_what_the_run_refuses(yaml, overrides, message):
    recipe = read(yaml, *overrides)
    with pytest.raises(ValueError, match=message):
        check_on_meta(recipe)
    (line,) = problems(recipe, check_on_meta)
    assert "\n" not in line


@pytest.mark.parametrize(
    ("yaml", "override", "message"),
    [
        ("openmoji_diffusion", "optimizer.lr=-1", "adamw: lr: -1.0; give 0 or more"),
        ("openmoji_diffusion", "optimizer.betas=[1.5, 2]", "adamw: betas must lie in [0, 1), got [1.5, 2.0]"),
        ("openmoji_dalle", "optimizer={name: adam16, lr: 1, betas: [2, 2]}", "adam16: betas.0 must lie in [0, 1)"),
        ("openmoji_diffusion", "schedule={name: cosine, final: -1}", "schedule: final: -1.0; give 0 or more"),
        ("openmoji_diffusion", "schedule={name: cosine, over: 0ba}", "schedule: over: 0ba; give a length above 0"),
        ("openmoji_diffusion", "callbacks.sample_grid.guidance=1e35", "callbacks.sample_grid.guidance: 1e+35; give a"),
        ("openmoji_diffusion", "callbacks.throughput.window=0", "throughput: window: 0; give 1 or more"),
        ("openmoji_diffusion", "callbacks.progress.seconds=-1", "progress: seconds: -1.0; give 0 or more"),
        ("openmoji_vae", "callbacks.x={name: reconstructions, pictures: 0}", "pictures: 0; give 1 or more"),
        ("openmoji_dalle", "algorithms.x={name: resblock_grad_scaling, most: 500}", "give numbers from -126 to 127"),
        ("openmoji_diffusion", "model.denoiser.width=-8", "dit: width: -8; give 1 or more"),
        ("openmoji_diffusion", "model.denoiser.heads=0", "dit: heads: 0; give 1 or more"),
        ("openmoji_unet", "model.denoiser.norm_groups=0", "unet: norm_groups: 0; give 1 or more"),
        ("openmoji_unet", "model.denoiser.dropout=2", "unet: dropout is a share from 0 to 1, got 2.0"),
        ("openmoji_vae", "model.channels=[]", "kl_autoencoder: channels: 0; give 1 or more"),
        ("openmoji_vae", "model.latent_channels=0", "kl_autoencoder: latent_channels: 0; give 1 or more"),
        ("openmoji_text", "model.layers=0", "contrastive_text: layers: 0; give 1 or more"),
        ("openmoji_text", "model.heads=3", "contrastive_text: width 128 must be a multiple of heads (3)"),
        ("openmoji_text", "model.patch_size=1000", "contrastive_text: picture_size: 64; give 1000 or more"),
        ("openmoji_dalle", "model.codes=0", "transformer: codes: 0; give 1 or more"),
        ("openmoji_dalle", "model.attention=flex", "flex is for sequences of 128 or more positions, and these have 88"),
        ("docs_gpt2", "model.heads=0", "language: heads: 0; give 1 or more"),
        ("openmoji_diffusion", "data.workers=-1", "latents: workers: -1; give 0 or more"),
        ("openmoji_diffusion", "data.flip=2", "latents: flip is a share from 0 to 1, got 2.0"),
        ("openmoji_diffusion", "data.streams.train.repeat=0", "data.streams.train: repeat: 0.0; give a number above 0"),
        ("openmoji_diffusion", "data.streams.train.validate_hash=xxh3", "train: validate_hash: xxh3; give a hash"),
        ("openmoji_dalle", "data.epoch_size=0", "tokens: epoch_size: 0; give 1 or more"),
        ("docs_gpt2", "data.predownload=0", "texts: predownload: 0; give 1 or more"),
        (
            "docs_gpt2",
            "data={epoch_size: 64, streams: {docs: {repeat: 2}}}",
            "texts: epoch_size and streams.docs.repeat contradict each other; give proportions instead",
        ),
        ("openmoji_diffusion", "data={streams: {train: null}}", "latents: streams is empty; name at least one encoded"),
        ("openmoji_dalle", "evals.val.streams={val: null}", "tokens: streams is empty; name at least one encoded set"),
        ("docs_gpt2", "data.streams={docs: null, captions: null}", "texts: streams is empty; name at least one"),
        (
            "openmoji_diffusion",
            "data.streams={train: {proportion: 1}, more: {name: local, path: x}}",
            "latents: streams.more has no proportion, others have",
        ),
        ("openmoji_diffusion", "data.cache_limit=abc", "latents: cache_limit: abc; give a size such as 100gb"),
        ("openmoji_dalle", "data.cache_limit=-5gb", "tokens: cache_limit: -5gb; give a size such as 100gb"),
        ("docs_gpt2", "data.cache_limit=infgb", "texts: cache_limit: infgb; give a size such as 100gb"),
        ("openmoji_dvae", "callbacks.temperature.end=0", "scheduled_value: end: dvae: temperature: 0.0; give a number"),
        ("openmoji_dvae", "callbacks.beta.start=-1", "scheduled_value: start: dvae: beta: -1.0; give 0 or more"),
        ("openmoji_vae", "loggers.tensorboard={name: tensorboard, flush_every: 0}", "flush_every: 0; give 1 or more"),
        ("openmoji_vae", "data.resolution=0", "pictures: resolution: 0; give 1 or more"),
        ("openmoji_vae", "data.resolution=66", "resolution: 66; give the side of the model's images, a multiple of 4"),
        ("openmoji_dvae", "evals.val.resolution=20", "the side of the model's images, a multiple of 8"),
        ("openmoji_text", "evals.val.resolution=32", "resolution: 32; give the side of the model's images, 64"),
        ("openmoji_text", "data.tokens=null", "pictures: tokens: null; give the model's number of tokens per caption"),
        ("openmoji_text", "model.vocabulary=9", "pictures: captions have 49408 different tokens, the model 9; give"),
        (
            "docs_gpt2",
            "data={name: pictures, source: {name: tars, urls: x.tar}, resolution: 64}",
            "pictures: the model is trained on data with positions, vocabulary, which pictures do not have; use the",
        ),
        (
            "openmoji_dvae",
            "evals.val={name: texts, streams: {a: {name: local, path: x}}}",
            "texts: the model is trained on data with side_multiple, which texts do not have; use the data component",
        ),
        ("openmoji_vae", "data.filter={name: pictures, min_side: 0}", "filter.min_side is 0: give 1 or more"),
        ("openmoji_vae", "data={keep_decoded: true, crop: random}", "pictures: keep_decoded holds one crop per image"),
    ],
)
def test_numbers_out_of_range(yaml, override, message):
    """They are refused by name, before anything runs, and not by a library's traceback."""
    with pytest.raises(ValueError, match=re.escape(message)):
        check_on_meta(read(yaml, "training.precision=fp32", override))


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithms.x={name: attention, implementation: xformers}"],
        ["algorithms.x={name: fused_group_norm, when: always}"],
        ["algorithms.x={name: low_precision_norms}"],  # precision: auto is bf16 on a GPU
        ["training.fsdp={replicas: 2}"],  # which torch 2.7 averages on GPUs alone
        ["training.microbatch=auto"],
        ["algorithms.x={name: compile, mode: reduce-overhead}"],
        [GRAPHS, "algorithms.y={name: block_all_reduce}"],
        ["algorithms.x={name: compile, fullgraph: true}", "training.fsdp={parameters: fp32}"],
    ],
)
def test_what_another_machine_can_do(overrides, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_on_meta(read("openmoji_unet", "training.device=auto", *overrides))


def test_the_lever_that_graphs_ask_for_can_be_pasted(monkeypatch):
    """A shell made two arguments of it."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    changes = ["training.device=auto", GRAPHS]
    with pytest.raises(ValueError, match="DistributedDataParallel does not see") as error:
        check_on_meta(read("openmoji_unet", *changes))
    (argument,) = shlex.split(str(error.value).partition("; add ")[2].removesuffix(", or remove the lever"))
    check_on_meta(read("openmoji_unet", *changes, argument))


@pytest.mark.parametrize("lever", ["attention, implementation: xformers", "fused_group_norm, when: always"])
def test_what_no_cpu_can_do(lever):
    with pytest.raises(ValueError, match="kernels need a GPU; use .*auto"):
        check_on_meta(read("openmoji_unet", "training.device=cpu", f"algorithms.x={{name: {lever}}}"))


@pytest.mark.parametrize("more", [[], ["training.fsdp={replicas: machines}"]])
def test_powersgd_with_one_replica(more, monkeypatch):
    recipe = read("openmoji_dalle", "algorithms.x={name: powersgd, rank: 8, clip: 2}", "training.grad_clip=null", *more)
    check_on_meta(recipe)  # which was told nothing of the processes
    monkeypatch.setenv("WORLD_SIZE", "8" if more else "1")
    with pytest.raises(ValueError, match="^powersgd: there is only one replica .*, and clip by training.grad_clip=2$"):
        check_on_meta(recipe)


def test_loggers_are_not_opened(tmp_path, monkeypatch):
    """MLflow would get a run that never trains, and W&B a folder."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    loggers = "loggers={a: {name: mlflow, experiment: test}, b: {name: wandb, project: test}}"
    check_on_meta(read("openmoji_vae", loggers))
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for output in ("file", "file/run"):
        with pytest.raises(ValueError, match=f"^output: {tmp_path}/file is a file, .*; give another folder$"):
            check_on_meta(read("openmoji_vae", f"output={output}"))


def test_lengths_in_epochs_of_data_that_is_not_here():
    """Nobody knows whether they fit."""
    check_on_meta(read("openmoji_diffusion", "schedule={name: cosine, warmup: 1ep}"))


def test_weights_that_are_here(small_recipe, quick_recipe, tmp_path, recwarn):
    """They are compared with the model, and not read into memory."""
    weights = f"checkpoints.load_weights={tmp_path}/export"
    build(quick_recipe(tmp_path).model).export(tmp_path / "export")
    check_on_meta(quick_recipe(tmp_path / "run", weights))
    assert not [warning for warning in recwarn if "meta" in str(warning.message)]
    with pytest.raises(ValueError, match="width is 32, the recipe's network has 64|does not fit the model"):
        check_on_meta(quick_recipe(tmp_path / "run", weights, "model.denoiser.width=64"))
    with pytest.raises(FileNotFoundError, match="no such weights"):
        check_on_meta(small_recipe(tmp_path / "run", weights))
    # A run that goes on does not read them either.
    goes_on = small_recipe(tmp_path / "run", weights, "checkpoints.autoresume=true", "training.engine=lightning")
    a_run(goes_on)
    check_on_meta(goes_on)
