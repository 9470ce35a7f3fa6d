"""A running average of a model's parameters: each rank averages the part that it owns, where that part lies.

Only trained parameters are averaged. Buffers are those of the model at the time: what they hold are counts and
statistics that are running averages already, and an average of an average, or of integers, means nothing.
"""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

# What wrappers put into the names of parameters.
WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")


class Average:
    """A running average beside the parameters, on their device.

    It starts as a copy of them, in 32-bit where they have fewer bits: at a decay of 0.9999, 16-bit values stand still.

    Attributes:
        bytes: memory of this rank's average.
        inside: whether the averaged weights are in the model now.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: plain, or under DDP or FSDP2.

        Raises:
            ValueError: it has no trained parameters.
        """
        self.model = model.module if isinstance(model, DistributedDataParallel) else model
        reshard(self.model)
        trained = {WRAPPERS.sub("", name): p for name, p in self.model.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError("scheduled_ema: the model has no trained parameters to average")
        self.names = list(trained)
        self.parameters = list(trained.values())
        self.inside = False
        with torch.no_grad():
            owned = [own(p) for p in self.parameters]
            self.shadow = [self._place(t).copy_(t) for t in owned]
        self.raw: dict[int, Tensor] = {}
        kinds = [(t.dtype, t.device) for t in owned]
        # Multi-tensor kernels want one type and one device.
        self.groups = [[i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)]
        self.bytes = sum(t.numel() * t.element_size() for t in self.shadow)

    def _place(self, tensor: Tensor) -> Tensor:
        """Memory for the average of `tensor`, in the same order."""
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
        """To be called before the optimizer changes the parameters."""

    def settle(self) -> None:
        """Wait for updates that are under way."""

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
        except BaseException:  # out of memory: a model of both kinds must not train on
            for number in range(done):
                self._take_out(number, own(self.parameters[number]))
            raise
        self.inside = True

    @torch.no_grad()
    def take_out(self) -> None:
        """Give the model its own weights back, bit by bit as they were."""
        assert self.inside
        # What was gathered for a forward pass holds averaged weights, and FSDP would use it again.
        reshard(self.model)
        for number, parameter in enumerate(self.parameters):
            self._take_out(number, own(parameter))
        self.inside = False

    def _put_in(self, number: int, current: Tensor) -> None:
        if current.dtype == self.shadow[number].dtype:
            self._exchange(number, current)
        else:  # the average would lose bits in the parameter's type
            self.raw[number] = current.clone()
            current.copy_(self.shadow[number])

    def _take_out(self, number: int, current: Tensor) -> None:
        if current.dtype == self.shadow[number].dtype:
            self._exchange(number, current)
        else:
            current.copy_(self.raw.pop(number))

    def _exchange(self, number: int, current: Tensor) -> None:
        # One tensor at a time: no second copy of the model, and addresses stay (views, CUDA graphs).
        held = current.clone()
        current.copy_(self.shadow[number])
        self.shadow[number].copy_(held)

    # --- checkpoints ---------------------------------------------------------------------------

    @torch.no_grad()
    def whole(self) -> dict[str, Tensor]:
        """Every averaged tensor, by its parameter's name, for a checkpoint.

        Every rank must call it. A sharded model's are gathered one after another into the first rank's host memory;
        other ranks get none. This is the only time that anything is gathered.
        """
        assert not self.inside
        self.settle()
        first = not dist.is_initialized() or dist.get_rank() == 0
        if not any(isinstance(p, DTensor) for p in self.parameters):
            return dict(zip(self.names, self.shadow, strict=True))
        found = {}
        for name, parameter, shadow in zip(self.names, self.parameters, self.shadow, strict=True):
            if isinstance(parameter, DTensor):
                shadow = _like(parameter, shadow).full_tensor()
            if first:
                found[name] = shadow.cpu()
        return found

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `whole` gave, on any number of ranks; every rank has all of it.

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
            whole = tensors[name]
            if whole.shape != parameter.shape:
                raise ValueError(
                    f"scheduled_ema: the checkpoint's average of {name} has shape {tuple(whole.shape)}, "
                    f"the model {tuple(parameter.shape)}"
                )
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                whole = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
            shadow.copy_(whole)


class HostAverage(Average):
    """A running average in host memory, computed by a thread there while the device trains on.

    An update copies the parameters to page-locked memory on a stream of its own; nothing waits for it but the next
    change of the parameters, by which time it is long done. The averaged weights move to the device only while they
    are in the model. Without a GPU the copy is an ordinary one, and the thread's work still runs beside training.
    """

    def __init__(self, model: nn.Module) -> None:
        """As `Average`."""
        super().__init__(model)
        owned = [own(p) for p in self.parameters]
        self.gpu = next((t.device for t in owned if t.is_cuda), None)
        self.staging = [torch.empty_like(t) for t in owned] if self.gpu is None else _pinned_views(owned)
        kinds = [t.dtype for t in owned]
        self.groups = [[i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)]
        self.stream = None if self.gpu is None else torch.cuda.Stream(self.gpu)
        self.copied = None if self.gpu is None else torch.cuda.Event()
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="scheduled_ema")
        self.work: Future[None] | None = None

    def _place(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32), device="cpu")

    @torch.no_grad()
    def update(self, keep: float) -> None:
        """As `Average.update`, done some time before `settle` returns."""
        assert not self.inside
        self.settle()  # of the last update, k batches ago: its page-locked memory is about to be written
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

    @torch.no_grad()  # it holds for the thread that calls it
    def _average(self, keep: float) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        self._blend(self.staging, keep)

    def before_step(self) -> None:
        """The optimizer's kernels wait for the copy; the program does not."""
        if self.copied is not None:
            torch.cuda.current_stream(self.gpu).wait_event(self.copied)

    def settle(self) -> None:
        """Wait for the update that is under way, and raise what it raised."""
        work, self.work = getattr(self, "work", None), None
        if work is not None:
            work.result()

    def _put_in(self, number: int, current: Tensor) -> None:
        self.staging[number].copy_(current)
        current.copy_(self.shadow[number])

    def _take_out(self, number: int, current: Tensor) -> None:
        current.copy_(self.staging[number])


