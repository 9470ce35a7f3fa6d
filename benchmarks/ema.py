"""Time of an update of the averaged weights: ours beside composer.algorithms.EMA's, on the same model in the same run.

    python benchmarks/ema.py                # a U-Net of 40 million parameters on a CPU, Stable Diffusion 2's on a GPU
    python benchmarks/ema.py --size sd2

Goal: at most a third of Composer's time. The figures are medians; the three take turns, so that what else the machine
does falls on all of them. Beside each stand the bytes that it must move and the rate at which it moved them: an update
reads the average and the parameters and writes the average, three passes over the memory; Composer's makes nine.
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

from benchmarks.reporting import write_results
from benchmarks.timing import times
from recipes.algorithms.averaging.average import Average, HostAverage
from recipes.models.latent_diffusion.unet import unet

KEEP = 0.9999
SIZES = {
    "small": {"channels": [96, 192, 384], "attention": [True, True, False], "heads": [2, 3, 6], "text_width": 256},
    "sd2": {
        "channels": [320, 640, 1280, 1280],
        "attention": [True, True, True, False],
        "heads": [5, 10, 20, 20],
        "text_width": 1024,
    },
}


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="sd2" if gpu else "small")
    parser.add_argument("--rounds", type=int, default=50 if gpu else 20, help="updates of each that are measured")
    options = parser.parse_args()
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
        "scheduled_ema, device: cpu, until done": host_done,
    }
    seconds = times(works, options.rounds, gpu)
    # What training waits for, where updates are far apart: the averaging is not done, on a GPU not the copy either.
    waits = []
    for _ in range(max(3, options.rounds // 4)):
        began = time.perf_counter()
        host.update(KEEP)
        waits.append(time.perf_counter() - began)
        host.settle()
    seconds["scheduled_ema, device: cpu, training waits"] = statistics.median(waits)

    # The same updates: the two must agree.
    for name, average in zip(ours.names, ours.shadow, strict=True):
        torch.testing.assert_close(average, composer_average.named_parameters_dict[name], rtol=1e-4, atol=1e-5)
    count = sum(p.numel() for p in model.parameters())
    reference = seconds["composer.algorithms.EMA"]
    passes = {"composer.algorithms.EMA": 9, "scheduled_ema": 3}
    rows = [
        {
            "average": name,
            "parameters": f"{count:,}",
            "ms an update": round(1e3 * value, 2),
            "of Composer's": round(value / reference, 3),
            "GB/s": round(passes[name] * 4 * count / value / 1e9, 1) if name in passes else "",
        }
        for name, value in seconds.items()
    ]
    write_results("ema", options.size, rows)


if __name__ == "__main__":
    main()
