"""How long a run is, in optimizer steps, samples and epochs, and how its batches are divided."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data.cost import Epoch, count_text
from recipes.config.recipe import Recipe, Training
from recipes.config.values import plain_values

IN_EPOCHS = re.compile(r"[\d.]+ep")
DURATION = re.compile(r"([\d.]+)(ba|ep|sp|dur)")


@dataclass(frozen=True)
class Length:
    """How long a run is. What depends on the size of the data is None where that is not known.

    Attributes:
        steps: optimizer steps of the run.
        epoch_steps: optimizer steps per epoch.
        batch: samples per step, over all devices.
        epoch_samples: samples per epoch, if its last batch has fewer than the others; None: all have as many.
        duration: of the recipe, of which "0.1dur" is a share; None: the steps.
    """

    steps: int | None
    epoch_steps: int | None
    batch: int
    epoch_samples: int | None = None
    duration: str | None = None

    @property
    def samples(self) -> int | None:
        """Samples that the run is trained on, over all devices."""
        if self.steps is None or self.epoch_samples is None:
            return None if self.steps is None else self.steps * self.batch
        epochs, rest = divmod(self.steps, self.epoch_steps)
        return epochs * self.epoch_samples + rest * self.batch

    def steps_in(self, duration: str) -> float | None:
        """A duration in optimizer steps, such as 25.0 for "1ep"."""
        number, unit = DURATION.fullmatch(duration).groups()
        if unit == "sp":
            return self._steps_of(float(number))
        steps = {"ba": 1.0, "ep": self.epoch_steps, "dur": self.steps}[unit]
        return None if steps is None else float(number) * steps

    def _steps_of(self, samples: float) -> float:
        """A number of samples in optimizer steps."""
        if self.epoch_samples is None:
            return samples / self.batch  # by a factor of 1 / batch, 7 batches of 75 would be slightly more than 7
        epochs, rest = divmod(samples, self.epoch_samples)
        return epochs * self.epoch_steps + rest / self.batch

    def times(self, every: str | None) -> int | None:
        """How often something happens that is due at an interval and at the end of the run; None: not known.

        Args:
            every: the interval; None: only the end of the run.
        """
        if every is None:
            return 1
        if self.steps is None:
            return None
        number, unit = DURATION.fullmatch(every).groups()
        interval = float(number)
        if unit == "dur":  # counted in the unit of the run, as the run itself does
            whole, unit = DURATION.fullmatch(self.duration or f"{self.steps}ba").groups()
            interval *= float(whole)
        if unit == "ep":
            if self.epoch_steps is None:
                return None
            interval *= self.epoch_steps
        done, step = (self.samples, self.batch) if unit == "sp" else (self.steps, 1)
        if interval < step:
            return self.steps
        multiples = math.floor(done / interval + 1e-9)
        last = multiples * interval
        # The step in which a multiple lies is the one that acts.
        last = math.ceil(round(self._steps_of(last) if unit == "sp" else last, 6))
        return multiples + (last < self.steps)


def length_of(recipe: Recipe, epoch: Epoch, ranks: int = 1) -> Length:
    """The length of a run whose training data has epochs of this size.

    Args:
        recipe: checked.
        epoch: of the training data.
        ranks: number of devices, or groups of them, that read different samples.

    Raises:
        ValueError: an epoch has fewer samples than a batch, or the data has no epochs, in which a duration is given.
    """
    for key, duration in in_epochs(plain_values(recipe)) if epoch.endless else ():
        raise ValueError(
            f"{key}: {duration}, and the data {recipe.data.name} is a stream without end, which has no epochs; give "
            "batches (ba) or samples (sp)"
        )
    batch = recipe.training.global_batch
    epoch_steps = epoch_samples = None
    if epoch.samples is not None:
        samples = math.ceil(epoch.samples / ranks) * ranks  # some are repeated, so that all ranks have equally many
        epoch_steps = math.ceil(samples / batch) if epoch.incomplete_batch else samples // batch
        if epoch_steps == 0:
            raise ValueError(
                f"training.global_batch: {batch} is more than the {epoch.samples} samples of an epoch; give as many or "
                "fewer"
            )
        epoch_samples = samples if epoch.incomplete_batch else None
    steps = Length(None, epoch_steps, batch, epoch_samples).steps_in(recipe.training.duration)
    steps = None if steps is None else math.ceil(steps)
    return Length(steps, epoch_steps, batch, epoch_samples, recipe.training.duration)


def in_epochs(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The full path of each key whose value is a duration in epochs, and the value."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from in_epochs(value, f"{path}{key}.")
        elif isinstance(value, str) and IN_EPOCHS.fullmatch(value) and path:  # run_name is no duration
            yield path + key, value


def batch_text(training: Training, world: int) -> str:
    """How the global batch is divided over devices and microbatches.

    Raises:
        ValueError: the batch does not divide over the devices.
    """
    per_device = training.device_batch(world)
    devices = count_text(world, "device")
    text = f"{training.global_batch:,} samples per step over {devices} (WORLD_SIZE), {per_device:,} on each"
    if training.microbatch == "auto":
        return f"{text}, in the largest microbatches that fit into memory"
    microbatch = min(training.microbatch or per_device, per_device)
    count = math.ceil(per_device / microbatch)
    last = per_device - (count - 1) * microbatch
    rest = f", the last of {last:,}" if last != microbatch else ""
    return f"{text}, in {count_text(count, 'microbatch', 'microbatches')} of {microbatch:,}{rest}"


def length_text(recipe: Recipe, length: Length) -> str:
    """Steps, samples and epochs of a run, and whether it ends within the warm-up of its schedule."""
    if length.steps is None:
        return (
            f"{recipe.training.duration}; the number of steps depends on data that is not on this machine or has no "
            "manifest"
        )
    text = f"{count_text(length.steps, 'step')}, {count_text(length.samples, 'sample')}"
    if length.epoch_steps is not None:
        text += f", {length.steps / length.epoch_steps:,.2f} epochs of {count_text(length.epoch_steps, 'step')}"
    warmup = str(recipe.schedule.args.get("warmup"))
    if DURATION.fullmatch(warmup) and (length.steps_in(warmup) or 0) > length.steps:
        text += f"; it ends within the warm-up of {warmup}, below optimizer.lr: shorten schedule.warmup"
    return text


def times_text(every: str | None, length: Length) -> str:
    """How often something happens: "55 times, every 10000ba"."""
    if every is None:
        return "once, at the end"
    count = length.times(every)
    return f"every {every}" if count is None else f"{count_text(count, 'time')}, every {every}"
