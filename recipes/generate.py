"""Pictures from captions with weights that a training run exported, of diffusion or of tokens.

python recipes/generate.py runs/openmoji_diffusion/export --prompts "red heart" "cat face" --out grid.png
python recipes/generate.py runs/openmoji_dalle/export --prompts "red heart" --candidates 32 --each 4 \
    --rerank runs/openmoji_text/export
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from recipes.config.command_line import fail, user_errors

# Options that only one kind of model takes, as the keywords of its pipeline's `generate`.
OWN = {
    "diffusion": ("sampler", "steps", "resolution"),
    "tokens": ("temperature", "top_k", "top_p", "picture", "rows"),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. What is not given to a model's own options is left to its pipeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="export folder of a run, or the run's folder")
    parser.add_argument("--prompts", nargs="+", default=[], metavar="CAPTION", help="captions, one picture each")
    parser.add_argument("--prompts-file", type=Path, help="text file with a caption a line")
    parser.add_argument("--out", type=Path, default=Path("grid.png"), help="PNG to write (default: %(default)s)")
    parser.add_argument("--each", type=int, default=1, help="pictures a caption (default: %(default)s)")
    parser.add_argument("--candidates", type=int, help="pictures drawn a caption, of which the best are kept")
    parser.add_argument(
        "--rerank", metavar="FOLDER", help="open_clip folder, or MODEL/TAG of open_clip, that says which are best"
    )
    parser.add_argument("--columns", type=int, help="pictures a row (default: nearest to a square)")
    parser.add_argument("--guidance", type=float, help="classifier-free guidance (default: diffusion 3, tokens 1)")
    parser.add_argument("--seed", type=int, default=0, help="picture i is drawn by seed + i (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="pictures sampled at once (default: %(default)s)")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto", help="(default: %(default)s)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the network")
    parser.add_argument(
        "--weights", choices=["ema", "raw"], help="averaged, or as trained (default: averaged where there are any)"
    )
    diffusion = parser.add_argument_group("diffusion")
    diffusion.add_argument("--sampler", choices=["ddim", "dpm++"], help="solver (default: dpm++)")
    diffusion.add_argument("--steps", type=int, help="network evaluations a picture (default: 25)")
    diffusion.add_argument("--resolution", type=int, help="side of the pictures in pixels (default: that of training)")
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument("--temperature", type=float, help="divides the logits (default: 1)")
    tokens.add_argument("--top-k", type=int, help="only the so many likeliest codes (default: all)")
    tokens.add_argument("--top-p", type=float, help="only the likeliest codes of this share (default: all)")
    tokens.add_argument("--picture", type=Path, help="picture whose upper rows are kept and completed")
    tokens.add_argument("--rows", type=int, help="rows of the grid of tokens that are kept (default: 15 of 32)")
    return parser.parse_args(arguments)


def read_captions(options: argparse.Namespace) -> list[str]:
    """The captions of the command line and of the file."""
    captions = list(options.prompts)
    if options.prompts_file is not None:
        lines = options.prompts_file.read_text(encoding="utf-8").splitlines()
        captions += [line.strip() for line in lines if line.strip()]
    if not captions:
        fail(['give captions: --prompts "red heart" "cat face", or --prompts-file captions.txt'])
    return captions


def own_options(options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """The given ones of the options that a kind of model takes; those of another kind are an error."""
    for other, names in OWN.items():
        wrong = [name for name in names if other != kind and getattr(options, name) is not None]
        if wrong:
            fail([f"--{wrong[0].replace('_', '-')}: of {other} models; this export is of the kind {kind}"])
    given = {name: getattr(options, name) for name in (*OWN[kind], "guidance")}
    return {name: value for name, value in given.items() if value is not None}


def candidates_of(options: argparse.Namespace) -> int:
    """Pictures that are drawn a caption."""
    count = options.each if options.candidates is None else options.candidates
    if options.each < 1 or count < options.each:
        fail([f"--candidates: {count}; give at least as many as are kept (--each {options.each})"])
    if count > options.each and options.rerank is None:
        fail(["--candidates: give the model that says which are best: --rerank FOLDER"])
    return count


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    with user_errors():
        captions = read_captions(options)
        from recipes.generation.exports import find_export, find_network, kind_of

        folder = find_export(options.checkpoint)  # before the slow imports, so that a wrong path answers at once
        own, candidates = own_options(options, kind_of(folder)), candidates_of(options)
        print(f"generate: {find_network(folder, options.weights)}", file=sys.stderr)
        from recipes.generation.exports import load_pipeline

        pipeline = load_pipeline(folder, options.device, options.precision, options.weights)
        reranker = None
        if options.rerank is not None:
            from recipes.generation.reranking import Reranker, best

            reranker = Reranker(options.rerank, pipeline.device)
        captions = [caption for caption in captions for _ in range(candidates)]
        seeds = [options.seed + i for i in range(len(captions))]
        pictures = pipeline.generate(captions, seeds=seeds, batch=options.batch, **own)
        if reranker is not None:
            kept = best(reranker.scores(captions, pictures), candidates, options.each)
            pictures, captions = pictures[kept], [captions[i] for i in kept]
        from data.image_grid import picture_grid, save_png

        save_png(picture_grid(pictures, captions, options.columns), options.out)
        print(options.out)


if __name__ == "__main__":
    main(sys.argv[1:])