def blend_(average: list[Tensor], current: list[Tensor], keep: float) -> None:
    """average = keep * average + (1 - keep) * current, in place, by as few kernels as there are.

    Args:
        average: of one type and device.
        current: as many, of one type and device, which may have fewer bits.
        keep: share that is kept, in [0, 1].
    """
    if average[0].dtype == current[0].dtype:
        torch._foreach_lerp_(average, current, 1 - keep)  # reads both and writes one: once through the memory
    else:
        torch._foreach_mul_(average, keep)
        torch._foreach_add_(average, current, alpha=1 - keep)


@torch.no_grad()
def bytes_of_average(model: nn.Module) -> int:
    """Memory that this rank's average of a model takes."""
    owned = [own(p) for p in model.parameters() if p.requires_grad]
    return sum(t.numel() * torch.promote_types(t.dtype, torch.float32).itemsize for t in owned)


def own(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, in the parameter's own memory (call it without gradients)."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()


def reshard(model: nn.Module) -> None:
    """Free what FSDP gathered and kept, so that parameters are each rank's own part again.

    After a forward pass without a backward one, as in validation, the root stays gathered, and so does everything
    where it is not resharded after the forward pass. Weights changed in place would then not be used.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _like(parameter: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _pinned_views(tensors: list[Tensor]) -> list[Tensor]:
    """Page-locked memory for each tensor, in its order; one block, as each would be rounded up to a power of two."""
    views: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        numbers = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        block = torch.empty(sum(tensors[i].numel() for i in numbers), dtype=dtype, pin_memory=True)
        offset = 0
        for i in numbers:
            # Strides as empty_like gives them: dense, in the tensor's own memory order.
            strides = torch.empty_like(tensors[i], device="meta").stride()
            views[i] = block.as_strided(tensors[i].shape, strides, offset)
            offset += tensors[i].numel()
    return [views[i] for i in range(len(tensors))]
