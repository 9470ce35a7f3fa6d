"""Where compression starts to pay: two machines train DALL-E's transformer over a cable of several rates.

    python benchmarks/network.py                       # as root on Linux: two network namespaces, limited by tc
    python benchmarks/network.py --rates 100 1000 --ranks 16 --rounds 3
    python benchmarks/network.py --emulate             # anywhere

Each machine is one process with one thread; all ways of averaging take turns at each rate. Bytes are those that the
kernel counted on the interface during the measured steps, beside what the formulas say of the gradients. The cable is
described in benchmarks/namespaces.py; what a bare transfer reaches on it, both ways at once, is in the table.

--emulate needs no permission: the two processes talk as fast as they can, and the time that a cable would take, bytes
by the formulas over its rate, is added to what a process computed in a step (so other work on the machine hardly
counts). For averaging that sends during the backward pass the longer of the two is taken instead: the best that it
could do. The table says that it is emulated.
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

from benchmarks.namespaces import Machine, Unavailable, two_machines
from benchmarks.network_settings import Measured, Settings, Variant
from benchmarks.plots import chart, save
from benchmarks.reporting import write_results

PLAIN = "plain averaging"
LOOPBACK = Machine("", "lo", "127.0.0.1")


def variants(ranks: list[int]) -> list[Variant]:
    """Plain averaging by DDP, and PowerSGD at some ranks, after the backward pass and beside it."""
    found = [Variant(PLAIN, [], overlaps=True)]
    for rank in ranks:
        after = f"{{name: powersgd, rank: {rank}, clip: 4.0}}"
        beside = f"{{name: powersgd, rank: {rank}, clip: 4.0, overlap: true}}"
        clip = "training.grad_clip=null"  # PowerSGD's own
        sharded = "training.fsdp={replicas: 2}"  # of one device each; overlapping is a matter of FSDP's
        found.append(Variant(f"rank {rank}", [f"algorithms.averaging={after}", clip], rank))
        found.append(
            Variant(f"rank {rank}, overlapped", [f"algorithms.averaging={beside}", clip, sharded], rank, overlaps=True)
        )
    return found


def run(settings: Settings, machines: list[Machine], folder: Path, threads: int) -> dict[str, Any]:
    """One process a machine; what the first wrote.

    Raises:
        RuntimeError: one of them failed.
    """
    settings.write(folder / "settings.json")
    with socket.socket() as free:  # of this namespace; in new ones every port is
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "benchmarks" / "network_rank.py"), str(folder / "settings.json")]
    processes = []
    try:
        for rank, machine in enumerate(machines):
            launcher = {"RANK": rank, "NODE_RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            launcher |= {"MASTER_ADDR": machines[0].address, "MASTER_PORT": port, "OMP_NUM_THREADS": threads}
            launcher |= {"GLOO_SOCKET_IFNAME": machine.interface, "TORCH_CPP_LOG_LEVEL": "ERROR"}  # no names there
            env = os.environ | {name: str(value) for name, value in launcher.items()}
            words = machine.command(command) if machine.namespace else command
            processes.append(subprocess.Popen(words, env=env))
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break  # the other would wait for it
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError("network: a machine's process failed; its message is above")
    return json.loads(Path(settings.out).read_text(encoding="utf-8"))


def emulated(
    measured: list[Measured], formula: dict[str, float], ways: list[Variant], rates: list[float]
) -> list[Measured]:
    """What runs without a cable would have taken with one of each rate, given the bytes a step of each variant."""
    overlaps = {variant.name: variant.overlaps for variant in ways}
    runs = []
    for rate in rates:
        for run in measured:
            cable = 8e-6 * formula[run.variant] / rate
            seconds = [max(own, cable) if overlaps[run.variant] else own + cable for own in run.computed]
            runs.append(Measured(run.variant, rate, run.round, 0.0, seconds, run.computed))
    return runs


def times_as_fast(runs: list[Measured], name: str, rate: float) -> float:
    """To plain averaging, as the median over the rounds, whose runs were neighbours in time."""
    of = {(run.variant, run.round): statistics.median(run.seconds) for run in runs if run.rate == rate}
    return statistics.median(of[PLAIN, turn] / seconds for (way, turn), seconds in of.items() if way == name)


def rows_of(runs: list[Measured], formula: dict[str, float], link: str) -> list[dict[str, Any]]:
    """A row a rate and a variant; what a cable transferred is left out where there was none."""
    rows = []
    for rate in sorted({run.rate for run in runs}):
        for name, expected in formula.items():
            own = [run for run in runs if run.rate == rate and run.variant == name]
            row: dict[str, Any] = {f"{link}, Mbit/s": round(rate)}
            if own[0].reached:
                row["reached"] = round(statistics.median(run.reached for run in own))
            row |= {"averaging": name, "MB a step by formula": round(expected / 1e6, 3)}
            if own[0].sent:
                sent = statistics.median(run.sent for run in own)
                row |= {"MB sent": round(sent / 1e6, 3), "more than that": f"{sent / expected - 1:+.1%}"}
            row |= {
                "ms computed": round(1e3 * statistics.median(statistics.median(run.computed) for run in own), 1),
                "ms a step": round(1e3 * statistics.median(statistics.median(run.seconds) for run in own), 1),
                "times as fast": round(times_as_fast(runs, name, rate), 2),
            }
            rows.append(row)
    return rows


def break_even(rates: list[float], ratios: list[float]) -> float | None:
    """The rate up to which compression pays: where the ratio falls below 1, on a line between logarithms.

    Args:
        rates: rising.
        ratios: how many times as fast as plain averaging, at each.

    Returns:
        The rate; infinity where it pays at the highest one too, None where it pays at none.
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
    if rate is None:
        return "pays at none of these rates"
    return "pays at all of these rates" if rate == math.inf else f"pays up to {float(f'{rate:.2g}'):,.0f} Mbit/s"


