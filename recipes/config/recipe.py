"""The sections of a training recipe, and the check of a YAML and `key=value` overrides against them.

Nothing slow is imported here: a mistake in a config is reported before torch is imported.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml

from data.aliases import Duration, InputPath
from data.remote.stores import FORMS, STORES, malformed, scheme_of
from recipes.config.components import COMPONENTS
from recipes.config.entry_points import all_components
from recipes.config.keys import unknown_key
from recipes.config.reading import read_values
from recipes.config.schema import Checker
from recipes.config.values import Component, ConfigError, Dumper, plain_values

Config = TypeVar("Config")


@dataclass(kw_only=True)
class FSDP:
    """Sharding of parameters, gradients and optimizer state over devices, by PyTorch's FSDP2."""

    strategy: Literal["SHARD_GRAD_OP", "FULL_SHARD"] = "SHARD_GRAD_OP"
    """SHARD_GRAD_OP keeps gathered parameters until the backward pass; FULL_SHARD frees them and gathers them again."""
    wrap: Literal["blocks", "model"] = "blocks"
    """What is gathered at once: one block of the network, or the whole network."""
    parameters: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of the gathered parameters of blocks, or with `wrap: model` of all. Norms, what is outside of the
    blocks, shards, reduced gradients and optimizer state are always fp32. auto: bf16 if the precision is amp_bf16; fp16
    if resblock_grad_scaling runs the blocks in fp16; else fp32."""
    replicas: int | Literal["machines"] = 1
    """Number of device groups that each hold the whole model. 1: it is sharded over all devices; machines: within each
    machine."""
    sync: Literal["microbatch", "batch"] = "microbatch"
    """When gradients are reduced over the shards: after each microbatch, or once per batch, which takes memory for
    fp32 gradients of the whole model. Between replicas they are always averaged once per batch."""
    checkpoints: Literal["sharded", "full"] = "sharded"
    """sharded: each device writes its part; full: the first device writes all. Both load on any number of devices."""

    def __post_init__(self) -> None:
        valid = self.replicas == "machines" or self.replicas >= 1
        _require((valid, f"replicas: {self.replicas}; give 1 or more, or machines"))

    def replicas_in(self, world: int, machine: int, tensor_parallel: int = 1) -> int:
        """The number of replicas among `world` devices, `machine` of which are in each machine.

        Raises:
            ValueError: it does not divide the number of devices, or of tensor parallel groups, or the devices are not
                those of whole machines.
        """
        if self.replicas == "machines" and world % machine:
            raise ValueError(
                f"training.fsdp.replicas: machines needs whole machines; {world} devices (WORLD_SIZE) are not a "
                f"multiple of {machine} in each machine (LOCAL_WORLD_SIZE)"
            )
        replicas = world // machine if self.replicas == "machines" else self.replicas
        if world % (replicas * tensor_parallel):
            of = "" if tensor_parallel == 1 else f" in groups of {tensor_parallel}"
            raise ValueError(f"training.fsdp.replicas: {replicas} does not divide {world} devices{of}")
        return replicas


@dataclass(kw_only=True)
class Training:
    """Length of the run, batch size, precision and devices."""

    engine: Literal["composer", "lightning"] = "composer"
    """The library whose trainer runs the recipe: MosaicML Composer or PyTorch Lightning. Results are the same."""
    duration: Duration
    """Length of the run in batches (ba), epochs (ep) or samples (sp), such as 2000ba."""
    global_batch: int
    """Samples per optimizer step, over all devices."""
    microbatch: int | Literal["auto"] | None = None
    """Samples per forward and backward pass on each device; gradients are accumulated over the microbatches of a batch.
    null: the whole batch of the device; auto: the largest microbatch that fits into the memory of every GPU, found
    during the first batches (on a CPU the whole batch)."""
    precision: Literal["auto", "fastest", "fp32", "amp_bf16", "amp_fp16"] = "auto"
    """Number format of the forward and backward pass. auto: amp_bf16 on a GPU, fp32 on a CPU. fastest: amp_bf16 on a
    GPU and on a CPU that has instructions for it (AVX512-BF16, AMX), else fp32. A CPU hardly gains from amp_fp16. With
    every format, GPUs that have TF32 use it to multiply fp32 numbers: factors have 11 significant bits, sums 32
    bits."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: the GPU if there is one, else the CPU; a run on several machines needs cpu if they have no GPU."""
    eval_every: Duration | None = None
    """Interval of validation; null: only at the end of the run. The end always validates."""
    grad_clip: float | None = None
    """Largest L2 norm of the gradient of all parameters; larger gradients are scaled down to it. null: no clipping."""
    nonfinite_limit: int = 20
    """Number of batches in a row with a loss or gradients that are not finite, after which the run ends with a report.
    The update of each such batch is skipped."""
    watchdog: float | None = 300.0
    """Seconds without progress after which each rank prints the call in which it waits and writes its stacks into the
    output folder. The line is also printed if compiling, or drawing a sample grid, takes longer. null: never."""
    watchdog_ends: bool = False
    """Whether a rank that has printed this line then exits with status 86: shortly after the line if it hangs within a
    batch; after an hour if it may be compiling the first batch, validating, drawing, exporting or saving a
    checkpoint."""
    fsdp: FSDP | None = None
    """Sharding over devices; null: each device holds the whole model (DDP)."""
    tensor_parallel: int = 1
    """Number of neighbouring devices that divide each layer's matrices and compute a batch together; 1: every device
    computes its own batch. The models `autoregressive`, `language` and the denoiser `dit` support it. More than one
    such group needs `fsdp`."""
    sequence_parallel: bool = False
    """Whether the devices of such a group also divide the positions of norms, residual stream and dropout. The
    activations of a layer then take 1/N of the memory on each device, and communication grows by a quarter."""
    tensor_between_machines: bool = False
    """Whether such a group may span several machines. The links between machines are slower than those within a
    machine."""
    progress_bar: bool = False
    """Show the progress bar of the engine, in addition to the lines of the `progress` callback."""

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
            (self.nonfinite_limit >= 1, f"nonfinite_limit: {self.nonfinite_limit}; give 1 or more"),
            (self.tensor_parallel >= 1, f"tensor_parallel: {self.tensor_parallel}; give 1 or more"),
            (
                not self.sequence_parallel or self.tensor_parallel > 1,
                "sequence_parallel: true without tensor_parallel above 1",
            ),
            (
                self.watchdog is None or self.watchdog > 0,
                f"watchdog: {self.watchdog}; give seconds above 0, or null",
            ),
            (not self.watchdog_ends or self.watchdog is not None, "watchdog_ends: true without watchdog"),
        )

    def groups(self, world: int, machine: int | None = None) -> int:
        """Number of groups of `tensor_parallel` devices, each of which computes its own part of the batch.

        Args:
            world: number of devices.
            machine: number of devices in each machine; None: not checked.

        Raises:
            ValueError: `world` devices are not a whole number of groups, or a machine is not.
        """
        devices = self.tensor_parallel
        if world % devices:
            raise ValueError(f"training.tensor_parallel: {devices} does not divide {world} devices (WORLD_SIZE)")
        if machine is not None and machine % devices and not self.tensor_between_machines:
            raise ValueError(
                f"training.tensor_parallel: groups of {devices} devices do not fit into machines of {machine} "
                "(LOCAL_WORLD_SIZE); give a number that divides it, or training.tensor_between_machines=true"
            )
        return world // devices

    def device_batch(self, world: int) -> int:
        """Samples per optimizer step on each of `world` devices, which devices of one tensor parallel group share.

        Raises:
            ValueError: the batch does not divide evenly.
        """
        groups = self.groups(world)
        if self.global_batch % groups:
            what = "devices" if self.tensor_parallel == 1 else f"groups of {self.tensor_parallel} devices"
            raise ValueError(f"training.global_batch: {self.global_batch} does not divide over {groups} {what}")
        return self.global_batch // groups


