"""The shipped training recipes at sizes that two CPU cores train in a second, with all their levers and callbacks."""

from pathlib import Path

import yaml

from recipes.config.recipe import Recipe, load_config

ROOT = Path(__file__).resolve().parents[3]
BATCHES = 2
# Two ranks with two microbatches each. All intervals of the recipes are longer than this run, so that everything that
# is periodic happens at its end.
RUN = [
    f"training={{duration: {BATCHES}ba, global_batch: 8, microbatch: 2, device: cpu, eval_every: null}}",
    "checkpoints={every: null, autoresume: true}",
    "callbacks={throughput: {window: 2}, progress: {seconds: 0}}",
    "loggers={}",
]
LATENTS = [
    "data={resolution: 16, workers: 0}",
    "evals.val={resolution: 16, workers: 0}",
    "callbacks.sample_grid={prompts: [a dot, a star], steps: 2, batch: 2}",
]
DDPM = [*LATENTS, "model.objective.eval_timesteps=[50, 950]"]  # two of five: each is computed alike
UNET = [
    *DDPM,
    "model.denoiser={channels: [32,64], attention: [true,false], heads: [1,2], blocks: 1, text_width: 16}",
    "data.expect={scaling_factor: 0.5, text_length: 12}",
    "evals.val.expect={scaling_factor: 0.5, text_length: 12}",
    "schedule.warmup=0ba",
]
SMALL_DIT = "model.denoiser={width: 32, layers: 2, heads: 2, text_width: 16}"
SMALL_UNET = "model.denoiser={channels: [16,32], attention: [false,true], heads: [1,2], blocks: 1, text_width: 16}"
SEQUENCE = "text_positions: 16, text_vocabulary: 280, side: 4, codes: 32, kernel: 3"
TOKENS = [
    f"model={{layers: 2, width: 32, heads: 2, {SEQUENCE}}}",
    "data={resolution: 32, positions: 16, workers: 0}",
    "evals.val={resolution: 32, positions: 16, workers: 0}",
    "callbacks.token_grid={prompts: [a dot, a star], batch: 2}",
    "schedule.warmup=0ba",
]
DALLE_1B = [*TOKENS, "algorithms.compile.backend=eager", "algorithms.scheduled_ema.every=1"]
DALLE = [
    *DALLE_1B,
    "optimizer.compiled=false",  # compiling its update on a CPU takes half a minute
    "algorithms.powersgd.rank=4",
]
TEXTS = [
    "model={layers: 2, width: 32, heads: 4, positions: 16, vocabulary: 512}",
    "data.workers=0",
    "evals.val.workers=0",
    "schedule.warmup=0ba",
]
PICTURES = ["data={resolution: 16, workers: 0}", "evals.val.resolution=16"]
DVAE = [
    *PICTURES,
    "model={codes: 32, hidden: 8, blocks: 1, initial: 8}",
    "callbacks.beta.over=2ba",
    "callbacks.temperature.over=2ba",
]
WARMUP = "schedule.warmup=0ba"
TOWERS = "width: 16, layers: 2, heads: 2, picture_size: 16, patch_size: 8, picture_width: 32, picture_layers: 1"
CONTRASTIVE = [f"model={{{TOWERS}, embedding: 16}}", WARMUP]
VAE = [
    *PICTURES,
    "model={channels: [8, 8, 16], norm_groups: 4}",
    "callbacks.reconstructions.every=null",
    WARMUP,
    "training.precision=amp_bf16",  # the recipe says why not; other recipes of this model may
]
# Recipe -> (data set of tests/conftest.py, what is smaller than in the recipe).
SMALLER = {
    "sd2_base": ("latent_sets", UNET),
    "sd2_base_512": ("latent_sets", [*UNET, "data.resolution=32", "algorithms.scheduled_ema.last=2ba"]),
    "dalle_1b": ("token_sets", DALLE_1B),
    "dalle_12b": ("token_sets", DALLE),
    "dalle_2b": ("token_sets", DALLE),
    "gpt2_1b": ("text_sets", TEXTS),
    "gpt2_2b": ("text_sets", TEXTS),
    "docs_gpt2": ("text_sets", TEXTS),
    "dvae": ("drawings", [*DVAE, "data.filter=null", "evals.val.filter=null", "schedule.over=2ba"]),
    "openmoji_dalle": ("token_sets", TOKENS),
    "openmoji_diffusion": ("latent_sets", [*LATENTS, SMALL_DIT, WARMUP, "model.objective.eval_times=[0.1, 0.9]"]),
    "openmoji_unet": ("latent_sets", [*DDPM, SMALL_UNET, WARMUP]),
    "openmoji_dvae": ("drawings", [*DVAE, WARMUP]),
    "openmoji_vae": ("drawings", VAE),
    "openmoji_text": ("drawings", CONTRASTIVE),
}
# What differs in numbers only from a recipe above, or is one with the numbers of another.
ELSEWHERE = ("dalle_5b", "gpt2_4b", "gpt2_8b", "openmoji_judge")
RUNS = [(name, kind) for name in SMALLER for kind in ("ddp", "fsdp")]
# Data set -> its paths in a recipe; recipes with others have their own.
PATHS = {
    "latent_sets": ["data.streams.train.path={}/train", "evals.val.streams.val.path={}/val"],
    "token_sets": [
        "data.streams.train.path={}/train",
        "evals.val.streams.val.path={}/val",
        "data.vocabulary={}/vocabulary.json",
    ],
    "text_sets": ["data.streams.train.path={}/docs", "evals.val.streams.val.path={}/docs_val"],
    "docs_gpt2": [
        "data.streams.docs.path={0}/docs",
        "data.streams.captions.path={0}/captions",
        "evals.val.streams.val.path={0}/docs_val",
    ],
    "drawings": ["data.source.urls={}/train/*.tar", "evals.val.source.urls={}/val/*.tar"],
}


