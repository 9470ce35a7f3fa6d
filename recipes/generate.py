"""Images from captions, with the weights that a training run exported.

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

from data.threads import set_default_threads
from recipes.config.command_line import fail, user_errors
from recipes.generation.exports import families, family_of, find_export, find_network, load_pipeline
from recipes.models.family import Family


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line. Options of a family that are not given stay None: its pipeline has the defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="export folder of a run, or the run's folder")
    parser.add_argument("--prompts", nargs="+", default=[], metavar="CAPTION", help="captions, one image each")
    parser.add_argument("--prompts-file", type=Path, help="text file with one caption per line")
    parser.add_argument("--out", type=Path, default=Path("grid.png"), help="PNG to write (default: %(default)s)")
    parser.add_argument("--each", type=int, default=1, help="images per caption (default: %(default)s)")
    parser.add_argument("--candidates", type=int, help="images drawn per caption, of which the best are kept")
    parser.add_argument(
        "--rerank", metavar="FOLDER", help="open_clip folder, or MODEL/TAG of open_clip, that says which are best"
    )
    parser.add_argument("--columns", type=int, help="images per row (default: nearest to a square)")
    parser.add_argument("--guidance", type=float, help="classifier-free guidance (default: see below)")
    parser.add_argument("--seed", type=int, default=0, help="image i is drawn by seed + i (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="images sampled at once (default: %(default)s)")
    parser.add_argument("--device", choices=["auto", "cpu", "gpu"], default="auto", help="(default: %(default)s)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the network")
    parser.add_argument(
        "--weights", choices=["ema", "raw"], help="averaged, or as trained (default: averaged if there are any)"
    )
    added = set()
    for family in families().values():
        group = parser.add_argument_group(f"{family.title} models", f"--guidance is {family.guidance:g} by default")
        for flag, settings in family.options.items():
            if flag not in added:  # an option that two families have is listed once
                group.add_argument(flag, **settings)
                added.add(flag)
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


def own_options(options: argparse.Namespace, family: Family) -> dict[str, Any]:
    """The given ones of a family's options and the guidance, as keywords; options of other families are an error."""
    for other in families().values():
        for flag in other.options:
            if flag not in family.options and getattr(options, _keyword(flag)) is not None:
                fail([f"{flag}: an option of {other.title} models; this export holds a {family.title} model"])
    given = {name: getattr(options, name) for name in (*map(_keyword, family.options), "guidance")}
    return {name: value for name, value in given.items() if value is not None}


def _keyword(flag: str) -> str:
    """--top-k -> top_k."""
    return flag.removeprefix("--").replace("-", "_")


def candidates_of(options: argparse.Namespace) -> int:
    """Number of images that are drawn per caption."""
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
        folder = find_export(options.checkpoint)  # before the slow imports, so that a wrong path answers at once
        own, candidates = own_options(options, family_of(folder)), candidates_of(options)
        print(f"generate: {find_network(folder, options.weights)}", file=sys.stderr)
        pipeline = load_pipeline(folder, options.device, options.precision, options.weights)
        reranker = None
        if options.rerank is not None:
            from recipes.scoring.reranking import Reranker, best

            reranker = Reranker(options.rerank, pipeline.device)
        captions = [caption for caption in captions for _ in range(candidates)]
        seeds = [options.seed + i for i in range(len(captions))]
        images = pipeline.generate(captions, seeds=seeds, batch=options.batch, **own)
        if reranker is not None:
            kept = best(reranker.scores(captions, images), candidates, options.each)
            images, captions = images[kept], [captions[i] for i in kept]
        from data.image_grid import picture_grid, save_png

        save_png(picture_grid(images, captions, options.columns), options.out)
        print(options.out)


if __name__ == "__main__":
    set_default_threads()
    main(sys.argv[1:])