@dataclass(kw_only=True)
class Checkpoints:
    """What is saved, and what a run starts from."""

    save: bool = True
    """Whether checkpoints are saved."""
    every: Duration | None = None
    """Interval of checkpoints; null: only at the end of the run. The end always saves one."""
    minutes: float | None = None
    """Longest time between checkpoints, in minutes: one is also saved after the first batch that ends so long after the
    one before. null: any time."""
    keep: int = 2
    """How many of the newest checkpoints are kept on disk; -1 keeps all."""
    bucket: str | None = None
    """Address in an object store to which each checkpoint is also copied: s3://BUCKET/FOLDER, gs://BUCKET/FOLDER or
    azure://ACCOUNT.blob.core.windows.net/CONTAINER/FOLDER. A run whose output folder has no checkpoint, or an older
    one, resumes from there. null: no copies."""
    load_path: InputPath | None = None
    """Checkpoint to resume from: a file, the folder of a sharded one, or a remote address. Weights, the optimizer's
    state and step are restored. A run that resumes from a checkpoint of its own does not read it."""
    load_weights: InputPath | None = None
    """Folder from which only the weights are loaded: an export of a run, or a folder of diffusers with safetensors.
    Step, optimizer and schedule start at the beginning. A run that resumes does not read it."""
    autoresume: bool = True
    """Whether a run whose output folder has checkpoints resumes from the newest one. A recipe that has changed since is
    refused, except for a longer duration and for `allow_changes`."""
    allow_changes: list[str] = field(default_factory=list)
    """Keys of the recipe that may have changed since the run was begun, such as optimizer.lr; a key stands for all
    below it."""

    def __post_init__(self) -> None:
        both = self.load_path is not None and self.load_weights is not None
        bucket, scheme = self.bucket, scheme_of(self.load_path or "")
        _require(
            (_positive(self.every), f"every: `{self.every}`; give an interval above 0"),
            (
                self.minutes is None or self.minutes > 0,
                f"minutes: {self.minutes}; give a time above 0, or null for no limit",
            ),
            (
                self.keep == -1 or self.keep >= 1,
                f"keep: {self.keep}; give 1 or more, or -1 for all; save: false for none",
            ),
            (
                bucket is None or (scheme_of(bucket) in STORES and not malformed(bucket) and self.save),
                f"bucket: {bucket}; give {FORMS['s3']}, {FORMS['gs']} or {FORMS['azure']}, and leave save: true",
            ),
            (
                scheme in ("", "oci") or (scheme in STORES and not malformed(self.load_path)),
                f"load_path: {self.load_path}; give a path, or an address: {', '.join(FORMS.values())}",
            ),
            (
                not scheme_of(self.load_weights or ""),
                f"load_weights: {self.load_weights} is remote; copy the folder to a disk first",
            ),
            (not both, "load_weights: load_path loads the weights too; give one of them"),
        )

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from its newest checkpoint; a run that saves none has none."""
        return self.autoresume and self.save


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
    """Name of the run in logs and checkpoints, and of its folder below runs/."""
    output: str | None = None
    """Folder of checkpoints, logs, samples and the resolved config; null: runs/<run_name>."""
    seed: int = 17
    """Seed of the initial weights, the order of samples and the noise; for the noise, each rank adds its number."""
    model: Annotated[Any, "model"]
    """The model to train, with its loss."""
    data: Annotated[Any, "data"]
    """Training data."""
    evals: dict[str, Annotated[Any, "data"]] = field(default_factory=dict)
    """Validation sets, by label."""
    optimizer: Annotated[Any, "optimizer"]
    """The optimizer."""
    schedule: Annotated[Any, "schedule"]
    """The learning rate over the course of the run."""
    training: Training
    """Length of the run, batch size, precision and devices."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    """What is saved, and what a run starts from."""
    algorithms: dict[str, Annotated[Any, "algorithm"]] = field(default_factory=dict)
    """Changes to the model or to the training loop, by label."""
    callbacks: dict[str, Annotated[Any, "callback"]] = field(default_factory=dict)
    """Sample grids, exports, statistics and other observers of the run, by label."""
    loggers: dict[str, Annotated[Any, "logger"]] = field(default_factory=_tensorboard)
    """Where metrics and images are logged, by label. A YAML file that has this key replaces the default, so name
    tensorboard there too; `loggers.LABEL=...` on the command line adds to it."""

    def __post_init__(self) -> None:
        _require(
            (self.run_name.strip(), "run_name: empty; it names the run's folder"),
            (
                all(part not in ("", ".", "..") for part in self.run_name.split("/")) and "\0" not in self.run_name,
                f"run_name: {self.run_name!r} is no folder below runs/; give a name, and another folder as output",
            ),
            (0 <= self.seed < 2**31, f"seed: {self.seed}; give 0 to {2**31 - 1}"),
            (
                not scheme_of(self.output or ""),
                f"output: {self.output} is remote; give a local folder, and the address as checkpoints.bucket",
            ),
            *(
                (problem is None, f"checkpoints.allow_changes: {problem}")
                for problem in (unknown_key(type(self), key) for key in self.checkpoints.allow_changes)
            ),
        )
        self.output = os.path.expanduser(self.output or f"runs/{self.run_name}")

    def goes_on(self, maybe: bool = False) -> bool:
        """Whether there is a checkpoint in the run's folder to resume from. A run that resumes reads neither
        `checkpoints.load_weights` nor `checkpoints.load_path`.

        Args:
            maybe: whether a bucket counts, too, which is asked only when the run starts.
        """
        there = (maybe and self.checkpoints.bucket is not None) or any(Path(self.output, "checkpoints").glob("ep*-ba*"))
        return self.checkpoints.resumes and there


def load_config(path: str | Path, overrides: list[str], cls: type[Config], missing: list[str] | None = None) -> Config:
    """Read a config from a YAML, the YAML that it names as `base`, and `key.sub=value` overrides.

    Overrides take precedence over the YAML, and the YAML over its base. A component that is given another `name` does
    not keep the arguments of the component that it replaces.

    Args:
        path: the YAML.
        overrides: texts of the form `key.sub=value`; the values are read as YAML
            (`recipes.config.scalars`).
        cls: the dataclass that defines the keys, such as `Recipe`.
        missing: a list that receives one line per input path that does not exist; None: such paths are errors.

    Raises:
        ConfigError: all mistakes, one line each.
    """
    values = read_values(path, overrides, {"loggers": plain_values(_tensorboard())} if cls is Recipe else None)
    others = sorted(map(str, values.keys() - {own.name for own in fields(cls)}))
    if len(others) > 1 and 2 * len(others) > len(values):  # instead of a line for each
        raise ConfigError(
            [f"{path}: is for another command, which has {', '.join(others)}; the top of a YAML of yamls/ names it"]
        )
    checker = Checker(all_components())
    config = checker.section(cls, values, "")
    absent = checker.missing
    if isinstance(config, Recipe) and config.goes_on(maybe=missing is None):
        unread = ("checkpoints.load_weights: ", "checkpoints.load_path: ")
        absent = [line for line in absent if not line.startswith(unread)]
    errors = checker.errors + (absent if missing is None else [])
    if errors:
        raise ConfigError(errors)
    if missing is not None:
        missing += absent
    return config


def to_yaml(config: Any) -> str:
    """The resolved config as YAML that `load_config` reads back. It is saved beside the checkpoints."""
    return yaml.dump(_escaped(plain_values(config)), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _escaped(value: Any) -> Any:
    """Escape texts that contain ${, so that OmegaConf does not take them for interpolations."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    if isinstance(value, str) and "${" in value:
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return value
