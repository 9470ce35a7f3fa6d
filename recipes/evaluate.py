"""Measure how good an export's images are: FID and other metrics, or retrieval accuracy.

With a YAML file (docs/evaluation.md), images are compared with a reference; any launcher starts several ranks:

    python recipes/evaluate.py runs/openmoji_diffusion/export yamls/openmoji_evaluate.yaml sampling.guidance=3

Without a YAML file, retrieval accuracy measures how well images fit their captions, by a contrastive model that took no
part in training the images' model.

For each caption of each set one image is drawn, or the best of several (--candidates). The contrastive model ranks all
captions of all sets by how well they fit the image; `top1` and `top5` are the shares of images whose own caption comes
first, or among the first five. The same metrics of real images show how good the contrastive model is, and those of
images that were encoded and decoded show how much latents or tokens lose.

python recipes/evaluate.py runs/openmoji_diffusion/export --retrieval runs/openmoji_judge/export \\
    --sets seen="runs/openmoji/tars/train/*.tar" held_out="runs/openmoji/tars/val/*.tar" --number 23
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.threads import set_default_threads
from recipes.config.command_line import check_out, fail, path_of, user_errors
from recipes.evaluation.command import main as evaluate_by_yaml
from recipes.generation.exports import family_of, find_export, find_network, load_pipeline
from recipes.generation.options import add_options, candidates_of, own_options


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--retrieval", required=True, metavar="MODEL", help="open_clip folder, or MODEL/TAG")
    parser.add_argument("--sets", nargs="+", required=True, metavar="NAME=TARS", help="sets of captioned images")
    parser.add_argument("--number", type=int, help="captions drawn from each set (default: all)")
    parser.add_argument("--out", type=path_of, help="JSON file to write, in addition to the table on standard output")
    add_options(parser, batch=64)
    options = parser.parse_args(arguments)
    if options.number is not None and options.number < 1:
        fail([f"--number: {options.number}; give 1 or more"])
    if options.seed < 0:  # which NumPy's generator refuses, by whose numbers the images are drawn
        fail([f"--seed: {options.seed}; give 0 or more"])
    if options.out is not None:
        check_out(options.out)
    return options


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of every set, and what they depend on."""
    folder = find_export(options.checkpoint)
    own = own_options(options, family_of(folder))
    candidates = candidates_of(options)
    import numpy as np

    from data.sources.tars import TarSource
    from recipes.encoders.base import weights_hash
    from recipes.generation.retrieval import accuracy, ranks, read_pairs, reconstruct
    from recipes.scoring.reranking import Reranker, draw_best

    pipeline = load_pipeline(folder, options.device, options.precision, options.weights)
    model = Reranker(options.retrieval, pipeline.device, "--retrieval")
    reranker = None if options.rerank is None else Reranker(options.rerank, pipeline.device)
    generate = partial(pipeline.generate, batch=options.batch, **own)
    judge = weights_hash(model.network)
    if reranker is not None and weights_hash(reranker.network) == judge:
        fail([f"--rerank: {options.rerank} is the model that judges; another one must choose the images"])
    sets = {}
    for entry in options.sets:
        name, _, urls = entry.partition("=")
        if not urls or name in sets:
            fail([f"--sets: {entry}; give NAME=TARS, each name once"])
        sets[name] = read_pairs(TarSource(urls=urls), options.number, options.seed, pipeline.resolution)
    captions = sorted({caption for _, _, everything in sets.values() for caption in everything})
    places = {caption: i for i, caption in enumerate(captions)}
    texts = model.embed_captions(captions)
    result: dict[str, Any] = {
        "export": str(folder),
        "weights": find_network(folder, options.weights).name,
        "judge": {"name": options.retrieval, "weights_hash": judge},
        "seed": options.seed,
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in own.items()},
        "candidates": {"per caption": candidates, "chosen by": options.rerank},
        "captions": len(captions),
        "sets": {},
    }
    for name, (drawn, real, _) in sets.items():
        made, _ = draw_best(generate, drawn, options.seed, reranker, candidates)
        decoded = reconstruct(pipeline.image_encoder, real, options.batch)
        index = np.array([places[caption] for caption in drawn])
        result["sets"][name] = {
            kind: accuracy(ranks(model.embed_images(images), texts, index))
            for kind, images in (("generated", made), ("reconstructed", decoded), ("real", real))
        }
    return result


def table(result: dict[str, Any]) -> str:
    """The figures as a Markdown table."""
    lines = ["| set | images | number | top 1 | top 5 | median rank |", "| --- | --- | --- | --- | --- | --- |"]
    for name, kinds in result["sets"].items():
        for kind, figures in kinds.items():
            shares = f"{figures['top1']:.1%} | {figures['top5']:.1%} | {figures['median_rank']:g}"
            lines.append(f"| {name} | {kind} | {figures['images']} | {shares} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    if len(arguments) > 1 and arguments[1].endswith((".yaml", ".yml")):
        evaluate_by_yaml(arguments, __doc__)
        return
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        fail([f"give the export before the YAML {arguments[0]}"])
    options = parse(arguments)
    with user_errors():
        result = evaluate(options)
        if options.out is not None:
            from data.files import write_json

            write_json(options.out, result, indent=2)
        print(table(result))


if __name__ == "__main__":
    set_default_threads()
    main(sys.argv[1:])
