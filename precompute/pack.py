"""Pack texts into rows of tokens of one length, as MDS shards for language models.

    python precompute/pack.py yamls/docs_pack.yaml
    torchrun --nproc_per_node 16 precompute/pack.py yamls/gpt2_pack.yaml    # processes share the input shards
    python precompute/pack.py yamls/gpt2_pack.yaml --dry-run

A job that is started again packs only the missing shards.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.locks import held
from data.system.log import log
from precompute.texts.pack_config import PackConfig
from recipes.config.command_line import print_once, read_command_line, user_errors


def main(arguments: list[str]) -> None:
    command = read_command_line(arguments, PackConfig, __doc__)
    config: PackConfig = command.config
    with user_errors():
        from data.sources.base import shards_of
        from data.system.ranks import Rank
        from precompute.output.output_set import OutputSet
        from recipes.config.build import build

        rank = Rank.from_environment()
        if command.dry_run:
            from precompute.dry_run import pack_report

            print_once(pack_report(config, command.missing, rank))
            return
        from precompute.texts.packing import pack

        sources = build(config.sources)
        sets = {label: OutputSet(f"{config.out}/{label}", shards_of(source)) for label, source in sources.items()}
        busy = f"out: another job writes into {config.out} ({{holder}}); wait for it, or give another `out`"
        try:
            with held(Path(config.out, f".lock-{rank.rank}"), busy):
                pack(config, sources, sets, rank)
        except KeyboardInterrupt:
            log.warning("\npack: interrupted; start it again to do the shards that are not done")
            sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
