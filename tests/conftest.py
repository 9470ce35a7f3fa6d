"""Tiny encoders in the real file formats, a set that the encode job made with them, and Stable Diffusion 2's recipe at
a width that trains in seconds. Made once a session, without a network."""

import functools
import gc
import io
import json
import os
import re
import resource
import shlex
import sys
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import yaml
from PIL import Image

from data.system.garbage_collection import RARELY
from tests.ranks import do_not_wait_for_disks, start_server

ROOT = Path(__file__).resolve().parents[1]
# Data sets of streaming keep files open until the process ends: thousands in a suite, where 1,024 is a usual limit.
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
# Torch reads it when it is imported. With several threads, what a process that has computed forks would hang.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each process that compiles would start a pool of processes that import torch, for kernels that take a second.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# To see whether vector instructions work, each would compile with them and start processes that import torch: 20 s.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# By default an example that takes more than 0.2 s fails, as any does on a machine that is busy.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")
# What was compiled in an earlier session is not compiled again; by default it is where temporary files are.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
do_not_wait_for_disks()
# Searches for cycles took a tenth of the time of tests, most of it in modules, which stay.
gc.set_threshold(*RARELY)
# 40 pictures to train on in four tars, 6 to validate on in one.
SPLITS = {"train": (4, 10), "val": (1, 6)}
# yamls/sd2_base.yaml at the width, grid, text and batch that a CPU trains in tens of milliseconds.
DENOISERS = {
    "unet": ["model.denoiser={channels: [32,64], attention: [true,false], heads: [1,2], blocks: 1, text_width: 16}"],
    "dit": [
        "model.denoiser={name: dit, width: 32, layers: 2, heads: 2, text_width: 16}",
        "algorithms={attention: null, channels_last: null, lean_blocks: null, fused_group_norm: null}",
        "algorithms={fused_geglu: null, cudnn_benchmark: null}",
    ],
}
SMALL = [
    "model.objective={name: ddpm, eval_timesteps: [50,500,950]}",
    "data.resolution=16",
    "data.expect={scaling_factor: 0.5, text_length: 12}",
    "data.workers=0",
    "evals.val.resolution=16",
    "evals.val.expect={scaling_factor: 0.5, text_length: 12}",
    "evals.val.workers=0",
    "optimizer.lr=2e-3",
    "schedule.warmup=2ba",
    "training.duration=12ba",
    "training.global_batch=8",
    "training.microbatch=null",
    "training.fsdp=null",
    "training.precision=auto",
    "training.device=cpu",
    "training.eval_every=null",
    "checkpoints.every=null",
    "checkpoints.autoresume=false",
    "callbacks.sample_grid=null",
    "callbacks.export=null",
    "algorithms.low_precision_norms=null",  # a run in fp32 has no autocast
    "callbacks.memory_monitor=null",  # it warns without a GPU
    "loggers={}",
]


@functools.cache
def group_of(file: str) -> str:
    """Which tests one worker of pytest-xdist runs: those of a file, which share its fixtures, and those of all files
    that share the launch of two ranks, or the processes with a stub of a GPU."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return next((name for name in ("two_ranks", "stub_gpu") if re.search(rf"\b{name}\(", text)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs):
    """Workers are forked from the process from which ranks are, which has imported what they would."""
    command = [sys.executable, "-S", str(ROOT / "tests" / "worker.py"), start_server()]
    for spec in specs:
        spec.python = shlex.join(command)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group_of(nodeid.split("::")[0])

    return ByGroup(config, log)


def pytest_collection_modifyitems(items):
    """The groups with slow tests begin first: one that began last would leave the other workers idle."""

    def group(item):
        return group_of(item.path.relative_to(ROOT).as_posix())

    slow = {group(item) for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: group(item) not in slow)


def pytest_collection_finish(session):
    """What has been imported stays. Each full search for cycles would go through it, half a second every time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory):
    """What packages, and processes that are killed, leave where temporary files are goes with the tests' own folders:
    hundreds of files and folders a session."""
    folder = str(tmp_path_factory.mktemp("tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def names_of_shared_memory():
    """Tests open streaming's own data sets, too: without this, those of two workers take each other's names.

    streaming tries numbers until one is free, and opens the memory of each that is not. Here the numbers go on from one
    data set to the next, as hundreds of them would reach the limit of open files.
    """
    from streaming.base.shared import prefix

    from data.encoded.shared_names import own_names

    with own_names(), pytest.MonkeyPatch.context() as patch:
        numbers = prefix._each_prefix_int()
        patch.setattr(prefix, "_each_prefix_int", lambda: numbers)
        yield


@pytest.fixture(scope="session")
def vae_folder(tmp_path_factory) -> Path:
    """An AutoencoderKL with f = 2 and 4 channels; shift and scale away from 0 and 1, so that a second use shows."""
    import torch
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.5,
        shift_factor=0.25,
    )
    folder = tmp_path_factory.mktemp("vae")
    vae.save_pretrained(folder)
    return folder


CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 3},
}


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory) -> Path:
    """An open_clip model in the format of its own exports."""
    import torch
    from safetensors.torch import save_file

    from data.tokenizers.clip_library import open_clip

    torch.manual_seed(1)
    clip = open_clip.CLIP(**CLIP)
    # Weights at their initial scale would make every caption's embedding nearly the same.
    with torch.no_grad():
        for name, parameter in clip.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (1.0 if "embedding" in name else 0.3))
    folder = tmp_path_factory.mktemp("clip")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": CLIP, "preprocess_cfg": {}}))
    save_file(clip.state_dict(), folder / "open_clip_model.safetensors")
    return folder


