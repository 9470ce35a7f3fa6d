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

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.threads import set_default_threads
from data.system.user_name import set_user_name
from recipes.config.command_line import fail
from recipes.evaluation import command, retrieval_command


def main(arguments: list[str]) -> None:
    if len(arguments) > 1 and arguments[1].endswith((".yaml", ".yml")):
        command.main(arguments, __doc__)
        return
    if arguments and arguments[0].endswith((".yaml", ".yml")):
        fail([f"give the export before the YAML {arguments[0]}"])
    retrieval_command.main(arguments, __doc__)


if __name__ == "__main__":
    set_default_threads()
    set_user_name()
    main(sys.argv[1:])
