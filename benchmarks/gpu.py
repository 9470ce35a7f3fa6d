"""Test this repository on a machine with one GPU and measure its speed and memory, in nine minutes.

    python benchmarks/gpu.py                                  # results go to benchmarks/results and docs/gpu.md
    python benchmarks/gpu.py --out results --budget 300       # all files in one folder; five minutes
    python benchmarks/gpu.py --list                           # the steps, the most important first
    python benchmarks/gpu.py --only unet_256 numbers          # steps whose names begin so; results of others stay
    python benchmarks/gpu.py --small --device cpu             # all of it at tiny sizes, to see whether it runs
    python benchmarks/gpu.py --place results/gpu.jsonl        # its tables into benchmarks/results and docs/gpu.md

Nothing is downloaded, and caches are written to runs/gpu/cache only. Each step runs in its own process with a time
limit, so an error, a lack of memory or a hang ends only that step; its results until then are kept. The processes are
forks of one that has imported everything. docs/gpu.md says what each table means.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from benchmarks.common.reporting import reason, surroundings
from benchmarks.gpu_run.forks import WITHOUT_CUDA
from benchmarks.gpu_run.items import Item, items
from benchmarks.gpu_run.page import page, place, write_page
from benchmarks.gpu_run.records import DONE, LATE, LEFT_OUT, LOG, MARKDOWN, RECORDS, Records
from data.system.threads import set_default_threads
from recipes.config.command_line import path_of

CACHE = ROOT / "runs" / "gpu" / "cache"
Perform = Callable[[Item, Path, bool], None]
LEAST = 20.0  # seconds; with less, a step would be ended before it finds much
RESERVE = 10.0  # seconds of the budget that are left for writing the last tables


def prepare(options: argparse.Namespace) -> None:
    """Set the variables that must be set before the first import of torch, here and in the processes of the steps."""
    set_default_threads()
    CACHE.mkdir(parents=True, exist_ok=True)
    folders = {
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "XDG_CACHE_HOME": "xdg",
        "HF_HOME": "huggingface",
        "MPLCONFIGDIR": "matplotlib",
    }
    os.environ |= {name: str(CACHE / folder) for name, folder in folders.items()}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    os.environ |= WITHOUT_CUDA  # for the process whose forks the steps are
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if options.commit:
        os.environ["PRECOMPOSE_COMMIT"] = options.commit


def perform(item: Item, folder: Path, small: bool) -> None:
    """The work of an item, in this process."""
    from benchmarks.gpu_run.context import Context

    module, function = item.work.split(":")
    work: Callable[..., None] = getattr(importlib.import_module(f"benchmarks.gpu_run.{module}"), function)
    work(Context(folder, small), **item.arguments)


def in_own_process(perform: Perform, item: Item, folder: Path, small: bool, limit: float) -> None:
    """The same in a process of its own, with all output in the run's log. Exits with 1 after an error.

    Shortly before the limit of time the log is told where it is.
    """
    os.setsid()  # so that the processes which it starts can be ended with it
    with open(folder / LOG, "a", encoding="utf-8", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        faulthandler.dump_traceback_later(max(1.0, limit - 3), file=log)
        with redirect_stdout(log), redirect_stderr(log):
            print(f"\n===== {item.name}")
            try:
                perform(item, folder, small)
            except BaseException as error:
                traceback.print_exc()
                (folder / ".reason").write_text(reason(error), encoding="utf-8")
                sys.stdout.flush()
                os._exit(1)  # not by way of cleaning up, which hangs where a GPU has failed
    os._exit(0)


class Isolated:
    """Runs items in processes of their own: forks of a server that has imported everything, or new processes where
    forks cannot use the GPU."""

    def __init__(self, folder: Path, small: bool, records: Records, markdown: Path) -> None:
        self.folder, self.small, self.records, self.markdown = folder, small, records, markdown
        self.context: Any = multiprocessing.get_context("forkserver")
        self.process: Any = None
        self.perform: Perform = perform

    def __call__(self, item: Item, limit: float) -> str:
        """Run an item. Returns `DONE` or, in one line, what went wrong."""
        (self.folder / ".reason").unlink(missing_ok=True)
        arguments = (self.perform, item, self.folder, self.small, limit)
        self.process = self.context.Process(target=in_own_process, args=arguments)
        self.process.start()
        until, size = time.monotonic() + limit, -1
        while self.process.is_alive() and time.monotonic() < until:
            self.process.join(1)
            if self.records.path.exists() and self.records.path.stat().st_size != size:
                size = self.records.path.stat().st_size
                write_page(self.records, self.markdown)
        late = self.process.is_alive()
        self.end()
        if late:
            return f"{LATE} {limit:.0f} s"
        if self.process.exitcode == 0:
            return DONE
        said = self.folder / ".reason"
        if said.exists():
            return f"FAILED: {said.read_text(encoding='utf-8')}"
        return f"FAILED: exit code {self.process.exitcode}"

    def end(self) -> None:
        """End the process of the current item, and all that it has started."""
        if self.process is None or self.process.pid is None:
            return
        try:
            if os.getpgid(self.process.pid) == self.process.pid:
                os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.join(10)

    def without_forks(self) -> None:
        """Start new processes from now on, which import everything again."""
        self.context = multiprocessing.get_context("spawn")


def here(folder: Path, small: bool) -> Callable[[Item, float], str]:
    """Runs items in this process, without limits."""

    def run(item: Item, limit: float) -> str:
        try:
            perform(item, folder, small)
        except Exception as error:
            traceback.print_exc()
            return f"FAILED: {reason(error)}"
        return DONE

    return run


def run_all(chosen: list[Item], run: Callable[[Item, float], str], records: Records, until: float, say: Any) -> None:
    """Run items until a point in time; the rest is recorded as left out."""
    for number, item in enumerate(chosen):
        left = until - time.monotonic()
        records.add("begin", item=item.name)
        if left < LEAST:
            records.add("end", item=item.name, state=LEFT_OUT, seconds="")
            continue
        began = time.monotonic()
        state = run(item, min(item.limit, left))
        if number == 0 and isinstance(run, Isolated) and "CUDA" in state:
            run.without_forks()  # the first item touches the GPU
            say(f"{item.name}: {state}; again, with new processes in place of forks")
            records.add("end", item=item.name, state=state, seconds=round(time.monotonic() - began, 1))
            records.add("begin", item=item.name)  # which replaces what the first attempt has found
            state = run(item, min(item.limit, until - time.monotonic()))
        records.add("end", item=item.name, state=state, seconds=round(time.monotonic() - began, 1))
        say(f"{item.name}: {state}, {time.monotonic() - began:.0f} s")


def main(arguments: list[str] | None = None) -> Records | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=path_of, help="folder of results (default: runs/gpu, then as with --place)")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which the run ends (540)")
    parser.add_argument("--only", nargs="+", default=[], metavar="STEP", help="only steps whose names begin so")
    parser.add_argument("--skip", nargs="+", default=[], metavar="STEP", help="leave out steps whose names begin so")
    parser.add_argument("--resume", action="store_true", help="only steps that are not done in --out")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see whether the steps run")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="cpu: as if there were no GPU")
    parser.add_argument("--here", action="store_true", help="run all steps in this process, without time limits")
    parser.add_argument("--commit", help="commit of the code, if the checkout has no .git")
    parser.add_argument("--list", action="store_true", help="print the steps and end")
    parser.add_argument("--place", type=path_of, metavar="RECORDS", help="only write the tables of these records")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    if options.out and options.out.exists() and not options.out.is_dir():
        parser.error(f"--out: {options.out} is a file; give a folder")
    if options.place:
        if not options.place.is_file():
            parser.error(f"--place: there is no file {options.place}")
        try:
            place(Records(options.place))
        except ValueError as error:
            parser.error(f"--place: {error}")
        return None
    if options.device == "cpu" and not options.small:
        parser.error("--device cpu: the published sizes would take days; add --small")
    prepare(options)
    known = items(options.small)
    unknown = [n for n in (*options.only, *options.skip) if not any(item.name.startswith(n) for item in known)]
    if unknown:
        parser.error(f"no step begins with {unknown[0]!r}; --list prints their names")
    chosen = [item for item in known if not options.only or item.name.startswith(tuple(options.only))]
    chosen = [item for item in chosen if not item.name.startswith(tuple(options.skip) or ("\0",))]
    if options.list:
        print("\n".join(f"{item.name:45} at most {item.limit:.0f} s" for item in chosen))
        return None
    if not options.here:  # the server process imports everything while this one imports torch
        multiprocessing.set_forkserver_preload(["benchmarks.gpu_run.preload"])
        forkserver.ensure_running()
    import torch  # after `prepare`

    if options.device == "gpu" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU; --small --device cpu tries everything at tiny sizes")
    return run(options, chosen, began)


def run(options: argparse.Namespace, chosen: list[Item], began: float) -> Records:
    """Run the chosen steps and write their results beside those of earlier runs."""
    folder = (options.out or ROOT / "runs" / "gpu").resolve()
    records = Records(folder / RECORDS)
    records.begin_run(surroundings=surroundings(), small=options.small, budget=options.budget)
    if options.resume:
        tried = records.tried()
        chosen = [item for item in chosen if not tried.get(item.name)]
        chosen.sort(key=lambda item: item.name in tried)  # first those that no run has tried yet
        print(f"{sum(tried.values())} steps are done, {len(chosen)} are left")
    runner: Any = here(folder, options.small)
    if not options.here:
        runner = Isolated(folder, options.small, records, folder / MARKDOWN)

        def stop(number: int, frame: Any) -> None:
            runner.end()
            write_page(records, folder / MARKDOWN)
            sys.exit(f"stopped by signal {number}; what was found is in {folder / MARKDOWN}")

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
    run_all(chosen, runner, records, began + options.budget - RESERVE, lambda text: print(text, flush=True))
    write_page(records, folder / MARKDOWN)
    (folder / ".reason").unlink(missing_ok=True)
    print(f"\n{page(records)}\nEverything is in {folder}")
    if options.out is None and not options.small:
        place(records)
    return records


if __name__ == "__main__":
    main()
