"""A running average of a model's parameters: each rank averages its own shards, on their device.

Only trained parameters are averaged. Buffers are the model's current ones: they hold counts, or statistics that are
running averages already.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from recipes.algorithms.averaging.page_locked import PageLocked
from recipes.algorithms.sharding.shards import as_shard, own, shard_of


class Average:
    """A running average beside the parameters, on their device.

    It starts as a copy of them, in 32 bits if they have fewer: at a decay of 0.9999, a 16-bit average would not move.

    Attributes:
        names: names of the trained parameters.
        parameters: the trained parameters, in the same order.
        shadow: this rank's shard of the average of each, in the same order.
        bytes: memory of this rank's shards of the average.
        inside: whether the averaged weights are in the model now.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: plain, or sharded by FSDP2.

        Raises:
            ValueError: it has no trained parameters.
        """
        self.model = model
        reshard(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("scheduled_ema: the model has no trained parameters to average")
        self.names = list(trained)
        self.parameters = list(trained.values())
        self.inside = False
        with torch.no_grad():
            owned = [own(p) for p in self.parameters]
            self.shadow = [self._place(t).copy_(t) for t in owned]
        self.raw: dict[int, Tensor] = {}
        kinds = [t.dtype for t in owned]  # multi-tensor kernels take tensors of one
        self.groups = [[i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)]
        self.bytes = sum(t.numel() * t.element_size() for t in self.shadow)

    def _place(self, tensor: Tensor) -> Tensor:
        """Uninitialised memory for the average of `tensor`, with the same strides."""
        return torch.empty_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))

    @torch.no_grad()
    def update(self, keep: float) -> None:
        """average = keep * average + (1 - keep) * parameters."""
        assert not self.inside
        self._blend([own(p) for p in self.parameters], keep)

    def _blend(self, current: list[Tensor], keep: float) -> None:
        for group in self.groups:
            blend_([self.shadow[i] for i in group], [current[i] for i in group], keep)

    def before_step(self) -> None:
        """Must be called before the optimizer changes the parameters."""

    def settle(self) -> None:
        """Wait for updates that have not finished."""

    # --- into the model and back ---------------------------------------------------------------

    @torch.no_grad()
    def put_in(self) -> None:
        """Put the averaged weights into the model, in place."""
        assert not self.inside
        self.settle()
        reshard(self.model)
        done = 0
        try:
            for parameter in self.parameters:
                self._put_in(done, own(parameter))
                done += 1
        except BaseException:  # such as out of memory: no mixture of both kinds of weights must stay in the model
            for number in range(done):
                self._take_out(number, own(self.parameters[number]))
            raise
        self.inside = True

    @torch.no_grad()
    def take_out(self) -> None:
        """Restore the model's own weights, bit by bit."""
        assert self.inside
        # FSDP would use parameters again that it gathered for a forward pass with averaged weights.
        reshard(self.model)
        for number, parameter in enumerate(self.parameters):
            self._take_out(number, own(parameter))
        self.inside = False

    def _put_in(self, number: int, current: Tensor) -> None:
        if current.dtype == self.shadow[number].dtype:
            self._exchange(number, current)
        else:  # the average does not fit into the dtype of the parameter
            self.raw[number] = current.clone()
            current.copy_(self.shadow[number])

    def _take_out(self, number: int, current: Tensor) -> None:
        if current.dtype == self.shadow[number].dtype:
            self._exchange(number, current)
        else:
            current.copy_(self.raw.pop(number))

    def _exchange(self, number: int, current: Tensor) -> None:
        # One tensor at a time: no second copy of the model in memory. In place: addresses stay (views, CUDA graphs).
        held = current.clone()
        current.copy_(self.shadow[number])
        self.shadow[number].copy_(held)

    # --- checkpoints ---------------------------------------------------------------------------

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Parameter name -> averaged tensor, for a checkpoint: a DTensor where the parameter is one.

        Tensors share the memory of the average.
        """
        assert not self.inside
        self.settle()
        everything = zip(self.names, self.parameters, self.shadow, strict=True)
        return {name: as_shard(parameter, shadow) for name, parameter, shadow in everything}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `tensors` returned, on any number of ranks.

        Args:
            tensors: DTensors that are sharded as the parameters are, or whole tensors, the same ones on every rank.

        Raises:
            ValueError: names or shapes are not those of the model.
        """
        assert not self.inside
        self.settle()
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if set(shapes) != set(self.names):
            wrong = sorted(set(shapes) ^ set(self.names))
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise ValueError(f"scheduled_ema: the checkpoint's average is of other parameters: {wrong[0]}{more}")
        for name, parameter, shadow in zip(self.names, self.parameters, self.shadow, strict=True):
            saved = tensors[name]
            if saved.shape != parameter.shape:
                raise ValueError(
                    f"scheduled_ema: the checkpoint's average of {name} has shape {tuple(saved.shape)}, "
                    f"the model {tuple(parameter.shape)}"
                )
            shadow.copy_(shard_of(parameter, saved))


