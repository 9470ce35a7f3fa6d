"""Watches each batch: skips updates whose gradients are not finite, and tells all ranks when the run is to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from data.system.files import write_json
from data.system.log import log
from recipes.algorithms.sixteen_bit.fp16_weights import factor_of
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.training import stop
from recipes.training.checkpoint_names import last_written
from recipes.training.finite import largest_magnitude
from recipes.training.lever import Lever
from recipes.training.ranks import all_reduce, is_first_rank, wait
from recipes.training.run import Run
from recipes.training.transfer import HostCopy

REPORT = "nonfinite.json"
SAVE, STOP = 1, 2  # what ranks ask for: a checkpoint; a checkpoint and the end. The largest of all ranks holds


class Guard(Lever):
    """Skips a batch's update if its gradients are not finite, and ends the run after too many such batches in a row.

    It acts on averaged gradients before they are clipped, which would spread a NaN to all of them, and before the
    optimizer and the average of the weights see them. Under amp_fp16, gradients that are not finite are the business of
    the gradient scaler, which divides its scale by 2 each time, until the scale is 1: what is not finite then is not
    finite by itself. resblock_grad_scaling also skips batches by itself, which count once a scale that overflows cannot
    become smaller. Other batches whose gradients a lever has cleared, as powersgd does, count, and losses always do.
    Ranks agree by one exchange of two numbers per batch, which also says whether one of them got a signal to stop, or
    finds a checkpoint overdue.
    A fused optimizer skips an update by itself, also that of shards. The host then launches the update first, and reads
    at the end of the step whether it was skipped.

    The checkpoint callback of either engine and `export` write nothing while `run.nonfinite` is above 0.
    """

    def __init__(
        self,
        limit: int,
        output: str,
        keys: Callable[[list[int]], dict[int, str]] = lambda _: {},
        scaling: ResblockGradScaling | None = None,
    ) -> None:
        """
        Args:
            limit: number of batches in a row after which the run ends.
            output: folder of the run, for the report.
            keys: finds the keys of samples by their seeds, as far as it can.
            scaling: the lever that scales gradients of blocks.
        """
        self.keys = keys
        self.scaling = scaling
        self.limit = limit
        self.output = Path(output)
        self.skipped = 0  # since this process began
        self._first: int | None = None  # batch at which the present row began
        self._bad = False
        self._flags: HostCopy | None = None  # whether a gradient is not finite, and what ranks ask for
        self._blocks: list[dict[str, Any]] = []
        self._seeds: Tensor | None = None  # of the samples of the last batch that was not finite

    def batch_start(self, run: Run) -> None:
        self._bad = False

    @torch.no_grad()
    def clip_gradients(self, run: Run) -> None:
        """Look at the gradients, and agree with the other ranks."""
        gradients = [p.grad for p in run.trained if p.grad is not None]
        bad = ~largest_magnitude(gradients).isfinite()
        # Filled on the device: the host would wait for the backward pass with a copy of its own memory.
        asks = torch.full((), _asks(run), dtype=torch.int32, device=run.device)
        flags = torch.stack([bad.to(run.device, torch.int32), asks])
        all_reduce(flags, "MAX")
        self._flags = HostCopy(flags)
        if gradients and run.nonfinite + 1 < self.limit and _looks_at_flags(run):
            run.optimizer.found_inf = flags[0].float()  # and the host reads the flags when it has launched the update
            return
        self._read_flags(run)
        if not gradients:  # another lever has skipped the update, on all ranks
            self._bad = self.scaling is None or not self.scaling.lowers
        if self._bad:
            if run.nonfinite + 1 >= self.limit:
                self._blocks = block_norms(run.task)  # now: clipping would spread what is not finite
            run.skip_update()

    def _read_flags(self, run: Run) -> None:
        found, asked = self._flags.tolist()
        run.stopping, run.overdue = asked == STOP, asked == SAVE
        self._flags = None
        stop.begin_batches()  # every rank is here
        self._bad = bool(found) and run.gradient_scale() <= 1.0  # of amp_fp16; 1 otherwise

    def step_end(self, run: Run) -> None:
        """Count.

        Raises:
            ValueError: too many batches in a row were not finite.
        """
        if self._flags is not None:
            run.optimizer.found_inf = None
            self._read_flags(run)
        skipped = self._bad
        self.skipped += skipped
        if run.loss is not None and not math.isfinite(run.loss):
            self._bad = True
        if not self._bad:
            run.nonfinite, self._first = 0, None
            return
        run.nonfinite += 1
        self._seeds = run.batch.get("seed")  # now: at the end of the run, `batch` is the last one of a validation
        self._first = run.clock.batch if self._first is None else self._first
        if run.nonfinite == 1:
            what = ", gradients not finite; its update is skipped" if skipped else " is not finite"
            log.warning(f"batch {run.clock.batch}: loss {run.loss}{what}")
        run.log({"nonfinite/in_a_row": run.nonfinite, "nonfinite/skipped": self.skipped})
        if run.nonfinite >= self.limit:
            raise ValueError(self._stop(run))

    def end(self, run: Run) -> None:
        """At the end of the run.

        Raises:
            ValueError: its last batches were not finite, so that its weights are of no use.
        """
        if run.nonfinite:
            raise ValueError(self._stop(run))

    def _stop(self, run: Run) -> str:
        """Write the report; returns the message."""
        blocks = self._blocks or block_norms(run.task)
        newest = last_written(self.output / "checkpoints")
        seeds = [] if self._seeds is None else self._seeds.tolist()
        keys = self.keys(seeds) if is_first_rank() and seeds else {}
        report = {
            "batch": run.clock.batch,
            "in_a_row": run.nonfinite,
            "since_batch": self._first,
            "epoch": run.clock.epoch,
            "sample": run.clock.sample,
            "loss": str(run.loss),
            "seeds_of_the_last_batch_on_rank_0": seeds,
            "keys_of_the_last_batch_on_rank_0": [keys.get(seed) for seed in seeds],
            "blocks": blocks,
            "last_good_checkpoint": None if newest is None else str(newest),
        }
        if is_first_rank():
            try:
                write_json(self.output / REPORT, report, indent=1)
            except OSError as error:  # which is not why the run ends
                log.warning(f"{self.output / REPORT} could not be written ({error.strerror})")
        wait()  # a launcher would end the first rank when another has ended
        batches = "1 batch was" if run.nonfinite == 1 else f"{run.nonfinite} batches in a row were"
        return (
            f"training: {batches} not finite, since batch {self._first} (loss {run.loss}); "
            f"the last good checkpoint is {newest or 'none'}; lower optimizer.lr or look at {self.output / REPORT}"
        )


def _asks(run: Run) -> int:
    """What this rank asks for at this moment: `STOP`, `SAVE` or 0."""
    if stop.requested():
        return STOP
    return SAVE if time.monotonic() >= run.save_from else 0


def _looks_at_flags(run: Run) -> bool:
    """Whether the optimizer skips an update by itself if its attribute `found_inf` is 1, as gradient scalers ask it to.

    The host then need not wait for the gradients before it launches the update. PyTorch's fused ones do so; one that
    inherits from them, or wraps one of them, may change weights in a step of its own.
    """
    name, kind = "_step_supports_amp_scaling", type(run.optimizer)
    of_torch = kind.step.__module__.startswith("torch.optim.") and vars(run.optimizer).get(name, False)
    fused = of_torch or getattr(kind, name, None) is True
    return fused and run.precision != "amp_fp16"


def block_norms(task: nn.Module) -> list[dict[str, Any]]:
    """L2 norms of weights and gradients of each block, and of all other parameters; texts where not finite.

    Every rank must call it. Gradients of copies of the model are equal on all ranks. Gradients that are stored in 16
    bits count without the factors that they carry.
    """
    names = {id(module): name for name, module in task.named_modules()}
    groups = {names[id(block)]: list(block.parameters()) for block in task.blocks()} if hasattr(task, "blocks") else {}
    inside = {id(p) for parameters in groups.values() for p in parameters}
    groups["the rest"] = [p for p in task.parameters() if id(p) not in inside]
    found = []
    for name, parameters in groups.items():
        used = [p for p in parameters if p.grad is not None]
        gradients = _norm([p.grad for p in used], [factor_of(p) for p in used])
        found.append({"block": name, "weights": _norm(parameters), "gradients": gradients})
    return found


def _norm(tensors: list[Tensor], factors: Sequence[Tensor | None] = ()) -> float | str:
    if not tensors:
        return 0.0
    # In 32 bits: the norm of a 16-bit tensor may be above all 16-bit numbers.
    norms = [torch.linalg.vector_norm(t.detach(), dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    pairs = zip(norms, factors or [None] * len(norms), strict=True)
    total = torch.nn.utils.get_total_norm([norm if factor is None else norm / factor for norm, factor in pairs])
    norm = (total.full_tensor() if isinstance(total, DTensor) else total).item()
    return norm if math.isfinite(norm) else str(norm)
