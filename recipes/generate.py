"""Draw images from captions, with the weights that a training run exported.

python recipes/generate.py runs/openmoji_diffusion/export --prompts "red heart" "cat face" --out grid.png
python recipes/generate.py runs/openmoji_dalle/export --prompts "red heart" --candidates 32 --each 4 \\
    --rerank runs/openmoji_text/export
"""

import argparse
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.errors import visible
from data.system.threads import set_default_threads
from data.system.user_name import set_user_name
from recipes.config.command_line import check_out, fail, path_of, say_each_does_all, user_errors
from recipes.generation.exports import family_of, find_export, find_network, load_pipeline
from recipes.generation.options import add_options, candidates_of, own_options

MOST_COLUMNS = 1000  # wider files are hardly ever opened, and far wider ones cannot be written


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", default=[], metavar="CAPTION", help="captions, one image each")
    parser.add_argument("--prompts-file", type=path_of, help="text file with one caption per line")
    parser.add_argument("--out", type=path_of, default=Path("grid.png"), help="PNG to write (default: %(default)s)")
    parser.add_argument("--each", type=int, default=1, help="images per caption (default: %(default)s)")
    parser.add_argument("--columns", type=int, help="images per row (default: nearest to a square)")
    add_options(parser, batch=16)
    options = parser.parse_args(arguments)
    if options.columns is not None and not 1 <= options.columns <= MOST_COLUMNS:
        fail([f"--columns: {options.columns}; give 1 to {MOST_COLUMNS}"])
    if options.out.suffix.lower() not in ("", ".png"):
        fail([f"--out: {options.out}: the file is a PNG; give a name that ends in .png"])
    check_out(options.out)
    return options


def read_captions(options: argparse.Namespace) -> list[str]:
    """The captions of the command line and of the file."""
    captions = list(options.prompts)
    for caption in captions:
        try:
            caption.encode()
        except UnicodeEncodeError:  # of the surrogates that Python makes of bytes that are not UTF-8
            fail([f"--prompts: {caption!r:.60} is not UTF-8 text; the terminal or the script has another encoding"])
    if options.prompts_file is not None:
        try:
            lines = options.prompts_file.read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            fail([f"--prompts-file: {options.prompts_file} is not UTF-8 text ({error.reason}): save it as UTF-8"])
        captions += [line.strip() for line in lines if line.strip()]
    if not captions:
        fail(['give captions: --prompts "red heart" "cat face", or --prompts-file captions.txt'])
    return captions


def say_lost(captions: list[str], lost: list[int]) -> None:
    """A line on standard error if captions are cut: how many, and what the first of them loses."""
    cut = [i for i, tokens in enumerate(lost) if tokens]
    if cut:
        caption, tokens = captions[cut[0]], lost[cut[0]]
        text = f"{caption[:40]}..." if len(caption) > 40 else caption
        many = "1 caption is" if len(cut) == 1 else f"{len(cut)} captions are"
        last = "token is" if tokens == 1 else f"{tokens} tokens are"
        print(f"generate: {many} too long for the model: the last {last} cut from {text!r}", file=sys.stderr)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    say_each_does_all("generate")
    with user_errors():
        captions = read_captions(options)
        folder = find_export(options.checkpoint)  # before the slow imports, so that a wrong path answers at once
        own, candidates = own_options(options, family_of(folder)), candidates_of(options, options.each)
        print(visible(f"generate: {find_network(folder, options.weights)}"), file=sys.stderr)
        pipeline = load_pipeline(folder, options.device, options.precision, options.weights)
        say_lost(captions, pipeline.lost_tokens(captions))
        from recipes.scoring.reranking import Reranker, draw_best

        reranker = None if options.rerank is None else Reranker(options.rerank, pipeline.device)
        generate = partial(pipeline.generate, batch=options.batch, **own)
        images, captions = draw_best(generate, captions, options.seed, reranker, candidates, options.each)
        from data.image_grid import picture_grid, save_png

        save_png(picture_grid(images, captions, options.columns), options.out)
        print(options.out)


if __name__ == "__main__":
    set_default_threads()
    set_user_name()
    main(sys.argv[1:])
