"""From a YAML and `key=value` overrides to a checked config. Imports nothing heavy: it answers at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from data.aliases import Duration, InputPath  # noqa: F401 - read from the annotations below
from recipes.config.components import COMPONENTS
from recipes.config.schema import ROOT, Checker
from recipes.config.values import Component, ConfigError, Dumper, plain

Config = TypeVar("Config")


@dataclass(kw_only=True)
class FSDP:
    """Parameters, gradients and optimizer state divided over devices, by PyTorch's FSDP2."""

    strategy: Literal["SHARD_GRAD_OP", "FULL_SHARD"] = "SHARD_GRAD_OP"
    """SHARD_GRAD_OP keeps gathered parameters from the forward to the backward pass; FULL_SHARD gathers them twice."""
    wrap: Literal["blocks", "model"] = "blocks"
    """What is gathered at once: a block of the network, or all of it."""
    parameters: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of gathered parameters; shards, norms, gradients' sums and optimizer state have 32 bits. auto:
    bf16 where the precision is amp_bf16; fp16, in blocks, where resblock_grad_scaling computes in it."""
    replicas: int | Literal["machines"] = 1
    """Groups of devices that each hold the whole model: 1 shards over all devices, machines within each machine."""
    sync: Literal["microbatch", "batch"] = "microbatch"
    """When a device sends its gradients to those that hold the shards: after each microbatch; or once a batch, which
    takes memory for a gradient of the whole model, in 32 bits. Between replicas they are averaged once a batch."""
    checkpoints: Literal["sharded", "full"] = "sharded"
    """sharded: each device writes its part; full: the first one writes all. Both load on any number of devices."""

    def __post_init__(self) -> None:
        valid = self.replicas == "machines" or self.replicas >= 1
        _require((valid, f"replicas: {self.replicas}; give 1 or more, or machines"))

    def replicas_in(self, world: int, machine: int) -> int:
        """Replicas among `world` devices, `machine` of them in each machine.

        Raises:
            ValueError: they do not divide.
        """
        replicas = world // machine if self.replicas == "machines" else self.replicas
        if world % replicas:
            raise ValueError(f"training.fsdp.replicas: {replicas} does not divide {world} devices")
        return replicas


@dataclass(kw_only=True)
class Training:
    """How long, how large a batch, on what."""

    engine: Literal["composer", "lightning"] = "composer"
    """The library whose trainer runs the recipe: MosaicML Composer or PyTorch Lightning. Results are the same."""
    duration: Duration
    """Length of the run: batches (ba), epochs (ep) or samples (sp)."""
    global_batch: int
    """Samples an optimizer step, over all devices."""
    microbatch: int | Literal["auto"] | None = None
    """Samples a device takes at once; gradients accumulate over a batch's microbatches. null: the whole device batch;
    auto: the largest that fits into every GPU's memory, searched in the first batches; on a CPU the whole."""
    precision: Literal["auto", "fp32", "amp_bf16", "amp_fp16"] = "auto"
    """Number format of the forward and backward pass. auto: amp_bf16 on a GPU, fp32 on a CPU (where all else fails)."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: the GPU where there is one."""
    eval_every: Duration | None = None
    """Interval of validation; null: only the end of the run, when it is always done."""
    grad_clip: float | None = None
    """Largest L2 norm of the whole gradient."""
    fsdp: FSDP | None = None
    """Sharding over devices; null: each device has the whole model (DDP)."""
    progress_bar: bool = False
    """Composer's own progress bar, beside the progress callback's lines."""

    def __post_init__(self) -> None:
        _require(
            (
                re.fullmatch(r"0*[1-9]\d*(ba|ep|sp)", self.duration),
                f"duration: `{self.duration}`; give 1ba, 1ep or 1sp or more",
            ),
            (self.global_batch >= 1, f"global_batch: {self.global_batch}; give 1 or more"),
            (
                self.microbatch in (None, "auto") or self.microbatch >= 1,
                f"microbatch: {self.microbatch}; give 1 or more",
            ),
            (_positive(self.eval_every), f"eval_every: `{self.eval_every}`; give an interval above 0"),
            (
                self.grad_clip is None or self.grad_clip > 0,
                f"grad_clip: {self.grad_clip}; give a norm above 0, or null",
            ),
        )

    def device_batch(self, world: int) -> int:
        """Samples that each of `world` devices takes an optimizer step.

        Raises:
            ValueError: the batch does not divide.
        """
        if self.global_batch % world:
            raise ValueError(f"training.global_batch: {self.global_batch} does not divide over {world} devices")
        return self.global_batch // world


@dataclass(kw_only=True)
class Checkpoints:
    """What is saved and what a run starts from."""

    save: bool = True
    """Whether to save any."""
    every: Duration | None = None
    """Interval between checkpoints; null: only the end of the run, when one is always saved."""
    keep: int = 2
    """Newest checkpoints kept on disk; -1 keeps all."""
    load_path: InputPath | None = None
    """Checkpoint to go on from, a file or a remote address. All of it is taken: weights, optimizer, step, schedule."""
    load_weights: InputPath | None = None
    """Exported folder (safetensors) to take only the weights from; step, optimizer and schedule start anew."""
    autoresume: bool = False
    """Go on from the newest checkpoint of this run, where there is one."""

    def __post_init__(self) -> None:
        both = self.load_path is not None and self.load_weights is not None
        _require(
            (_positive(self.every), f"every: `{self.every}`; give an interval above 0"),
            (
                self.keep == -1 or self.keep >= 1,
                f"keep: {self.keep}; give 1 or more, or -1 for all; save: false for none",
            ),
            (not both, "load_weights: load_path takes the weights too; give one of them"),
            (self.save or not self.autoresume, "autoresume: needs save: true, there is nothing to go on from"),
        )


