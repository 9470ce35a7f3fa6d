"""Images per second of the VAE's encoder, with one option changed at a time."""

from __future__ import annotations

import inspect
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from benchmarks.common.random_encoders import TEXTS, VAES, vae_flops, write_encoders
from benchmarks.common.reporting import reason
from benchmarks.gpu_run.context import Context
from benchmarks.gpu_run.device import measured_rate
from benchmarks.gpu_run.operators import bound_by, kernels_of, new_profiler, write_profile
from benchmarks.gpu_run.subjects import SHIPPED
from recipes.encoders.vae import kl_vae
from recipes.planning.hardware.peak_flops import peak_flops

NOT_TRIED = {"slicing"}  # saves memory, by encoding one image at a time


def options(resolution: int, small: bool) -> dict[str, tuple[int, dict[str, Any]]]:
    """Name -> (images per batch, arguments of `kl_vae`). Every switch that it has is tried."""
    batch = 2 if small else 64 * 256**2 // resolution**2
    found: dict[str, tuple[int, dict[str, Any]]] = {SHIPPED: (batch, {})}
    for name, parameter in inspect.signature(kl_vae).parameters.items():
        if isinstance(parameter.default, bool) and name not in NOT_TRIED:
            found[f"{name}: {str(not parameter.default).lower()}"] = (batch, {name: not parameter.default})
    found |= {
        "precision: bf16": (batch, {"precision": "bf16"}),
        "half the batch": (batch // 2, {}),
        "twice the batch": (batch * 2, {}),
    }
    # Last: compiling may take what is left of the step's time.
    return dict(sorted(found.items(), key=lambda option: "compiled" in option[1][1]))


def rates(context: Context, *, resolution: int) -> None:
    """A row for each option.

    Raises:
        RuntimeError: an option failed; its row says why.
    """
    torch.backends.cudnn.benchmark = True  # as the encode job does
    torch.backends.cudnn.allow_tf32 = False  # likewise
    device, size = context.device, "small" if context.small else "sd2"
    table = f"VAE encoding at {resolution}"
    side = 64 if context.small else resolution
    flops = vae_flops(VAES[size], side)
    peak = peak_flops(torch.cuda.get_device_name(), "fp16") if device.type == "cuda" else None
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        write_encoders(VAES[size], TEXTS["small"], Path(folder))
        for name, (batch, arguments) in options(resolution, context.small).items():
            values: dict[str, Any] = {"option": name, "batch": batch}
            profiler, kernels = None, None
            try:
                encoder = kl_vae(path=f"{folder}/vae", **arguments).to(device)
                pixels = torch.randint(256, (batch, 3, side, side), dtype=torch.uint8, device=device)
                pixels = pixels.contiguous(memory_format=torch.channels_last)
                work = partial(encoder.encode, pixels)
                found = rate(work, batch, 0.0 if context.small else 1.5, device)
                values |= {"images/s": round(found, 1), "TFLOP/s": round(found * flops / 1e12, 4)}
                values |= {"MFU": f"{found * flops / peak:.1%}" if peak else ""}
                if name == SHIPPED:
                    profiler = profiled(work, device)
                    kernels = kernels_of(profiler)
                    if kernels is not None:
                        product_rate = measured_rate(context, "fp16")
                        values["bound by"] = bound_by(kernels, batch / found, batch * flops, product_rate)
                del encoder, pixels, work
            except Exception as error:
                where = "bound by" if "images/s" in values else "images/s"
                values[where] = reason(error)
                failed.append(name)
            context.records.row(table, values)
            if profiler is not None:  # at once: the step may be ended while a later option compiles
                profile_of = f"{table}, {SHIPPED}: one batch"
                write_profile(context, profiler, kernels, profile_of, f"trace_vae_{resolution}.json.gz")
    context.records.note(table, f"{flops / 1e9:,.2f} GFLOP per image. Random weights and pixels, nothing is read.")
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")


def profiled(work: Callable[[], Any], device: torch.device) -> profile:
    """A profiler of one call."""
    gpu = device.type == "cuda"
    with new_profiler(gpu) as profiler:
        work()
        if gpu:
            torch.cuda.synchronize()
    return profiler


def rate(work: Callable[[], Any], count: int, seconds: float, device: torch.device) -> float:
    """Items per second of `work`, which processes `count` items per call, after a warm-up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        work()
    wait()
    runs, began = 0, time.perf_counter()
    while not runs or time.perf_counter() - began < seconds:
        work()
        runs += 1
        wait()
    return runs * count / (time.perf_counter() - began)
