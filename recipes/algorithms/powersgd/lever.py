"""The lever of low-rank gradient averaging between machines (PowerSGD)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from data.system.log import log
from recipes.algorithms.powersgd.all_reduce import FORMATS, bytes_sent
from recipes.algorithms.powersgd.block_gradients import Matrix, blocks_of, copies_of, gradient_of, placements
from recipes.algorithms.powersgd.cost import one_replica, powersgd_cost
from recipes.algorithms.powersgd.low_rank import BlockState, Compressed, LowRank, agree, as_matrix, reduce_others
from recipes.algorithms.powersgd.overlap import Overlap
from recipes.algorithms.sharding.shard import in_32_bits
from recipes.algorithms.sixteen_bit.formats import FLOAT_32
from recipes.algorithms.sixteen_bit.resblock_grad_scaling import ResblockGradScaling
from recipes.training.lever import Lever
from recipes.training.run import Precision, Run


class PowerSGD(Lever):
    """Averages gradients of the blocks' matrices as products of two low-rank factors (Ramesh et al. 2021, E.2).

    Gradients are averaged between `training.fsdp.replicas` machines: each device compresses its own shard of each
    matrix, and averages it with the devices that hold the same shard on other machines. Without sharding, each process
    counts as a machine, and the averaging of DistributedDataParallel is turned off. Gains, biases, embeddings and
    unembeddings are averaged in 32-bit. Gradients of 64-bit parameters are computed in 64 bits, and are 64-bit numbers
    where `wire` and `buffer` say 32-bit.
    """

    def __init__(
        self,
        task: nn.Module,
        scaling: ResblockGradScaling | None = None,
        clips: bool = False,
        *,
        rank: int,
        overlap: bool = False,
        wire: Literal["1-6-9", "32-bit"] = "1-6-9",
        buffer: Literal["1-6-9", "32-bit"] = "1-6-9",
        p_scale: float = 1.0,
        q_scale: float = 1.0,
        clip: float | None = None,
        seed: int = 0,
    ) -> None:
        """`scaling` is the lever that scales gradients of the task's blocks; `clips` is whether another lever clips.

        Args:
            rank: rank of the factors P and Q, summed over the devices of a machine and a multiple of their number; in
                the paper 512 to 896 over 8 devices, about a quarter of the width.
            overlap: average each block during the backward pass, for sharded models; otherwise after it. Results are
                equal.
            wire: number format in which P and Q are sent.
            buffer: number format of the error of the compression, which is added to the next gradient.
            p_scale: factor of P on the wire; 1-6-9 represents magnitudes from 2^-68 to just below 16.
            q_scale: factor of Q on the wire.
            clip: largest norm of the averaged gradient, computed from Q; null: no clipping. It replaces
                training.grad_clip.
            seed: seed of the fixed Gaussian matrices onto which gradients are projected.

        Raises:
            ValueError: values out of range, or a model without blocks.
        """
        if rank < 1 or p_scale <= 0 or q_scale <= 0 or (clip is not None and clip <= 0):
            raise ValueError(
                f"powersgd: rank must be at least 1, scales and clip above 0; got rank {rank}, p_scale {p_scale}, "
                f"q_scale {q_scale}, clip {clip}"
            )
        if clip is not None and clips:
            raise ValueError("powersgd: clip and training.grad_clip would both clip; set one of them to null")
        blocks_of(task)  # raises if there are none
        self.task = task
        self.rank = rank
        self.overlap = overlap
        self.formats = {"wire": FORMATS[wire], "buffer": FORMATS[buffer], "p_scale": p_scale, "q_scale": q_scale}
        self.clip = clip
        self.seed = seed
        self.mesh: DeviceMesh | None = None
        self.once = False
        self.group: ProcessGroup | None = None  # the ranks that hold the same shards, one per machine
        self.shards: ProcessGroup | None = None  # the ranks of this machine
        self.scaling = scaling
        self.blocks: list[list[Matrix]] = []
        self.others: list[nn.Parameter] = []
        self.states: list[BlockState] = []
        self.overlapped: Overlap[Compressed] | None = None
        self.resumed_errors: dict[str, Tensor] | None = None
        self.skipped = 0

    cost = staticmethod(powersgd_cost)

    def divide(self, mesh: DeviceMesh, *, once: bool = False) -> dict[int, Shard]:
        """The sharding of the blocks' matrices over the devices of a machine, by the parameter's id.

        Args:
            mesh: (machines, devices per machine), with the dimension names "replicate" and "shard"; or, after
                `training.tensor_parallel`, (machines, shards, devices), with "tensor" as the third name.
            once: whether gradients are averaged over the devices of a machine once per batch, instead of after each
                microbatch.
        """
        self.mesh = mesh
        self.once = once
        return placements(self.task, mesh.size(1))

    def before_passes(self, run: Run) -> None:
        if self.overlapped is not None:
            self.overlapped.begin(1 if self.once else run.passes)

    def average_gradients(self, run: Run) -> None:
        run.log(self._average(run))

    # --- the beginning -------------------------------------------------------------------------

    def begin(self, run: Run) -> None:
        if self.states:  # the same trainer may fit a second time
            return
        self._check_processes(run)
        if self.mesh is None:
            self.group, devices = dist.group.WORLD, 1
            run.module.register_comm_hook(None, _leave_as_it_is)
        else:
            # If machines have one device each, the mesh may return the group of the whole world. Overlapped work needs
            # a separate group, because messages of two threads that use one group at the same time are mixed up.
            self.group, _ = dist.new_subgroups_by_enumeration(self.mesh.mesh.flatten(1).T.tolist())
            devices = self.mesh.mesh[0].numel()
            self.shards, _ = dist.new_subgroups_by_enumeration(self.mesh.mesh.flatten(1).tolist())
        self.machines = dist.get_world_size(self.group)
        self.blocks = blocks_of(self.task)  # again, because sharding has replaced the parameters
        inside = {id(matrix.parameter) for block in self.blocks for matrix in block}
        self.others = [p for p in self.task.parameters() if p.requires_grad and id(p) not in inside]
        self.copies = [copies_of(p) for p in self.others]
        self.compressor = LowRank(self.rank // devices, seed=self.seed, **self.formats)
        for number, block in enumerate(self.blocks):
            shapes = [matrix.shape for matrix in block]
            p = block[0].parameter
            dtype = torch.promote_types(p.dtype, torch.float32)
            self.states.append(self.compressor.new_state(shapes, p.device, number, dtype))
        if self.resumed_errors is not None:
            for block, block_state in zip(self.blocks, self.states, strict=True):
                parts = [as_matrix(matrix.part_of(self.resumed_errors[matrix.name])) for matrix in block]
                self.compressor.load_errors(block_state, parts, self.machines)
            self.resumed_errors = None
        self.overlapped = self._overlapped() if self.overlap else None
        self._log_traffic()

    def check_groups(self, *, devices: int, sharded: bool, precision: Precision) -> None:
        """Find what cannot work, before anything runs.

        Args:
            devices: of each machine, over which `training.fsdp` shards.
            sharded: whether there is `training.fsdp`.
            precision: of the run.

        Raises:
            ValueError: gradients would be scaled, the devices do not divide the rank, or overlap without sharding.
        """
        if precision == "amp_fp16":
            raise ValueError("powersgd: gradients are scaled under training.precision amp_fp16; use amp_bf16 or fp32")
        if self.rank % devices:
            raise ValueError(f"powersgd: rank {self.rank} is not divisible by the {devices} devices of a machine")
        if self.overlap and not sharded:
            raise ValueError(
                "powersgd: overlap needs training.fsdp, because DistributedDataParallel writes gradients at the end of "
                "the backward pass; set training.fsdp.replicas to the number of processes, or overlap to false"
            )

    def check_replicas(self, replicas: int) -> None:
        """Find that there is nothing to average. Dry runs call it where they have been told of the processes; else they
        only say the same in a line (`powersgd_cost`).

        Raises:
            ValueError: there is one replica.
        """
        if replicas == 1:
            raise ValueError(f"powersgd: {one_replica(self.clip)}")

    def _check_processes(self, run: Run) -> None:
        if self.mesh is not None:
            self.check_replicas(self.mesh.size(0))
        elif not isinstance(run.module, DistributedDataParallel):  # one process, or one tensor parallel group
            self.check_replicas(1)

    def _overlapped(self) -> Overlap[Compressed]:
        modules = list(self.task.blocks())
        owners = {id(p): number for number, module in enumerate(modules) for p in module.parameters()}
        numbers = [owners[id(block[0].parameter)] for block in self.blocks]  # some modules may have no matrices
        pairs = zip(self.blocks, numbers, strict=True)
        parameters = [averaged_with(block, modules[number]) for block, number in pairs]
        scaling = self.scaling
        before = None if scaling is None else lambda block: scaling.unscale_block(numbers[block], parameters[block])
        return Overlap(parameters, self._compress, before)

    def _log_traffic(self) -> None:
        shapes = [matrix.shape for block in self.blocks for matrix in block]
        sent = self.compressor.bytes_sent(shapes, self.machines)
        plain = bytes_sent(sum(shape.numel() for shape in shapes), self.machines, FLOAT_32)
        log.info(
            f"powersgd: {len(shapes)} matrices in {len(self.blocks)} blocks, {self.machines} replicas, {sent:,.0f} "
            f"bytes sent per step and process instead of {plain:,.0f}"
        )

    # --- a step --------------------------------------------------------------------------------

    @torch.no_grad()
    def _compress(self, number: int) -> Compressed:
        """Steps 1 to 4 of `low_rank` for one block."""
        gradients = [matrix.gradient() for matrix in self.blocks[number]]
        return self.compressor.compress(gradients, self.machines, self.states[number], self.group)

    @torch.no_grad()
    def _average(self, run: Run) -> dict[str, float]:
        """Steps 1 to 8 of `low_rank` for all blocks. Returns what is logged."""
        if self.overlapped is not None:
            compressed = self.overlapped.finish()
        else:
            compressed = [self._compress(number) for number in range(len(self.blocks))]
        repaired = self.compressor.repair(compressed, self.states, self.group)
        others = [gradient_of(p) for p in self.others]
        reduce_others(others, self.machines, self.group)
        agreed = agree(compressed, others, self.group, self.shards, self.copies)
        factor = None
        if self.clip is not None:
            factor = (self.clip / agreed.norm).clamp(max=1.0)
            for gradient in others:
                gradient.mul_(factor)
        for block, sent, block_state in zip(compressed, agreed.sent, self.states, strict=True):
            self.compressor.finish(block, sent, block_state, self.machines, factor)
        largest = torch.stack([block.largest for block in compressed]).amax(0)
        norm, p_largest, q_largest = torch.cat([agreed.norm[None], largest]).tolist()
        if norm == float("inf"):  # equal on all ranks
            self.skipped += 1
            run.skip_update()
        on_wire = {"powersgd/p_largest": p_largest, "powersgd/q_largest": q_largest}  # the format clamps them
        figures = {"powersgd/norm": norm, "powersgd/skipped": self.skipped, "powersgd/repaired": len(repaired)}
        return {**figures, **on_wire}

    # --- checkpoints ---------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The sum of all machines' errors per parameter, which loads on any number of machines and devices.

        Each machine then goes on with its share of the sum, as it would after loading it: so a run that is resumed on
        as many machines has the same bits as the run that saved. Sums lie in host memory, sharded as the parameters
        are; those of parameters that are not, the first rank alone has, as it writes them.
        """
        if not self.states:
            return {}
        first = dist.get_rank() == 0
        errors = {}
        for block, block_state in zip(self.blocks, self.states, strict=True):
            sums = self.compressor.summed_errors(block_state, self.group)
            self.compressor.load_errors(block_state, sums, self.machines)
            for matrix, own_sum in zip(block, sums, strict=True):
                if first or isinstance(matrix.parameter, DTensor):
                    errors[matrix.name] = matrix.in_shape(own_sum.cpu())
        return {"errors": errors, "skipped": self.skipped, "rank": self.rank, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums; each machine takes its share of them when training begins.

        Raises:
            ValueError: the checkpoint has another rank or seed, or errors of other matrices.
        """
        if "errors" not in state:
            return
        for key in ("rank", "seed"):
            if state[key] != getattr(self, key):
                raise ValueError(
                    f"powersgd: the checkpoint was written with {key} {state[key]}, but the recipe has {key} "
                    f"{getattr(self, key)}; do not change the {key} during a run"
                )
        wanted = {matrix.name for block in blocks_of(self.task) for matrix in block}
        wrong = sorted(wanted ^ set(state["errors"]))
        if wrong:
            raise ValueError(f"powersgd: the checkpoint's errors are of other matrices: {wrong[0]}")
        self.resumed_errors = state["errors"]
        self.skipped = state["skipped"]


def averaged_with(matrices: list[Matrix], block: nn.Module) -> list[nn.Parameter]:
    """The trained parameters of a block whose gradients FSDP2 averages with those of its matrices.

    Norms may belong to the unit of the whole task (`recipes.algorithms.sharding.shard`), whose gradients come at the
    end of the backward pass: work that waited for them would overlap with nothing.
    """
    later = {id(p) for module in in_32_bits(block) for p in module.parameters(recurse=False)}
    later -= {id(matrix.parameter) for matrix in matrices}
    return [p for p in block.parameters() if p.requires_grad and id(p) not in later]


def _leave_as_it_is(_, bucket):  # untyped: DistributedDataParallel refuses annotations that are strings
    """A communication hook for DistributedDataParallel that averages nothing."""
    done: Future[Tensor] = Future()
    done.set_result(bucket.buffer())
    return done
