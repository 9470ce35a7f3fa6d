"""`recipes/evaluate.py EXPORT --retrieval MODEL`: how well a contrastive model finds captions by generated images."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from data.system.errors import visible
from recipes.config.command_line import check_out, fail, path_of, say_each_does_all, user_errors
from recipes.generation.exports import family_of, find_export, find_network, load_pipeline, weights_of
from recipes.generation.options import add_options, candidates_of, own_options


def main(arguments: list[str], usage: str | None) -> None:
    """Measure the accuracies, print them as a table, and write them to a file if there is --out.

    Args:
        arguments: the export and flags.
        usage: for help.
    """
    options = read_arguments(arguments, usage)
    say_each_does_all("evaluate --retrieval")
    with user_errors():
        result = evaluate(options)
        if options.out is not None:
            from data.system.files import write_json

            write_json(options.out, result, indent=2)
        print(visible(table(result)))


def read_arguments(arguments: list[str], description: str | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    from recipes.evaluation.retrieval import accuracy, ranks, read_pairs, reconstruct
    from recipes.scoring.reranking import Reranker, draw_best

    network = find_network(folder, options.weights)
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
    if len(captions) == 1:
        fail([f"--sets: all images have the caption {captions[0]!r:.60}, which each would find; give other sets"])
    places = {caption: i for i, caption in enumerate(captions)}
    texts = model.embed_captions(captions)
    result: dict[str, Any] = {
        "export": str(folder),
        "weights": f"{network.name}, {weights_of(folder, network)}",
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
