"""Host memory that exports and checkpoints of a model take that FSDP2 divides over two ranks of a CPU.

    python benchmarks/checkpoint_memory.py                # a transformer of 0.4 billion parameters; 8 GB of memory
    python benchmarks/checkpoint_memory.py --layers 1

Memory is the peak of a process during a task, above what it had before: its weights and their averages are not
counted. On a CPU a gathered tensor also lies in it; on a GPU that is memory of the device. The two results of each kind
are compared. What reads the sharded checkpoint runs in processes of their own. The optimizer's moments
in the sharded checkpoint have the values of the weights.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_flatten

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from callbacks.divided_weights import host_bytes
from callbacks.export import Export
from data.loading import Loading
from recipes.algorithms.averaging.scheduled_ema import ScheduledEMA
from recipes.algorithms.sharding.shard import shard
from recipes.algorithms.sharding.shards import own
from recipes.config.command_line import path_of
from recipes.engines.checkpoints import conversion
from recipes.engines.checkpoints.checksums import save_full
from recipes.engines.checkpoints.deferred import Deferred
from recipes.engines.checkpoints.files import first_rank_writes, whole
from recipes.engines.checkpoints.lever_states import LEVERS, gathered, separated
from recipes.engines.checkpoints.plain_pickles import load_plain, plain_pickles
from recipes.engines.checkpoints.save_planner import save_sharded
from recipes.engines.checkpoints.sharded_files import Sharded
from recipes.engines.lightning.checkpoint_format import FORMAT
from recipes.exporting import native
from recipes.exporting.checkpoints import read_checkpoint
from recipes.models.autoregressive.task import Autoregressive
from recipes.training.checkpoint_names import REST
from recipes.training.clock import Clock

WIDTH, RANKS, SHARDED = 1920, 2, "ep1-ba5"
GATHERED, PIECES = "export, whole model gathered", "export, tensor by tensor"
FULL = "full checkpoint of weights and average"
AT_ONCE, ONE = "conversion, all tensors at once", "conversion, tensor by tensor"
LATER_AT_ONCE, LATER = "export of the checkpoint, all tensors at once", "export of the checkpoint, tensor by tensor"
RESUMED, THEIRS = "checkpoint read as by a run that resumes", "checkpoint read by PyTorch, without checks"
NOTES = (
    "The exports of a run have the same bytes, as have those of the checkpoint, and both conversions the same tensors. "
    "The checkpoint has four tensors per parameter: the weight, its average and two moments. "
    "Planned: what `--dry-run` says of the first machine; for the export tensor by tensor the largest tensor comes on "
    "top, which gloo copies while it gathers it. On a GPU, a tensor is gathered on the device."
)


def new_task(layers: int) -> Autoregressive:
    """DALL-E's transformer with as many layers, of the width of `dalle_2b`, on the meta device."""
    with torch.device("meta"):
        return Autoregressive(
            layers=layers, width=WIDTH, heads=WIDTH // 64, text_positions=256, text_vocabulary=16384, side=32,
            codes=8192, kernel=11,
        )  # fmt: skip


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Peak of this process's memory above its memory before, in bytes; and seconds of the clock and of the CPU."""
    os.sync()  # else the system would slow down this task until it has written what earlier ones left
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, wall, cpu = _memory("VmRSS"), time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"bytes": _memory("VmHWM") - before, "seconds": wall, "cpu": cpu}


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def on_rank(layers: int, folder: Path) -> None:
    """Export the divided model and write checkpoints of it. Each rank writes what it measured to a file."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    task = new_task(layers)
    shard(task, init_device_mesh("cpu", (RANKS,)), reshard_after_forward=True)
    task.to_empty(device="cpu")
    for parameter in task.parameters():
        own(parameter).detach().normal_()
    average = ScheduledEMA(decay=0.5)
    average.task = task
    average._begin(Clock(1, 8, 0, "9ba", None))
    run = SimpleNamespace(clock=SimpleNamespace(batch=5, sample=40))
    found = {}
    for name, part in ((PIECES, "network"), (GATHERED, None)):  # the second would leave memory to the first
        task.exported = part
        export = Export(task, "run", str(folder / name), Loading(loader=None), lambda: new_task(layers), average, None)
        found[name] = measured(lambda export=export: export._write(run, complete=False))
    found[FULL] = measured(lambda: write_full(task, average, folder / "full.ckpt"))
    write_sharded(task, average, folder / SHARDED)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def write_full(task: Autoregressive, average: ScheduledEMA, path: Path) -> None:
    """A full checkpoint, as the engine `lightning` writes it, without an optimizer."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, levers = get_model_state_dict(task, options=options), gathered({"ScheduledEMA": average.state_dict()})
    with whole(path) as partial:
        first_rank_writes(path, lambda: save_full({"weights": weights, LEVERS: levers}, partial))


def write_sharded(task: Autoregressive, average: ScheduledEMA, path: Path) -> None:
    """A sharded checkpoint, as the engine `lightning` writes it."""
    weights = get_model_state_dict(task)
    moments = {name: {"step": torch.tensor(5.0), "exp_avg": t, "exp_avg_sq": t} for name, t in weights.items()}
    rest, shards = separated({"ScheduledEMA": average.state_dict()})
    state = {
        "format": FORMAT,
        "counts": {"batch": 5, "sample": 40, "epoch": 1, "batch_in_epoch": 0, "sample_in_epoch": 0},
        "optimizer_name": "AdamW",
        "scaler": {},
        "data": {},
        LEVERS: rest,
        "callbacks": {},
        "generators": [],
    }
    tensors = {"weights": weights, "optimizer": {"state": moments, "param_groups": []}, LEVERS: shards}
    with whole(path) as partial:
        save_sharded(tensors, partial, batch=0)
        first_rank_writes(path, lambda: save_full(state, partial / REST))


