"""Pictures from captions with weights that a training run exported.

python recipes/generate.py runs/openmoji_diffusion/export --prompts "red heart" "cat face" --out grid.png
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from recipes.cli import fail, user_errors


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="export folder of a run, or the run's folder")
    parser.add_argument("--prompts", nargs="+", default=[], metavar="CAPTION", help="captions, one picture each")
    parser.add_argument("--prompts-file", type=Path, help="text file with a caption a line")
    parser.add_argument("--out", type=Path, default=Path("grid.png"), help="PNG to write (default: %(default)s)")
    parser.add_argument("--each", type=int, default=1, help="pictures a caption (default: %(default)s)")
    parser.add_argument("--columns", type=int, help="pictures a row (default: nearest to a square)")
    parser.add_argument("--sampler", choices=["ddim", "dpm++"], default="dpm++", help="solver (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=25, help="network evaluations a picture (default: %(default)s)")
    parser.add_argument("--guidance", type=float, default=3.0, help="classifier-free guidance (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="picture i starts from noise seed + i (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=16, help="pictures sampled at once (default: %(default)s)")
    parser.add_argument("--resolution", type=int, help="side of the pictures in pixels (default: that of training)")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto", help="(default: %(default)s)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the denoiser")
    parser.add_argument(
        "--weights", choices=["ema", "raw"], help="averaged, or as trained (default: averaged where there are any)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    with user_errors():
        captions = list(options.prompts)
        if options.prompts_file is not None:
            captions += [
                line.strip() for line in options.prompts_file.read_text(encoding="utf-8").splitlines() if line.strip()
            ]
        if not captions:
            fail(['give captions: --prompts "red heart" "cat face", or --prompts-file captions.txt'])
        from recipes.sampling import find_denoiser, find_export

        folder = find_export(options.checkpoint)  # before the slow imports, so that a wrong path answers at once
        denoiser = find_denoiser(folder, options.weights)
        print(f"generate: {denoiser}", file=sys.stderr)
        from recipes.sampling import load_pipeline

        pipeline = load_pipeline(folder, options.device, options.precision, options.weights)
        captions = [caption for caption in captions for _ in range(options.each)]
        pictures = pipeline.generate(
            captions,
            seeds=[options.seed + i for i in range(len(captions))],
            sampler=options.sampler,
            steps=options.steps,
            guidance=options.guidance,
            batch=options.batch,
            resolution=options.resolution,
        )
        from callbacks.pictures import picture_grid, save_png

        save_png(picture_grid(pictures, captions, options.columns), options.out)
        print(options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
