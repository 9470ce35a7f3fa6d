"""Train the BPE vocabulary by which captions or other texts are encoded.

    python precompute/vocabulary.py yamls/openmoji_vocabulary.yaml
    python precompute/vocabulary.py yamls/openmoji_vocabulary.yaml entries=512 out=runs/small/vocabulary.json

Writes a file in the format of the `tokenizers` library, and beside it a manifest with its sha256 and its sources.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.log import log
from precompute.config import VocabularyConfig
from recipes.config.command_line import print_once, read_command_line, user_errors


def main(arguments: list[str]) -> None:
    command = read_command_line(arguments, VocabularyConfig, __doc__)
    config: VocabularyConfig = command.config
    with user_errors():
        if command.dry_run:
            from precompute.dry_run import vocabulary_report

            print_once(vocabulary_report(config, command.missing))
            return
        from precompute.texts.vocabulary_job import write_vocabulary

        try:
            write_vocabulary(config)
        except KeyboardInterrupt:
            log.warning("\nvocabulary: interrupted, nothing was written; start it again to train the vocabulary")
            sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