def _drawing(number: int) -> bytes:
    """A blob of its own colour and place on its own ground, as a PNG of its own size."""
    rng = np.random.default_rng(number)
    width, height = 34 + number % 5, 33 + number % 7
    y, x = np.mgrid[:height, :width]
    inside = (x - rng.integers(8, 26)) ** 2 + (y - rng.integers(8, 26)) ** 2 < rng.integers(40, 120)
    pixels = np.where(inside[..., None], rng.integers(0, 256, 3), rng.integers(0, 256, 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="session")
def drawings(tmp_path_factory) -> Path:
    """A folder of tars of drawings with captions, train/ and val/."""
    import webdataset

    root = tmp_path_factory.mktemp("drawings")
    number = 0
    for split, (tars, each) in SPLITS.items():
        (root / split).mkdir()
        for tar in range(tars):
            with webdataset.TarWriter(str(root / split / f"{tar:05d}.tar")) as sink:
                for _ in range(each):
                    caption = f"drawing of {number} {'dots' if number % 2 else 'stars'} on a wall"
                    sample = {"png": _drawing(number), "txt": caption, "json": {"number": number}}
                    sink.write({"__key__": f"{tar:05d}_{number:04d}", **sample})
                    number += 1
    return root


@pytest.fixture(scope="session")
def latent_sets(tmp_path_factory, drawings, vae_folder, clip_folder) -> Path:
    """train/ and val/ as precompute/encode.py writes them from tars, at 16 and 32 pixels (latents of 8 and 16)."""
    from precompute.encode import main

    root = tmp_path_factory.mktemp("latent_sets")
    values = {
        "out": str(root / "latents"),
        "sources": {split: {"name": "tars", "urls": f"{drawings}/{split}/*.tar"} for split in SPLITS},
        "resolutions": [16, 32],
        "image_encoder": {"name": "kl_vae", "path": str(vae_folder), "precision": "fp32"},
        "text_encoder": {"name": "open_clip_text", "path": str(clip_folder), "precision": "fp32"},
        "batch": 16,
        "workers": 0,
        "device": "cpu",
    }
    (root / "encode.yaml").write_text(yaml.safe_dump(values))
    main([str(root / "encode.yaml")])
    return root / "latents"


@pytest.fixture(scope="session")
def dvae_folder(tmp_path_factory) -> Path:
    """An exported dVAE of 32 codes, each of which stands for one of 32 places in pictures; all of them are used."""
    import torch

    from recipes.models.dvae.files import save_dvae
    from recipes.models.dvae.network import DVAE, map_pixels

    torch.manual_seed(2)
    network = DVAE(codes=32, hidden=8, blocks=1, initial=8)
    patches = torch.nn.functional.interpolate(torch.rand(2, 3, 4, 4), scale_factor=8)  # (B, 3, 32, 32)
    with torch.no_grad():
        features = network.encoder.blocks[:-1](map_pixels(patches)).relu().permute(0, 2, 3, 1).reshape(32, -1)  # KC
        output = network.encoder.blocks.output.conv  # <x, f_k> - |f_k|^2 / 2 is largest for the nearest f_k
        output.w.copy_(features[:, :, None, None])
        output.b.copy_(-features.square().sum(1) / 2)
    folder = tmp_path_factory.mktemp("dvae")
    save_dvae(network, folder)
    return folder


@pytest.fixture(scope="session")
def token_sets(tmp_path_factory, drawings, dvae_folder) -> Path:
    """train/ and val/ as precompute/encode.py writes them with a dVAE, 3 crops of 32 pixels (grids of 4), and
    vocabulary.json of 280 entries."""
    from precompute import encode, vocabulary

    root = tmp_path_factory.mktemp("token_sets")
    sources = {split: {"name": "tars", "urls": f"{drawings}/{split}/*.tar"} for split in SPLITS}
    values = {
        "out": str(root),
        "sources": sources,
        "resolutions": [32],
        "crop": "transformer",
        "crops": 3,
        "image_encoder": {"name": "dvae", "path": str(dvae_folder)},
        "batch": 16,
        "workers": 0,
        "device": "cpu",
    }
    (root / "encode.yaml").write_text(yaml.safe_dump(values))
    encode.main([str(root / "encode.yaml")])
    values = {"out": str(root / "vocabulary.json"), "sources": {"train": sources["train"]}, "entries": 280}
    (root / "vocabulary.yaml").write_text(yaml.safe_dump(values))
    vocabulary.main([str(root / "vocabulary.yaml")])
    return root


@pytest.fixture(scope="session")
def text_sets(tmp_path_factory, drawings) -> Path:
    """docs/, captions/ and docs_val/, captions too, as yamls/docs_pack.yaml packs them, in rows of 16 + 1 tokens."""
    from precompute import pack, vocabulary

    root = tmp_path_factory.mktemp("text_sets")
    captions = f"sources.captions.urls={drawings}/train/*.tar"
    docs = f"sources.docs={{name: texts, files: [{ROOT}/docs/export.md, {ROOT}/docs/comp*.md], exclude: null}}"
    val = f"sources.docs_val={{name: tars, urls: {drawings}/val/*.tar}}"
    bpe = f"{root}/vocabulary.json"
    vocabulary.main([f"{ROOT}/yamls/docs_vocabulary.yaml", f"out={bpe}", "entries=300", docs, captions])
    pack.main([f"{ROOT}/yamls/docs_pack.yaml", f"out={root}", f"vocabulary={bpe}", "positions=16", docs, captions, val])
    return root


@pytest.fixture(scope="session")
def small_recipe(latent_sets):
    """(output, overrides) -> yamls/sd2_base.yaml as a recipe of the small model on the small set."""
    from recipes.config.recipe import Recipe, load_config

    def make(output: Path, *overrides: str, denoiser: str = "unet", yaml_name: str = "sd2_base.yaml") -> Recipe:
        paths = [
            f"data.streams.train.path={latent_sets}/train",
            f"evals.val.streams.val.path={latent_sets}/val",
            f"output={output}",
        ]
        return load_config(ROOT / "yamls" / yaml_name, [*SMALL, *DENOISERS[denoiser], *paths, *overrides], Recipe)

    return make


@pytest.fixture(scope="session")
def quick_recipe(small_recipe):
    """The same with a transformer instead of the U-Net, several times faster: for what does not depend on layers."""
    return functools.partial(small_recipe, denoiser="dit")


@pytest.fixture(scope="session")
def token_recipe(token_sets):
    """(output, overrides) -> yamls/openmoji_dalle.yaml as a recipe of the set of tokens."""
    from recipes.config.recipe import Recipe, load_config

    def make(output: Path, *overrides: str) -> Recipe:
        paths = [
            f"data.streams.train.path={token_sets}/train",
            f"evals.val.streams.val.path={token_sets}/val",
            f"data.vocabulary={token_sets}/vocabulary.json",
            f"output={output}",
        ]
        return load_config(ROOT / "yamls" / "openmoji_dalle.yaml", [*paths, *overrides], Recipe)

    return make


@pytest.fixture(scope="session")
def fit():
    """Trains a recipe as recipes/train.py does, and gives the finished trainer."""
    from recipes.engines.composer.trainer import build_trainer

    def run(recipe):
        trainer = build_trainer(recipe)
        trainer.fit()
        trainer.close()
        return trainer

    return run


@pytest.fixture(scope="session")
def exported(tmp_path_factory, small_recipe, fit):
    """A finished run of the small recipe with all that it writes: (recipe, trainer)."""
    output = tmp_path_factory.mktemp("exported") / "run"
    recipe = small_recipe(
        output,
        "training.duration=14ba",
        "training.eval_every=5ba",
        "checkpoints={every: 6ba, keep: -1, autoresume: false}",
        "callbacks.export={name: export, every: 6ba}",
        "callbacks.sample_grid={name: sample_grid, every: 6ba, prompts: [a dot, a star, a wall], steps: 3, batch: 2}",
        "callbacks.progress.seconds=0",
        "loggers={tensorboard: {name: tensorboard}}",
    )
    return recipe, fit(recipe)


@pytest.fixture(scope="session")
def stub_gpu(tmp_path_factory):
    """(script, arguments) -> its finished process, which took the stub for a GPU; see `tests.stub_gpu`."""
    from tests.stub_gpu import StubGpu

    return StubGpu(tmp_path_factory.mktemp("stub"))


@pytest.fixture
def one_rank():
    """A process group of this process alone, unless an earlier test has left one."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