def _positive(duration: str | None) -> bool:
    return duration is None or re.search(r"[1-9]", duration) is not None


def _require(*conditions: tuple[Any, str]) -> None:
    errors = [message for holds, message in conditions if not holds]
    if errors:
        raise ConfigError(errors)


def _tensorboard() -> dict[str, Any]:
    target = COMPONENTS["logger"]["tensorboard"]
    return {"tensorboard": Component("logger", "tensorboard", {}, target, "loggers.tensorboard")}


@dataclass(kw_only=True)
class Recipe:
    """A training run."""

    run_name: str
    """Name of the run in logs and checkpoints."""
    output: str | None = None
    """Folder for checkpoints, logs, samples and the resolved config; null: runs/<run_name>."""
    seed: int = 17
    """Seed of initial weights, order of samples and noise (each rank adds its own number)."""
    model: Annotated[Any, "model"]
    """What is trained."""
    data: Annotated[Any, "data"]
    """Training samples."""
    evals: dict[str, Annotated[Any, "data"]] = field(default_factory=dict)
    """Validation sets by label."""
    optimizer: Annotated[Any, "optimizer"]
    """The optimizer."""
    schedule: Annotated[Any, "schedule"]
    """The learning rate over the run."""
    training: Training
    """How long, how large a batch, on what."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    """What is saved and what a run starts from."""
    algorithms: dict[str, Annotated[Any, "algorithm"]] = field(default_factory=dict)
    """Changes to model or training, by label."""
    callbacks: dict[str, Annotated[Any, "callback"]] = field(default_factory=dict)
    """What happens beside training, by label."""
    loggers: dict[str, Annotated[Any, "logger"]] = field(default_factory=_tensorboard)
    """Where figures and pictures go, by label."""

    def __post_init__(self) -> None:
        _require((self.run_name.strip(), "run_name: empty; it names the run's folder"))
        self.output = self.output or f"runs/{self.run_name}"


def load(path: str | Path, overrides: list[str], cls: type[Config], missing: list[str] | None = None) -> Config:
    """The config `cls` from a YAML, the YAML it names as `base`, and `key.sub=value` overrides, later ones winning.

    A component that is given another `name` starts without the arguments of the one it replaces.

    Args:
        path: the YAML.
        overrides: `key.sub=value` texts, values read as YAML.
        cls: the dataclass that says which keys there are.
        missing: receives input paths that do not exist; where None, they are errors like all others.

    Raises:
        ConfigError: everything that is wrong, one line each.
    """
    values = merge(_read(Path(path)), _parse(overrides))
    try:
        values = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([_one_line(error, str(path))]) from None
    checker = Checker(COMPONENTS)
    config = checker.section(cls, values, "")
    errors = checker.errors + (checker.missing if missing is None else [])
    if errors:
        raise ConfigError(errors)
    if missing is not None:
        missing += checker.missing
    return config


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The YAML's plain values, merged over those of its `base` (a path beside it), interpolations left as they are."""
    named = f" (the base of {seen[-1].name})" if seen else ""
    if not path.is_file():
        raise ConfigError([f"{path}: no such YAML file{named}{_similar_file(path)}"])
    if path.resolve() in seen:
        raise ConfigError([f"{path}: is its own base, by way of {', '.join(file.name for file in seen)}"])
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: not readable as YAML: {_one_line(error)}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{path}: expected keys and values at the top level"])
    base = values.pop("base", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ConfigError([f"{path}: base: expected the path of a YAML, from this one's folder, got {base!r}"])
    return merge(_read(path.parent / base, (*seen, path.resolve())), values)


def _similar_file(path: Path) -> str:
    """A hint for a YAML that is not there: one of a similar name, shipped or beside it."""
    files = {file.name: file for folder in (ROOT / "yamls", path.parent) for file in folder.glob("*.yaml")}
    close = difflib.get_close_matches(path.stem, [Path(name).stem for name in files], n=1)
    return f"; did you mean {files[f'{close[0]}.yaml']}?" if close else ""


def _parse(overrides: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    errors = []
    for override in overrides:
        if "=" not in override or override.startswith(("-", "=")):
            errors.append(f"{override}: expected key=value on the command line (or --help, --dry-run)")
            continue
        try:
            values = merge(values, OmegaConf.to_container(OmegaConf.from_dotlist([override]), resolve=False))
        except (OmegaConfBaseException, yaml.YAMLError) as error:
            errors.append(f"{override}: not readable as YAML: {_one_line(error)}")
    if errors:
        raise ConfigError(errors)
    return values


def merge(below: Any, above: Any) -> Any:
    """`above` laid over `below`, key by key; lists and components of another name are replaced whole."""
    if not (isinstance(below, Mapping) and isinstance(above, Mapping)):
        return above
    if "name" in above and "name" in below and above["name"] != below["name"]:
        return dict(above)
    merged = dict(below)
    for key, value in above.items():
        merged[key] = merge(below[key], value) if key in below else value
    return merged


def to_yaml(config: Any) -> str:
    """The resolved config as YAML that `load` reads back: what is printed and saved beside the checkpoints."""
    return yaml.dump(_escaped(plain(config)), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _escaped(value: Any) -> Any:
    """Texts that hold ${ as OmegaConf reads them back, instead of taking them for interpolations."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value


def _one_line(error: Exception, where: str = "") -> str:
    """An error of OmegaConf or PyYAML as one line, the key that it is about first."""
    key = getattr(error, "full_key", None) or where
    text = " ".join(str(error).split("\n    full_key")[0].split())
    if isinstance(error, GrammarParseError):
        text += r"; a text that holds ${ is written \${"
    return f"{key}: {text}" if key else text