class HostAverage(Average):
    """A running average in host memory, computed by a thread on the CPU while the device goes on training.

    An update copies the parameters to page-locked memory on a separate stream; only the next change of the parameters
    waits for the copy, and by then it is usually complete. The averaged weights move to the device only while they are
    in the model. Without a GPU the copy is synchronous, and the thread still runs beside training.
    """

    def __init__(self, model: nn.Module) -> None:
        """See `Average`."""
        super().__init__(model)
        owned = [own(p) for p in self.parameters]
        self.gpu = next((t.device for t in owned if t.is_cuda), None)
        self.locked = None if self.gpu is None else PageLocked(owned)
        self.staging = [torch.empty_like(t) for t in owned] if self.locked is None else self.locked.views
        self.stream = None if self.gpu is None else torch.cuda.Stream(self.gpu)
        self.copied = None if self.gpu is None else torch.cuda.Event()
        # Each thread has a current GPU of its own, at first the machine's first one, where waiting for an event would
        # take some hundred MB for a context.
        on_gpu = {} if self.gpu is None else {"initializer": torch.cuda.set_device, "initargs": (self.gpu,)}
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="scheduled_ema", **on_gpu)
        self.work: Future[None] | None = None

    def _place(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32), device="cpu")

    @torch.no_grad()
    def update(self, keep: float) -> None:
        """See `Average.update`; it is complete when `settle` returns."""
        assert not self.inside
        self.settle()  # the last update may still read the page-locked memory that this one overwrites
        current = [own(p) for p in self.parameters]
        if self.gpu is None:
            torch._foreach_copy_(self.staging, current)
        else:
            self.stream.wait_stream(torch.cuda.current_stream(self.gpu))
            with torch.cuda.stream(self.stream):
                for held, tensor in zip(self.staging, current, strict=True):
                    held.copy_(tensor, non_blocking=True)
                self.copied.record()
        self.work = self.worker.submit(self._average, keep)

    @torch.no_grad()  # it applies to the calling thread alone
    def _average(self, keep: float) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        self._blend(self.staging, keep)

    def before_step(self) -> None:
        """Make kernels of the optimizer wait for the copy; the host does not wait."""
        if self.copied is not None:
            torch.cuda.current_stream(self.gpu).wait_event(self.copied)

    def settle(self) -> None:
        """Wait for the last update, and raise the exception that it raised."""
        work, self.work = self.work, None
        if work is not None:
            work.result()

    def _put_in(self, number: int, current: Tensor) -> None:
        self.staging[number].copy_(current)
        current.copy_(self.shadow[number])

    def _take_out(self, number: int, current: Tensor) -> None:
        current.copy_(self.staging[number])


def blend_(average: list[Tensor], current: list[Tensor], keep: float) -> None:
    """average = keep * average + (1 - keep) * current, in place, by multi-tensor kernels.

    Args:
        average: tensors of one dtype on one device.
        current: as many tensors of the same shapes and device, of one dtype, which may have fewer bits.
        keep: share that is kept, in [0, 1].
    """
    if average[0].dtype == current[0].dtype:
        torch._foreach_lerp_(average, current, 1 - keep)  # reads both and writes one: once through the memory
    else:
        torch._foreach_mul_(average, keep)
        torch._foreach_add_(average, current, alpha=1 - keep)


@torch.no_grad()
def bytes_of_average(model: nn.Module) -> int:
    """Memory that this rank's shards of the average of a model take."""
    owned = [own(p) for p in model.parameters() if p.requires_grad]
    return sum(t.numel() * torch.promote_types(t.dtype, torch.float32).itemsize for t in owned)


def reshard(model: nn.Module) -> None:
    """Free parameters that FSDP has gathered, so that each rank's parameters are its own shards again.

    After a forward pass without a backward pass, as in validation, the root module stays gathered, and so do modules
    that are not resharded after the forward pass. Changes of shards in place would then have no effect.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
