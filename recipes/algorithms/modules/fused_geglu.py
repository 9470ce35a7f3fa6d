"""The gate of the MLPs in diffusers' transformers in one kernel."""

from __future__ import annotations

from diffusers.models.activations import GEGLU
from torch import Tensor, nn

from data.system.log import log
from recipes.models.kernels.geglu import geglu
from recipes.training.lever import Lever
from recipes.training.run import Run


class FusedGEGLU(GEGLU):
    """A linear layer and the gate: see `recipes.models.kernels.geglu`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., C) -> (..., N)."""
        return geglu(self.proj(hidden_states))


def fuse_gates(module: nn.Module) -> int:
    """Change gates in place, which stay the same objects with the same parameters; returns their number.

    Raises:
        ValueError: there is no gate.
    """
    gates = [gate for gate in module.modules() if type(gate) is GEGLU]
    if not gates:
        raise ValueError("fused_geglu: the model has no GEGLU of diffusers to fuse; remove the lever")
    for gate in gates:
        gate.__class__ = FusedGEGLU
    return len(gates)


class FusedGates(Lever):
    """Computes GEGLU, the gate of a U-Net's MLPs, in one Triton kernel forward and one backward."""

    def __init__(self, task: nn.Module) -> None:
        """See `recipes.models.kernels.geglu`; on a CPU PyTorch computes the same."""
        self.task = task

    def change_modules(self, run: Run) -> None:
        count = fuse_gates(self.task)
        log.info(f"fused_geglu: {count} gates{'' if run.on_gpu else ', by PyTorch: the kernels need a GPU'}")
        run.log_settings({"fused_geglu": count})
