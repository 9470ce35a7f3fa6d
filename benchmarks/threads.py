"""Training speed of the quickstart's network on a CPU by number of processes, number of threads and how threads wait.

    python benchmarks/threads.py
    python benchmarks/threads.py --spins 0 1000 30000 --rounds 5

Each setting is measured alone and beside one busy process. OpenMP threads that wait at the end of an operation first
spin, for GOMP_SPINCOUNT rounds, and then sleep. If another program holds a core, the spinning threads wait for the one
that does not run. `data/system/threads.py` sets the default number of threads.
"""

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results

BATCH = 16
NOTES = """\
Images/s of forward pass, backward pass and AdamW of the network of yamls/openmoji_diffusion.yaml, batches of 16 over
all processes, which average their gradients by DDP over gloo. Medians over the rounds, in which the settings take
turns. `default` is libgomp's own spin count: 300,000, or 1,000 if a process has more threads than cores. Beside one
busy process, the fair share of two cores is 75% of the time alone."""


def work(seconds: float) -> None:
    """Train random latents for some seconds; the first rank prints images/s."""
    import torch
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from data.system.process_groups import leave
    from recipes.config.build import build
    from recipes.config.recipe import Recipe, load_config

    recipe = load_config(ROOT / "yamls" / "openmoji_diffusion.yaml", [], Recipe, missing=[])
    torch.manual_seed(0)
    task = build(recipe.model)
    network, ranks = task, int(os.environ["WORLD_SIZE"])
    if ranks > 1:
        dist.init_process_group("gloo")
        network = DistributedDataParallel(task)
    optimizer = torch.optim.AdamW(task.parameters())
    denoiser = task.denoiser
    batch = {
        "latents": torch.randn(BATCH // ranks, denoiser.latent_channels, 16, 16),
        "text": torch.randn(BATCH // ranks, 32, denoiser.text_width),
    }
    began, steps = 0.0, -3  # three steps to warm up
    ended = torch.zeros(1)
    while not ended:
        network(batch)["total"].backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps == 0:
            began = time.perf_counter()
        ended.fill_(steps > 0 and time.perf_counter() - began > seconds)
        if ranks > 1:
            dist.broadcast(ended, 0)
    if os.environ["RANK"] == "0":
        print(steps * BATCH / (time.perf_counter() - began))
    if ranks > 1:
        leave()


def measure(processes: int, threads: int, spin: int | None, seconds: float) -> float:
    """Images/s of one setting, in processes of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "MKL_"))}
    environment |= {"OMP_NUM_THREADS": str(threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": str(processes)} | ({} if spin is None else {"GOMP_SPINCOUNT": str(spin)})
    command = [sys.executable, __file__, "--work", str(seconds)]
    started = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(processes)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"threads: {processes} processes with {threads} threads failed; see above")
    return float(outputs[0])


@contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` processes that compute all the time."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spins", type=int, nargs="*", default=[1000], help="spin counts to try")
    parser.add_argument("--rounds", type=positive, default=3, help="measurements per setting (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each (default: %(default)s)")
    parser.add_argument("--work", type=float, help=argparse.SUPPRESS)  # a process that measures
    options = parser.parse_args()
    if options.work:
        return work(options.work)
    cores = len(os.sched_getaffinity(0))
    settings = [(1, 1, None), (cores, 1, None), *((1, cores, spin) for spin in (None, *options.spins))]
    found: dict[tuple, list[float]] = {}
    for _, others, setting in itertools.product(range(options.rounds), (0, 1), settings):
        with busy(others):
            rate = measure(*setting, options.seconds)
        found.setdefault((*setting, others), []).append(rate)
        print(f"{setting}, {others} busy: {rate:.1f} images/s", file=sys.stderr, flush=True)
    write_results(
        "threads",
        "openmoji",
        [
            {
                "processes": processes,
                "threads per process": threads,
                "spin count": "default" if spin is None else spin,
                "alone": round(statistics.median(found[processes, threads, spin, 0]), 1),
                "beside a busy process": round(statistics.median(found[processes, threads, spin, 1]), 1),
            }
            for processes, threads, spin in settings
        ],
        NOTES,
    )


if __name__ == "__main__":
    main()
