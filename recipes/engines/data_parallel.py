"""Whole copies of a model on several ranks, as both engines build them."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Copies(DistributedDataParallel):
    """PyTorch's DistributedDataParallel, whose advice about parameters without gradients is that of a recipe."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The output of the module.

        Raises:
            ValueError: trained parameters had no gradient in the batch before.
        """
        try:
            return super().forward(*inputs, **kwargs)
        except RuntimeError as error:
            if "Expected to have finished reduction in the prior iteration" not in str(error):
                raise
            raise ValueError(self._without_gradients(str(error))) from error

    def _without_gradients(self, text: str) -> str:
        trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
        names = [trained[int(index)].removeprefix("task.") for index in found[1].split()] if found else ["a parameter"]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (
            f"model: {', '.join(names[:3])}{more} had no gradient in the last batch, and where several devices have "
            "whole copies of a model, each trained parameter needs one; freeze by requires_grad_(False) what the loss "
            "does not depend on, or use the algorithm block_all_reduce or training.fsdp"
        )


def data_parallel(module: nn.Module, averaged: bool) -> nn.Module:
    """A module that begins with the weights of the first rank, and whose gradients are averaged over all ranks.

    Args:
        module: on the rank's device. Every rank must call this.
        averaged: a lever averages the gradients, so that the module needs no DistributedDataParallel around it.

    Raises:
        ValueError: it has a complex tensor on a CPU, which gloo does not send, nor does it name it.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_complex() and tensor.device.type == "cpu":
            raise ValueError(
                f"model: {name.removeprefix('task.')} is complex, and ranks on CPUs cannot exchange it; keep its real "
                "and imaginary part in a real tensor (torch.view_as_real)"
            )
    if averaged:
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)
        return module
    # Gradients are views of the buckets that are averaged, which saves a copy of all gradients, in time and in memory.
    return Copies(module, gradient_as_bucket_view=True)
