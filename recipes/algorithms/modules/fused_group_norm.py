"""GroupNorm and SiLU of diffusers' networks in one kernel."""

from __future__ import annotations

from typing import Literal

from torch import nn

from data.system.log import log
from recipes.models.blocks.norms import check_norms, fuse_group_norms
from recipes.models.kernels.fused_norm import TIMES
from recipes.training.lever import Lever
from recipes.training.run import Run


class FusedGroupNorms(Lever):
    """Computes GroupNorm and SiLU in one Triton kernel, forward and backward; to be used with channels_last."""

    def __init__(self, task: nn.Module, *, when: Literal["auto", "always"] = "auto") -> None:
        """See `fuse_group_norms`.

        Args:
            when: auto times each new shape once against eager PyTorch and uses the faster one, with `cuda_graphs` by
                the GPU's own time; on a CPU it leaves the model unchanged. always does not depend on timings, so runs
                repeat exactly.
        """
        self.task = task
        self.when = when
        self.to_report = False

    def change_modules(self, run: Run) -> None:
        if self.when == "always" and run.on_cpu:
            raise ValueError("fused_group_norm: its kernels need a GPU; use auto, or remove the lever")
        check_norms(self.task)
        if run.on_gpu:
            count = fuse_group_norms(self.task, measured=self.when == "auto")
            log.info(f"fused_group_norm: {count} norms, {self.when}")
            run.log_settings({"fused_group_norm": count})
            self.to_report = self.when == "auto"
        else:
            log.info("fused_group_norm: not used, its kernels need a GPU")

    def step_end(self, run: Run) -> None:
        if self.to_report:
            self.report(run)

    def report(self, run: Run) -> None:
        """After the first batch, log which shapes take the kernel."""
        self.to_report = False
        for case, times in TIMES.items():
            shape = "x".join(str(size) for size in case.shape)
            taken = "fused" if times.fused_wins else "PyTorch's"
            where = " in graphs" * case.graphed
            log.info(f"fused_group_norm: {shape}{where} {times.fused:.3f} ms, PyTorch {times.plain:.3f} ms: {taken}")
        if not TIMES:
            log.info("fused_group_norm: not used, no norm had a channels_last input; add channels_last")
        run.log_settings({"fused_group_norm_shapes": sum(times.fused_wins for times in TIMES.values())})