def draw(runs: list[Measured], limits: dict[str, float | None], title: str, path: Path) -> None:
    """Time of a step against the cable's rate; a dotted line where compression stops to pay."""
    figure = chart()
    axes = figure.add_subplot()
    rates = sorted({run.rate for run in runs})
    for name in dict.fromkeys(run.variant for run in runs):
        own = {rate: [run for run in runs if run.variant == name and run.rate == rate] for rate in rates}
        times = [1e3 * statistics.median(statistics.median(run.seconds) for run in own[rate]) for rate in rates]
        label = f"{name}: {pays(limits[name])}" if name in limits else name
        (line,) = axes.plot(rates, times, marker="o", markersize=4, label=label)
        if limits.get(name) not in (None, math.inf):
            axes.axvline(limits[name], color=line.get_color(), linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="rate of the cable, Mbit/s", ylabel="ms a step", title=title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, path)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 300, 1000, 3000, 10000], help="Mbit/s")
    parser.add_argument("--ranks", type=int, nargs="+", default=[96, 48, 16], help="of the compression")
    parser.add_argument("--width", type=int, default=384, help="of the transformer, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="samples a step, of 88 tokens, over both machines")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind at each rate")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before it is measured")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a run")
    parser.add_argument("--threads", type=int, default=1, help="of each machine")
    parser.add_argument("--emulate", action="store_true", help="without namespaces: a cable's time is computed")
    parser.add_argument("--note", default="", help="for readers of the table: what else the machine did")
    options = parser.parse_args(arguments)
    if options.width % 64 or options.batch % 2 or min(options.rates) <= 0:
        parser.error("--width must be a multiple of 64, --batch even, --rates above 0")
    ways = variants(options.ranks)
    # Small vocabularies: their matrices are sent in 32-bit, and would hide what happens to the rest.
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
    real = [Measured(**values) for values in found["runs"]]
    return report(emulated(real, found["formula"], ways, options.rates) if options.emulate else real, found, options)


def report(runs: list[Measured], found: dict[str, Any], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Table and chart."""
    rates = sorted({run.rate for run in runs})
    limits = {
        name: break_even(rates, [times_as_fast(runs, name, rate) for rate in rates])
        for name in found["formula"]
        if name != PLAIN
    }
    link = "emulated cable" if options.emulate else "cable"
    rows = rows_of(runs, found["formula"], link)
    text = [
        f"{found['parameters']:,} parameters (width {options.width}, {options.layers} layers), {options.batch} samples "
        f"of 88 tokens a step on two machines of {options.threads} thread(s); medians of {options.rounds} rounds of "
        f"{options.steps} steps after {options.warm_up}; ratios are those of neighbours in time.",
        "The cable is emulated: only what a step computes was measured; bytes are the formulas', and times follow."
        if options.emulate
        else "Bytes: what the interface of the first machine sent; reached: a bare transfer, both ways at once; "
        "computed: by the first machine's process, waits not counted.",
        *([options.note] if options.note else []),
        *(f"{name.capitalize()} {pays(limit)}." for name, limit in limits.items()),
    ]
    name = "network_emulated" if options.emulate else "network"
    path = write_results(name, f"d{options.width}", rows, "\n".join(text))
    title = f"Two machines, {found['parameters'] / 1e6:.1f} million parameters"
    draw(runs, limits, title + (", emulated" if options.emulate else ""), path.with_suffix(".png"))
    return rows


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("network: ended"))  # so that the namespaces are removed
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what trains here are processes on a CPU, and the table says so
    main()