def convert_here(folder: Path, name: str) -> dict[str, float]:
    """Convert the sharded checkpoint in this process, to a file with the name of the row."""
    if name == AT_ONCE:
        conversion._is_moved = lambda path: False
        conversion.give_back_from_now_on = lambda: None
    found = measured(lambda: conversion.convert(folder / SHARDED, "lightning"))
    (folder / f"{SHARDED}.ckpt").rename(folder / f"{name}.ckpt")
    return found


def export_here(layers: int, folder: Path, name: str) -> dict[str, float]:
    """Export the sharded checkpoint in this process, to a folder with the name of the row, as recipes/export.py."""
    task = new_task(layers)
    if name == LATER_AT_ONCE:
        task.exported = None

    def work() -> None:
        deferred = Deferred()
        native.load(task, read_checkpoint(folder / SHARDED, "ema", deferred), "ema", deferred)
        native.write_weights(task, folder / name, deferred)

    (folder / name).mkdir()
    return measured(work)


def read_here(folder: Path, name: str) -> dict[str, float]:
    """Read the sharded checkpoint into tensors that are there already, as those of a run that resumes."""
    kinds = Sharded.open(folder / SHARDED).metadata.state_dict_metadata
    state = {n: torch.ones(k.size, dtype=k.properties.dtype) for n, k in kinds.items() if hasattr(k, "chunks")}
    with plain_pickles() if name == RESUMED else nullcontext():
        return measured(lambda: dcp.load(state, checkpoint_id=folder / SHARDED, no_dist=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive, default=7, help="of the transformer, whose width is 1920")
    parser.add_argument("--folder", type=path_of, help="for files of 26 bytes per parameter (default: that of TMPDIR)")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of a process that this one starts
    options = parser.parse_args()
    if options.folder is not None and not options.folder.is_dir():
        parser.error(f"--folder: there is no folder {options.folder}")
    if options.part == "rank":
        return on_rank(options.layers, options.folder)
    if options.part is not None:
        convert, read = partial(convert_here, options.folder), partial(read_here, options.folder)
        export = partial(export_here, options.layers, options.folder)
        acts = {AT_ONCE: convert, ONE: convert, LATER_AT_ONCE: export, LATER: export, RESUMED: read, THEIRS: read}
        act = acts[options.part]
        (options.folder / f"{options.part}.json").write_text(json.dumps(act(options.part)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        write_results("checkpoint_memory", f"{options.layers}layers", rows_of(options.layers, Path(name)), NOTES)


def rows_of(layers: int, folder: Path) -> list[dict[str, Any]]:
    """Measure everything in processes of their own."""
    script = [__file__, "--layers", str(layers), "--folder", str(folder), "--part"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
    subprocess.run([*launcher, *script, "rank"], check=True, env=environment)
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS))
    for name in (AT_ONCE, ONE, LATER_AT_ONCE, LATER, RESUMED, THEIRS):
        subprocess.run([sys.executable, *script, name], check=True, env=environment)
        first[name] = json.loads((folder / f"{name}.json").read_text())
    _same_files(folder / AT_ONCE, folder / ONE, suffix=".ckpt")
    for part in ("transformer", "transformer_ema"):
        _same_files(*(folder / name / "export" / part / "model" for name in (GATHERED, PIECES)), suffix=".safetensors")
    _same_files(*(folder / name / "transformer" / "model" for name in (LATER_AT_ONCE, LATER)), suffix=".safetensors")
    task = new_task(layers)
    size = sum(4 * p.numel() for p in task.parameters())
    at_once = host_bytes(task.network.state_dict().values()) + max(4 * p.numel() for p in task.parameters())
    planned = {GATHERED: 2 * size, PIECES: at_once, FULL: 2 * size}
    rows = []
    for name, found in first.items():
        other = second.get(name)
        rows.append(
            {
                "task": name,
                "parameters": f"{size // 4:,}",
                "peak, MB": round(found["bytes"] / 1e6),
                "planned, MB": round(planned[name] / 1e6) if name in planned else "",
                "relative to the weights": round(found["bytes"] / size, 2),
                "seconds": round(found["seconds"], 1),
                "peak of the other rank, MB": round(other["bytes"] / 1e6) if other else "",
                "its CPU time, s": round(other["cpu"], 1) if other else "",
            }
        )
    return rows


def _same_files(one: Path, other: Path, suffix: str) -> None:
    """Checkpoints must hold equal values, and other files the same bytes."""
    one, other = (path.with_name(path.name + suffix) for path in (one, other))
    if suffix == ".ckpt":
        (mine, structure), (theirs, others) = (tree_flatten(load_plain(path, lazily=True)) for path in (one, other))
        same = (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(mine, theirs, strict=True))
        assert structure == others and all(same), f"{one} and {other} differ"
    else:
        assert filecmp.cmp(one, other, shallow=False), f"{one} and {other} differ"


if __name__ == "__main__":
    main()