def training_recipes():
    """The names of all shipped recipes that train a model."""
    return sorted(path.stem for path in (ROOT / "yamls").glob("*.yaml") if _trains(path))


def _trains(path):
    values = yaml.safe_load(path.read_text())
    return "training" in values or "base" in values and _trains(path.with_name(values["base"]))


def small(name, sets, output, *, sharded):
    """A small version of a recipe that computes in the precision that a GPU would, for two ranks.

    Args:
        name: of the recipe.
        sets: name of a data set -> its folder.
        output: folder of the run.
        sharded: whether it is trained by FSDP2 (True) or DDP (False).
    """
    kind, smaller = SMALLER[name]
    paths = [path.format(sets[kind]) for path in PATHS.get(name, PATHS[kind])]
    if name == "sd2_base_512":  # it begins where the small sd2_base ends
        start = output.parents[1] / "ddp" / "sd2_base" / "export"
        start.mkdir(parents=True, exist_ok=True)  # which is looked for before anything runs
        paths.append(f"checkpoints.load_weights={start}")
    recipe = load_config(ROOT / "yamls" / f"{name}.yaml", [*RUN, *smaller, *paths, f"output={output}"], Recipe)
    low_rank = any(component.name == "powersgd" for component in recipe.algorithms.values())
    changes = []
    # Most of their time: dalle_1b is compiled, and dalle_12b, which is computed again in parts, in shards.
    if kind == "token_sets" and name != "dalle_1b" and not (name == "dalle_12b" and sharded):
        changes.append("algorithms.compile=null")
    if recipe.training.precision in ("auto", "fastest"):
        changes.append("training.precision=amp_bf16")
    if not sharded:
        changes.append("training.fsdp=null")
    elif recipe.training.fsdp is None:
        changes.append(f"training.fsdp={{wrap: {'model' if name == 'openmoji_text' else 'blocks'}}}")
    if low_rank:  # each rank is a machine
        changes.append("training.fsdp.replicas=2" if sharded else "algorithms.powersgd.overlap=false")
    return load_config(ROOT / "yamls" / f"{name}.yaml", [*RUN, *smaller, *paths, f"output={output}", *changes], Recipe)
