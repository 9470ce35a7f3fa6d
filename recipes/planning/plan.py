"""What `recipes/plan.py` prints: the best way to train a recipe on each number of devices, and the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch._dynamo  # noqa: F401 - it must be imported before the meta device is the default one

from data.cost import Epoch, count_text, size_text
from recipes.config.build import build_on_meta, without_values
from recipes.config.recipe import Recipe
from recipes.planning.batches import blank_batch, sample_bytes, stored_bytes, traced_model
from recipes.planning.costs import costs_of, parameter_counts, plan_of
from recipes.planning.devices import Devices
from recipes.planning.divided_run import USABLE, Cluster, DividedRun, Setting
from recipes.planning.hardware.gpus import DEVICES
from recipes.planning.length import Length, length_of
from recipes.planning.settings import Check, best_of, no_check, runs_of, settings_of
from recipes.planning.tensor_parallel import keep_part
from recipes.planning.tracing.levers import apply_levers
from recipes.planning.tracing.pass_memory import Passes, passes_of
from recipes.planning.tracing.trace import NUMBERS, Traces, traces_of

MOST_DOUBLINGS = 7  # of the number of devices, in the search for one that a model fits on


class Planner:
    """Plans of one recipe, for any devices."""

    def __init__(self, recipe: Recipe, check: Check = no_check) -> None:
        """
        Args:
            recipe: checked.
            check: see `runs_of`.

        Raises:
            ValueError: the model cannot be built, its batches are not known, or the data does not fit it.
        """
        self.recipe = recipe
        self.check = check
        self.task = build_on_meta(traced_model(recipe))
        self.batches = tuple(blank_batch(recipe, self.task, number) for number in NUMBERS)
        self.sample_bytes = stored_bytes(recipe) or sample_bytes(self.batches[0])
        kind = type(getattr(self.task, "denoiser", self.task)).__name__
        reason = f"model: the operations of {kind} depend on values of tensors, and cannot be planned without"
        with without_values(reason, "measure it instead"):
            self.traces = traces_of(self.task, self.batches)
        self.costs = costs_of(recipe, plan_of(recipe, self.task, Devices(1, 1)))
        self._divided = {1: self.traces}
        self._passes: dict[int, Passes] = {}

    def settings(self, cluster: Cluster) -> list[Setting]:
        """All ways to train it there. Raises ValueError where the batch does not divide."""
        return list(settings_of(self.runs(cluster)))

    def runs(self, cluster: Cluster, left_out: dict[str, str] | None = None) -> Iterator[DividedRun]:
        """All ways to divide it there. Raises ValueError where the batch does not divide. See `runs_of`."""
        own = (self.recipe, self.task, self.divided, self.passes, self.batches[0])
        return runs_of(*own, cluster, self.check, left_out)

    def divided(self, devices: int) -> Traces:
        """The traces of one of the devices that divide each matrix."""
        if devices not in self._divided:
            part = build_on_meta(traced_model(self.recipe))
            keep_part(part, devices)
            self._divided[devices] = traces_of(part, self.batches, self.traces.low.visible)
        return self._divided[devices]

    def passes(self, devices: int) -> Passes:
        """The memory of the passes of one of the devices that divide each matrix."""
        if devices not in self._passes:
            part = build_on_meta(traced_model(self.recipe))
            if devices > 1:
                keep_part(part, devices)
            apply_levers(self.recipe, part)
            self._passes[devices] = passes_of(part, lambda samples: blank_batch(self.recipe, part, samples))
        return self._passes[devices]

    def report(self, clusters: Iterable[Cluster], price: float | None) -> str:
        """A text about all clusters.

        Args:
            clusters: on which the recipe may be trained.
            price: of a device for an hour; None: no costs.

        Raises:
            ValueError: the batch does not divide over the devices, or nothing fits.
        """
        parameters, _ = parameter_counts(self.task)
        samples, algorithms = self.recipe.training.global_batch, self.recipe.algorithms.items()
        length = self.recipe.training.duration if self.steps is None else f"{self.steps:,} steps"
        lines = [f"{self.recipe.run_name}: {parameters:,} parameters, {samples:,} samples per step, {length}"]
        size, averaged = self.costs.checkpoint_bytes(parameters), self.costs.averaged_bytes
        late = f", {size_text(size + averaged)} with the average" if averaged else ""
        costs = self.costs.algorithms
        errors = sum(costs[label].checkpoint_bytes for label, own in algorithms if own.name == "powersgd")
        late += f", {size_text(errors)} less in settings without powersgd" if errors else ""
        sample = size_text(self.sample_bytes) if self.sample_bytes >= 1e5 else f"{self.sample_bytes / 1e3:,.1f} kB"
        lines.append(f"stored: {size_text(size)} per checkpoint{late}, {sample} per sample")
        for cluster in clusters:
            lines += ["", *self._lines(cluster, price)]
        return "\n".join(lines)

    @property
    def length(self) -> Length:
        """Of the run, as far as the size of the data is known here."""
        return length_of(self.recipe, self.costs.data.epoch or Epoch(None))

    @property
    def steps(self) -> int | None:
        """Steps of the run; None where the size of the data is not known here."""
        return self.length.steps

    def _lines(self, cluster: Cluster, price: float | None) -> list[str]:
        left_out: dict[str, str] = {}
        settings = list(settings_of(self.runs(cluster, left_out)))
        best = best_of(settings, cluster.device)
        room = size_text(USABLE * cluster.device.memory)
        title = f"{count_text(cluster.world, 'GPU')} ({cluster.device.name}, {room} usable of each)"
        if best is None:
            least = min(settings, key=lambda setting: setting.memory.total)
            larger = [name for name, device in DEVICES.items() if least.memory.fits(device)]
            where = f", which fits on {', '.join(larger)}" if larger else "; no device of the table has it"
            more = self._more(cluster)
            where += f"; or on {more} GPUs of this kind" if more else "; nor does it fit on more GPUs of this kind"
            return [f"{title}: nothing fits; the least is {least}: {size_text(least.memory.total)}{where}"]
        lines = [f"{title}: {best}", *self._details(best, cluster, price)]
        for way in dict.fromkeys(setting.way for setting in settings):
            lines.append("  " + self._other(way, [setting for setting in settings if setting.way == way], cluster))
        # Among them may be the fastest way.
        return [*lines, *(f"  {way}: left out: {message}" for way, message in left_out.items())]

    def _more(self, cluster: Cluster) -> int | None:
        """The least number of devices that the model fits on, of some machines; None: it does not, or not as far as
        the batch divides."""
        # Memory does not depend on links, whose rates may not be known for more devices than these.
        device = dataclasses.replace(cluster.device, within=1.0, between=1.0)
        for doublings in range(1, MOST_DOUBLINGS + 1):
            larger = dataclasses.replace(cluster, device=device, world=cluster.world << doublings)
            try:
                if any(run.memory(1, True).fits(cluster.device) for run in self.runs(larger)):
                    return larger.world
            except ValueError:  # the batch does not divide any further
                return None
        return None

    def _details(self, best: Setting, cluster: Cluster, price: float | None) -> Iterable[str]:
        memory, time = best.memory, best.time
        yield (
            f"  memory  {size_text(memory.total)}: state {size_text(memory.state)}, working weights "
            f"{size_text(memory.working)}, buckets {size_text(memory.buckets)}, algorithms "
            f"{size_text(memory.algorithms)}, activations {size_text(memory.activations)}, others "
            f"{size_text(memory.others)}"
        )
        yield (
            f"  step    {time.total:.3f} s, bound by {time.bound}: arithmetic {time.compute:.3f}, memory traffic "
            f"{time.traffic:.3f}, gaps {time.gaps:.3f}, update {time.update:.3f}"
            + (f", exposed messages {time.exposed:.3f}" if time.exposed else "")
        )
        yield f"  beside  messages {time.messages:.3f} s, launches {time.host:.3f} s"
        rate = self.recipe.training.global_batch / time.total
        per_machine = rate * self.sample_bytes / max(1, cluster.world / cluster.machine)
        read = f"{size_text(per_machine)}/s read by each machine"
        yield f"  rate    {rate:,.0f} samples/s, {rate / cluster.world:,.1f} per GPU, {read}"
        if self.steps is not None:
            hours = self.steps * time.total / 3600
            all_hours = hours * cluster.world
            cost = "" if price is None else f", {_figure(price * all_hours, 0)} at {price:g} per GPU-hour"
            yield f"  run     {_figure(hours, 1)} hours, {_figure(all_hours, 0)} GPU-hours{cost}"

    def _other(self, way: str, own: list[Setting], cluster: Cluster) -> str:
        chosen = best_of(own, cluster.device)
        if chosen is None:
            least = min(own, key=lambda setting: setting.memory.total)
            return f"{way}: does not fit, {size_text(least.memory.total)} at the least"
        text = f"{chosen}: {chosen.time.total:.3f} s, {size_text(chosen.memory.total)}"
        alike = [s for s in own if (s.division, s.recompute) == (chosen.division, chosen.recompute)]
        larger = [s for s in alike if s.microbatch > chosen.microbatch]
        if larger:
            following = min(larger, key=lambda s: s.microbatch)
            if not following.memory.fits(cluster.device):
                return f"{text}; microbatch {following.microbatch} would take {size_text(following.memory.total)}"
            gain = 1 - following.time.total / chosen.time.total
            return f"{text}; microbatch {following.microbatch} would gain {gain:.1%}"
        return text


def _figure(value: float, places: int) -> str:
    """A number with so many decimal places; one below 1, of a short run, with two digits."""
    return f"{value:.2g}" if 0 < value < 1 else f"{value:,.{places}f}"
