"""Compute how well images and captions fit, with a contrastive model, and find images that two sets share.

    python precompute/scores.py yamls/openmoji_encode.yaml --model=runs/openmoji_judge/export
    composer -n 8 precompute/scores.py yamls/sd2_encode.yaml --model=ViT-B-32/laion2b_s34b_b79k
    python precompute/scores.py yamls/openmoji_encode.yaml --model=runs/openmoji_judge/export --shared val train

The arguments are those of an encode job. Its sources are read; the encode job itself need not have run. Scores are
written into OUT/LABEL/scores. A job that is started again scores only the missing shards. With --shared, images of the
first set that are also in the second are listed in OUT/LABEL/scores/shared.json, and shared.png shows them.
docs/data.md describes the files.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads
from precompute.config import EncodeConfig
from recipes.config.command_line import fail, read_command_line, user_errors


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser("scores.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--shared", nargs=2, metavar=("SET", "IN"))
    parser.add_argument("--threshold", type=float, default=0.95)
    options, rest = parser.parse_known_args(arguments)
    command = read_command_line(rest, EncodeConfig, __doc__)
    config: EncodeConfig = command.config
    if options.model is None:
        fail(["--model: missing; give an open_clip folder, such as the export of a contrastive_text run, or MODEL/TAG"])
    if not -1 <= options.threshold <= 1:
        fail([f"--threshold={options.threshold}; give a cosine similarity from -1 to 1"])
    for label in options.shared or []:
        if label not in config.sources:
            fail([f"--shared: no source {label}; this job has {', '.join(config.sources)}"])
    if command.dry_run:
        fail(["--dry-run: scores.py has nothing to try; start it on a source of a few shards"])
    set_default_threads(spare=0)
    with user_errors():
        from precompute.scoring.duplicates import write_shared
        from precompute.scoring.job import score

        finished = score(config, options.model)
        if options.shared and finished:
            write_shared(config, *options.shared, options.threshold)


if __name__ == "__main__":
    main(sys.argv[1:])
