"""At which network rates compression pays: two machines train DALL-E's transformer over a cable of several rates.

    python benchmarks/network.py                       # as root on Linux: two network namespaces, limited by tc
    python benchmarks/network.py --rates 100 1000 --ranks 16 --rounds 3
    python benchmarks/network.py --emulate             # anywhere

Each machine is one process with one thread; all ways of averaging take turns at each rate. The table compares the bytes
that the kernel counted on the interface during the measured steps with those that formulas give for the gradients. The
cable is described in benchmarks/common/namespaces.py; the table also has the rate of a bare transfer in both directions
at the same time.

--emulate needs no permission: the two processes communicate at full speed, and the time on a cable (bytes by formula
over the rate) is added to the CPU time of a step, which other load on the machine hardly changes. For averaging that
sends during the backward pass, the longer of the two times is taken instead, which is the best possible case. The table
says that it is emulated.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from matplotlib.figure import Figure

from benchmarks.common.namespaces import Machine, Unavailable, two_machines
from benchmarks.common.network_settings import MeasuredRun, Settings, Variant
from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from callbacks.charts import DPI, write_chart

PLAIN = "plain averaging"
LOOPBACK = Machine("", "lo", "127.0.0.1")


def variants(ranks: list[int]) -> list[Variant]:
    """Plain averaging by DDP, and PowerSGD of each rank after the backward pass and overlapped with it."""
    found = [Variant(PLAIN, [], overlaps=True)]
    for rank in ranks:
        after = f"{{name: powersgd, rank: {rank}, clip: 4.0}}"
        beside = f"{{name: powersgd, rank: {rank}, clip: 4.0, overlap: true}}"
        clip = "training.grad_clip=null"  # PowerSGD has its own
        sharded = "training.fsdp={replicas: 2}"  # of one device each; only FSDP can overlap
        found.append(Variant(f"rank {rank}", [f"algorithms.powersgd={after}", clip], rank))
        found.append(
            Variant(f"rank {rank}, overlapped", [f"algorithms.powersgd={beside}", clip, sharded], rank, overlaps=True)
        )
    return found


def run(settings: Settings, machines: list[Machine], folder: Path, threads: int) -> dict[str, Any]:
    """Run one process per machine, and return the results that the first one wrote.

    Raises:
        RuntimeError: a process failed.
    """
    settings.write(folder / "settings.json")
    with socket.socket() as free:  # free in this namespace; in new ones, every port is
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "benchmarks" / "network_rank.py"), str(folder / "settings.json")]
    processes = []
    try:
        for rank, machine in enumerate(machines):
            launcher = {"RANK": rank, "NODE_RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            launcher |= {"MASTER_ADDR": machines[0].address, "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
            # Warnings of torch would print the name of the host.
            launcher |= {"GLOO_SOCKET_IFNAME": machine.interface, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            env = os.environ | {name: str(value) for name, value in launcher.items()}
            words = machine.command(command) if machine.namespace else command
            processes.append(subprocess.Popen(words, env=env))
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break  # the other one would wait for it for ever
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError("network: a machine's process failed; its message is above")
    return json.loads(Path(settings.out).read_text(encoding="utf-8"))


def emulated(
    measured: list[MeasuredRun], formula: dict[str, float], ways: list[Variant], rates: list[float]
) -> list[MeasuredRun]:
    """The times that runs without a cable would have on a cable of each rate, given the bytes per step by variant."""
    overlaps = {variant.name: variant.overlaps for variant in ways}
    runs = []
    for rate in rates:
        for run in measured:
            cable = 8e-6 * formula[run.variant] / rate
            seconds = [max(own, cable) if overlaps[run.variant] else own + cable for own in run.computed]
            runs.append(MeasuredRun(run.variant, rate, run.round, 0.0, seconds, run.computed))
    return runs


def relative_speed(runs: list[MeasuredRun], name: str, rate: float) -> float:
    """Speed relative to plain averaging: the median over rounds of the ratio of two runs of the same round."""
    of = {(run.variant, run.round): statistics.median(run.seconds) for run in runs if run.rate == rate}
    return statistics.median(of[PLAIN, turn] / seconds for (way, turn), seconds in of.items() if way == name)


def rows_of(runs: list[MeasuredRun], formula: dict[str, float], link: str) -> list[dict[str, Any]]:
    """One row per rate and variant; without a cable, the columns of transferred bytes are left out."""
    rows = []
    for rate in sorted({run.rate for run in runs}):
        for name, expected in formula.items():
            own = [run for run in runs if run.rate == rate and run.variant == name]
            row: dict[str, Any] = {f"{link}, Mbit/s": round(rate)}
            if own[0].reached:
                row["reached"] = round(statistics.median(run.reached for run in own))
            row |= {"averaging": name, "MB per step by formula": round(expected / 1e6, 3)}
            if own[0].sent:
                sent = statistics.median(run.sent for run in own)
                row |= {"MB sent": round(sent / 1e6, 3), "excess": f"{sent / expected - 1:+.1%}"}
            row |= {
                "ms computed": round(1e3 * statistics.median(statistics.median(run.computed) for run in own), 1),
                "ms per step": round(1e3 * statistics.median(statistics.median(run.seconds) for run in own), 1),
                "relative speed": round(relative_speed(runs, name, rate), 2),
            }
            rows.append(row)
    return rows


def break_even(rates: list[float], ratios: list[float]) -> float | None:
    """The rate up to which compression pays: where its relative speed falls below 1, interpolated in log-log space.

    Args:
        rates: increasing.
        ratios: speed relative to plain averaging at each rate.

    Returns:
        The rate; infinity if compression pays at the highest rate too, None if it pays at none.
    """
    paying = [number for number, ratio in enumerate(ratios) if ratio >= 1]
    if not paying:
        return None
    last = paying[-1]
    if last == len(rates) - 1:
        return math.inf
    (x, x_next), (y, y_next) = ([math.log(v) for v in values[last : last + 2]] for values in (rates, ratios))
    return math.exp(x + (x_next - x) * y / (y - y_next))


def pays(rate: float | None) -> str:
    """The result of `break_even` in words."""
    if rate is None:
        return "pays at none of these rates"
    return "pays at all of these rates" if rate == math.inf else f"pays up to {float(f'{rate:.2g}'):,.0f} Mbit/s"


def draw(runs: list[MeasuredRun], limits: dict[str, float | None], title: str, path: Path) -> None:
    """Draw the time of a step by the rate of the cable, with dotted lines where compression stops paying."""
    figure = Figure(figsize=(6.4, 4.0), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    rates = sorted({run.rate for run in runs})
    for name in dict.fromkeys(run.variant for run in runs):
        own = {rate: [run for run in runs if run.variant == name and run.rate == rate] for rate in rates}
        times = [1e3 * statistics.median(statistics.median(run.seconds) for run in own[rate]) for rate in rates]
        label = f"{name}: {pays(limits[name])}" if name in limits else name
        (line,) = axes.plot(rates, times, marker="o", markersize=4, label=label)
        if limits.get(name) not in (None, math.inf):
            axes.axvline(limits[name], color=line.get_color(), linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="rate of the cable, Mbit/s", ylabel="ms per step", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    write_chart(figure, path)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 300, 1000, 3000, 10000], help="Mbit/s")
    parser.add_argument("--ranks", type=positive, nargs="+", default=[96, 48, 16], help="ranks of the compression")
    parser.add_argument("--width", type=positive, default=384, help="width of the transformer, a multiple of 64")
    parser.add_argument("--layers", type=positive, default=4)
    parser.add_argument("--batch", type=positive, default=16, help="samples of 88 tokens per step, over both machines")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each variant at each rate")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of a run before the measurement")
    parser.add_argument("--steps", type=positive, default=5, help="measured steps per run")
    parser.add_argument("--threads", type=positive, default=1, help="threads per machine")
    parser.add_argument("--emulate", action="store_true", help="without namespaces: the time on the cable is computed")
    parser.add_argument("--note", default="", help="a remark for the table, such as other load on the machine")
    options = parser.parse_args(arguments)
    if options.width % 64 or options.batch % 2 or min(options.rates) <= 0:
        parser.error("--width must be a multiple of 64, --batch even, --rates above 0")
    ways = variants(options.ranks)
    # Small vocabularies, because their matrices are sent in 32-bit and would dominate the traffic.
    model = {"width": options.width, "heads": options.width // 64, "layers": options.layers}
    model |= {"text_vocabulary": 256, "codes": 256}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            machines = [LOOPBACK] * 2 if options.emulate else stack.enter_context(two_machines())
        except Unavailable as error:
            sys.exit(f"network: no network namespaces here: {error}; run it as root on Linux, or with --emulate")
        settings = Settings(
            variants=ways,
            model=[f"model.{key}={value}" for key, value in model.items()],
            batch=options.batch,
            rates=[] if options.emulate else sorted(options.rates),
            interfaces=[machine.interface for machine in machines],
            addresses=[machine.address for machine in machines],
            rounds=options.rounds,
            warm_up=options.warm_up,
            steps=options.steps,
            out=str(folder / "found.json"),
        )
        found = run(settings, machines, folder, options.threads)
    real = [MeasuredRun(**values) for values in found["runs"]]
    runs = emulated(real, found["formula"], ways, options.rates) if options.emulate else real
    return write_report(runs, found, options)


def write_report(runs: list[MeasuredRun], found: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Write table and chart. Returns the rows of the table."""
    rates = sorted({run.rate for run in runs})
    limits = {
        name: break_even(rates, [relative_speed(runs, name, rate) for rate in rates])
        for name in found["formula"]
        if name != PLAIN
    }
    link = "emulated cable" if options.emulate else "cable"
    rows = rows_of(runs, found["formula"], link)
    text = [
        f"{found['parameters']:,} parameters (width {options.width}, {options.layers} layers), {options.batch} samples "
        f"of 88 tokens per step on two machines of {options.threads} thread(s); medians of {options.rounds} rounds of "
        f"{options.steps} steps after {options.warm_up}; relative speeds compare runs of the same round.",
        "The cable is emulated: the CPU time of a step was measured, bytes are by formula, and step times are computed."
        if options.emulate
        else "Bytes: sent by the interface of the first machine; reached: a bare transfer in both directions at the "
        "same time; computed: CPU time of the first machine's process.",
        *([options.note] if options.note else []),
        *(f"{name.capitalize()} {pays(limit)}." for name, limit in limits.items()),
    ]
    name = "network_emulated" if options.emulate else "network"
    path = write_results(name, f"d{options.width}", rows, "\n".join(text))
    title = f"Two machines, {found['parameters'] / 1e6:.1f} million parameters"
    draw(runs, limits, title + (", emulated" if options.emulate else ""), path.with_suffix(".png"))
    return rows


if __name__ == "__main__":
    # An exception, so that the namespaces are removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("network: ended"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the benchmark trains on the CPU, and the table says so
    main()
