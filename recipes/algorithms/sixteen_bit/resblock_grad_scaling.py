"""The lever of per-residual-block gradient scaling (Ramesh et al. 2021, section 2.4)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from data.cost import Cost, Plan
from recipes.algorithms.gradients.blocks import block_matrices
from recipes.algorithms.sixteen_bit.adam16 import Adam16
from recipes.algorithms.sixteen_bit.block_scaling import Scales, scale_branch, unscale
from recipes.algorithms.sixteen_bit.fp16_weights import store
from recipes.models.shared_parameters import shared_across
from recipes.training.lever import Lever
from recipes.training.ranks import all_reduce
from recipes.training.run import Run
from recipes.training.transfer import sent

# Batches between figures of the scales. Without an overflow they grow by a tenth in the binary logarithm, and those of
# 128 blocks in each of 430,000 batches would be gigabytes.
LOGGED = 100


class ResblockGradScaling(Lever):
    """Runs residual blocks in fp16, each with its own gradient scale; everything else stays in 32 bits.

    It needs training.precision fp32, because it sets the precision of blocks itself. An update in which any block
    overflowed is skipped. As published, the matrices of blocks and their gradients can be stored in 16 bits, too. Other
    parameters (gains, biases, embeddings and unembeddings) keep 32.
    """

    def __init__(
        self,
        task: nn.Module,
        low_rank: bool = False,
        samples: int = 1,
        *,
        start: float = 13.0,
        least: float = 7.0,
        most: float = 24.0,
        weights: Literal["fp32", "fp16"] = "fp32",
    ) -> None:
        """`low_rank` is whether powersgd averages the gradients, which then skips updates itself. `samples` is the
        number of samples in the batch of a rank.

        Args:
            task: a model with residual blocks: each has a module `branch`, and returns x + branch(x).
            start: binary logarithm of the scales at the start of a run.
            least: binary logarithm of the smallest scale.
            most: binary logarithm of the largest scale.
            weights: number format in which the matrices of blocks and their gradients are stored. fp16 takes half the
                memory, and rounds each update of a weight to its 11 bits; it needs the optimizer adam16 and
                cannot be combined with training.fsdp or powersgd.

        Raises:
            ValueError: blocks without a branch, a branch that shares a parameter, bounds that contradict each other, or
                16-bit weights with powersgd.
        """
        if weights == "fp16" and low_rank:
            raise ValueError(
                "resblock_grad_scaling: weights: fp16 does not work together with powersgd, which adds 32-bit "
                "gradients to its errors; remove one of them"
            )
        if not -126 <= least <= start <= most <= 127:
            raise ValueError(
                f"resblock_grad_scaling: least <= start <= most must hold, got {least}, {start}, {most}; give numbers "
                "from -126 to 127, as scales are float32"
            )
        blocks = list(task.blocks())
        wrong = [type(block).__name__ for block in blocks if not hasattr(block, "branch")]
        if not blocks or wrong:
            raise ValueError(
                f"resblock_grad_scaling: {type(task).__name__} has "
                + (f"blocks of {wrong[0]} without a residual branch" if wrong else "no blocks")
                + "; it is for models whose blocks are x + branch(x)"
            )
        self.branches: list[nn.Module] = [block.branch for block in blocks]
        for parameter, names in shared_across(task, self.branches):
            if parameter.requires_grad:
                raise ValueError(
                    f"resblock_grad_scaling: {' and '.join(names)} are one parameter, whose gradient would be a sum of "
                    "gradients with different scales; remove the lever, or give each block its own parameters"
                )
        self.parameters: list[list[nn.Parameter]] = []  # of each branch, once the model is sharded
        self.matrices = block_matrices(task, "resblock_grad_scaling") if weights == "fp16" else None
        self.scales = Scales.new(len(blocks), start)
        self.scales.least, self.scales.most = least, most
        self.skipped = 0
        self.lowers = False  # whether blocks overflowed in the last batch, all of whose scales can become smaller
        self.on_device = torch.empty(0)  # (blocks,) the scales that the branches read
        self.factors = torch.empty(0)  # (blocks,) in 16-bit gradients, from the backward pass to the optimizer's step
        self.filtered = torch.empty(0, dtype=torch.int64)
        self.unscaled: set[int] = set()  # ids of the parameters whose gradients are unscaled in the present batch
        # Of these, for each block, on this rank: whether they overflowed, and how many are not finite.
        self.overflowed: list[Tensor | None] = [None] * len(blocks)
        self.counted: list[Tensor | None] = [None] * len(blocks)
        self.nonfinite = torch.zeros(len(blocks), dtype=torch.int64)  # in the last update, see `_count`
        self.low_rank = low_rank
        self.samples = samples

    def change_modules(self, run: Run) -> None:
        if run.precision != "fp32":
            reason = {
                "amp_bf16": "bf16 has the exponents of 32-bit floats, so its gradients need no scale",
                "amp_fp16": "it would add its own scale for all blocks",
            }[run.precision]
            raise ValueError(
                f"resblock_grad_scaling: training.precision is {run.precision}: {reason}; use fp32 with it, or "
                "remove it"
            )
        self.on_device = self.scales.values().to(run.device)
        self.filtered = torch.zeros(len(self.branches), dtype=torch.int64, device=self.on_device.device)
        for branch, scale, filtered in zip(self.branches, self.on_device, self.filtered, strict=True):
            scale_branch(branch, scale, filtered)
        if self.matrices is not None:
            self.factors = self.on_device.clone()
            for matrices, factor in zip(self.matrices, self.factors, strict=True):
                store(matrices, factor)

    def check_run(self, run: Run) -> None:
        if self.matrices is not None and not isinstance(run.optimizer, Adam16):
            raise ValueError(
                "resblock_grad_scaling: weights: fp16 needs the optimizer adam16, which knows of the scales in 16-bit "
                "gradients"
            )

    def begin(self, run: Run) -> None:
        self.check_run(run)
        self.parameters = [list(branch.parameters()) for branch in self.branches]
        self.on_device.copy_(self.scales.values())

    @classmethod
    def cost(cls, args: dict[str, Any], plan: Plan) -> Cost:
        """Values that are stored in 16 bits, and the number format in which FSDP gathers blocks, see `data.cost`."""
        if args["weights"] == "fp32":
            return Cost(gathered="fp16")
        low = sum(p.numel() for matrices in block_matrices(plan.task, "resblock_grad_scaling") for p in matrices)
        return Cost(gathered="fp16", stored_16_bit=low)

    @torch.no_grad()
    def unscale_block(self, number: int, complete: Iterable[nn.Parameter] | None = None) -> None:
        """Divide gradients of a block by its scale, once per batch, and remember whether they overflowed.

        PowerSGD finds out by itself which gradients are not finite. For it, an infinity is written into one of the
        gradients of a block in which values were filtered, if possible of a matrix, which it compresses first.

        Args:
            number: of the block.
            complete: parameters whose gradients are complete; None: those of all are.
        """
        known = None if complete is None else {id(p) for p in complete}
        found = [p for p in self.parameters[number] if id(p) not in self.unscaled and (known is None or id(p) in known)]
        self.unscaled |= {id(p) for p in found}
        gradients = _gradients(found)
        finite = unscale(gradients, self.on_device[number])
        if self.matrices is not None:
            self.factors[number].copy_(self.on_device[number])
        overflowed = ~finite | (self.filtered[number] > 0)
        earlier = self.overflowed[number]
        self.overflowed[number] = overflowed if earlier is None else overflowed | earlier
        if not self.low_rank:
            return
        count, earlier = _nonfinite(gradients, self.filtered), self.counted[number]  # before averaging changes them
        self.counted[number] = count if earlier is None else count + earlier
        seen = max((g for g in gradients if g.numel()), key=Tensor.dim, default=None)
        if seen is not None:
            seen.select(0, 0).masked_fill_(overflowed, torch.inf)

    def unscale_gradients(self, run: Run) -> None:
        """Unscale all blocks, agree with other ranks on overflows, skip the update after any, and adapt the scales."""
        for number in range(len(self.branches)):
            self.unscale_block(number)
        self.unscaled.clear()
        overflowed = torch.stack(self.overflowed).to(torch.int32)
        self.overflowed = [None] * len(self.branches)
        all_reduce(overflowed, "MAX")
        filtered = self.filtered.clone()
        self.filtered.zero_()
        # The host waits once for the device, for both.
        bad, values_filtered = torch.stack([overflowed.to(filtered.dtype), filtered]).cpu()
        bad = bad.bool()
        skipped = bool(bad.any())
        self.nonfinite = self._count(filtered) if skipped else torch.zeros_like(self.nonfinite)
        self.counted = [None] * len(self.branches)
        if skipped:
            self.skipped += 1
            if not self.low_rank:  # otherwise powersgd skips it
                run.skip_update()
        metrics = {}
        if skipped or run.clock.batch % LOGGED == 0:
            exponents = enumerate(self.scales.exponents.tolist())
            metrics |= {f"resblock_grad_scaling/log2_scale/{i:03d}": exponent for i, exponent in exponents}
        metrics |= {f"resblock_grad_scaling/nonfinite/{i:03d}": n for i, n in enumerate(self.nonfinite.tolist()) if n}
        self.lowers = skipped and bool((self.scales.exponents[bad] > self.scales.least).all())
        self.scales = self.scales.after(~bad)
        # In place, because the branches hold views of its elements.
        self.on_device.copy_(sent(self.scales.values().tolist(), torch.float32, self.on_device.device))
        metrics |= {
            "resblock_grad_scaling/skipped": self.skipped,
            "resblock_grad_scaling/overflowed_blocks": int(bad.sum()),
            "resblock_grad_scaling/filtered": int(values_filtered.sum()),
        }
        run.log(metrics)

    def _count(self, filtered: Tensor) -> Tensor:
        """The number of gradients of each block that are not finite, including those that were filtered.

        Called only after an overflow, because it reads all gradients once more. Counts are summed over ranks; gradients
        that DistributedDataParallel has averaged count on each rank.

        Args:
            filtered: (blocks,) int64, the counts of the filters on this rank.

        Returns:
            (blocks,) int64 on the CPU, the same on every rank.
        """
        pairs = zip(self.counted, self.parameters, strict=True)
        counts = [_nonfinite(_gradients(own), filtered) if n is None else n for n, own in pairs]
        counts = torch.stack(counts) + filtered
        all_reduce(counts)
        return counts.cpu()

    def state_dict(self) -> dict[str, Any]:
        """The scales, which are equal on all ranks, and the number of samples of a rank that they are for."""
        return {
            "exponents": self.scales.exponents,
            "since": self.scales.since,
            "skipped": self.skipped,
            "samples": self.samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scales. They move with the number of samples in the batch of a rank.

        The loss of a rank is the mean over its own samples, so a sample's gradient is twice as large on twice as many
        ranks. Scales are close below those that overflow: unchanged, they would overflow there, batch after batch.

        Raises:
            ValueError: the checkpoint has scales for another number of blocks.
        """
        if "exponents" not in state:
            return
        if len(state["exponents"]) != len(self.branches):
            raise ValueError(
                f"resblock_grad_scaling: the checkpoint has {len(state['exponents'])} scales, the model "
                f"{len(self.branches)} blocks"
            )
        moved = math.log2(self.samples / state.get("samples", self.samples))  # earlier checkpoints do not say it
        self.scales.exponents = (state["exponents"].cpu() + moved).clamp(self.scales.least, self.scales.most)
        self.scales.since = state["since"].to("cpu", copy=True)
        self.skipped = state["skipped"]


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients of a branch."""
    found = [p.grad for p in parameters if p.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in found]


def _nonfinite(gradients: list[Tensor], like: Tensor) -> Tensor:
    """The number of gradients that are not finite: a scalar of the dtype and device of `like`."""
    return sum(((~g.isfinite()).sum() for g in gradients), start=like.new_zeros(()))
