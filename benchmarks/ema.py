"""Time of an update of the averaged weights, compared with composer.algorithms.EMA on the same model.

    python benchmarks/ema.py                # a U-Net of 40 million parameters on a CPU, Stable Diffusion 2's on a GPU
    python benchmarks/ema.py --size sd2

Goal: at most a third of Composer's time. Times are medians; the alternatives take turns, so that other load on the
machine affects all of them. GB/s is the memory traffic that an update needs over its time: ours reads the average and
the parameters and writes the average, three passes over the memory; Composer's makes nine.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch
from composer.algorithms.ema.ema import EMAParameters, compute_ema

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.common.timing import times, training_device
from benchmarks.norms import SD2
from recipes.algorithms.averaging.average import Average, HostAverage
from recipes.models.latent_diffusion.unet import unet

KEEP = 0.9999
SIZES = {
    "small": {"channels": [96, 192, 384], "attention": [True, True, False], "heads": [2, 3, 6], "text_width": 256},
    "sd2": SD2,
}


def main(arguments: list[str] | None = None) -> None:
    gpu = training_device().type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="sd2" if gpu else "small")
    parser.add_argument(
        "--rounds", type=positive, default=50 if gpu else 20, help="measured updates of each alternative"
    )
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    with torch.device("cuda" if gpu else "cpu"):
        model = unet(**SIZES[options.size])
    composer_average, ours, host = EMAParameters(model), Average(model), HostAverage(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)

    def host_done() -> None:
        host.update(KEEP)
        host.settle()

    works = {
        "composer.algorithms.EMA": lambda: compute_ema(model, composer_average, KEEP),
        "scheduled_ema": lambda: ours.update(KEEP),
        "scheduled_ema, device: cpu, complete update": host_done,
    }
    seconds = times(works, options.rounds, gpu)
    # How long training waits if updates are far apart: not for the averaging, and on a GPU not for the copy either.
    waits = []
    for _ in range(max(3, options.rounds // 4)):
        began = time.perf_counter()
        host.update(KEEP)
        waits.append(time.perf_counter() - began)
        host.settle()
    seconds["scheduled_ema, device: cpu, wait of training"] = statistics.median(waits)

    # Both made the same updates, so the averages must agree.
    for name, average in zip(ours.names, ours.shadow, strict=True):
        torch.testing.assert_close(average, composer_average.named_parameters_dict[name], rtol=1e-4, atol=1e-5)
    count = sum(p.numel() for p in model.parameters())
    reference = seconds["composer.algorithms.EMA"]
    passes = {"composer.algorithms.EMA": 9, "scheduled_ema": 3}
    rows = [
        {
            "average": name,
            "parameters": f"{count:,}",
            "ms per update": round(1e3 * value, 2),
            "relative to Composer's": round(value / reference, 3),
            "GB/s": round(passes[name] * 4 * count / value / 1e9, 1) if name in passes else "",
        }
        for name, value in seconds.items()
    ]
    write_results("ema", options.size, rows)


if __name__ == "__main__":
    main()
