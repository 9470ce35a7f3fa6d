"""Encode images and captions to MDS shards, of latents and text embeddings or of tokens.

    python precompute/encode.py yamls/openmoji_encode.yaml
    composer -n 8 precompute/encode.py yamls/sd2_encode.yaml out=/data/latents_256    # or torchrun --nproc_per_node 8
    python precompute/encode.py yamls/sd2_encode.yaml --dry-run

A job that is started again encodes only the missing shards.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.system.locks import held
from data.system.log import log
from data.system.threads import set_default_threads
from data.system.user_name import set_user_name
from precompute.config import EncodeConfig, source_options
from recipes.config.command_line import print_once, read_command_line, user_errors


def main(arguments: list[str]) -> None:
    command = read_command_line(arguments, EncodeConfig, __doc__)
    config: EncodeConfig = command.config
    set_default_threads(spare=max(1, config.workers))
    set_user_name()
    with user_errors():
        from data.sources.base import shards_of
        from data.system.ranks import Rank
        from precompute.output.output_set import but_scores, output_of
        from recipes.config.build import build

        build(config.filter)  # for its errors, before anything slow
        rank = Rank.from_environment()
        if command.dry_run:
            from precompute.dry_run import encode_report

            print_once(encode_report(config, command.missing, rank))
            return
        sources = build(config.sources)
        sets = {label: output_of(config, label, shards_of(source)) for label, source in sources.items()}
        request = config.request()
        # As in `precompute.encoding.job.run`: what a rank's share lacks, this rank does, whatever others have found.
        share = rank.share([(label, shard) for label, output in sets.items() for shard in output.shards])
        own = {label: [shard for other, shard in share if other == label] for label in sets}
        requests = {label: request | source_options(config.sources[label]) for label in sets}
        if all(output.is_complete(requests[label], own[label]) for label, output in sets.items()):
            keep = but_scores(*(output.out for output in sets.values()))
            log.info(f"already complete: {config.out}; delete it to encode again{keep}")
            return
        try:
            # From here on imports take seconds; all errors in the config were reported above.
            from precompute.encoding.job import run

            busy = f"out: another encode job writes into {config.out} ({{holder}}); wait for it, or give another `out`"
            with held(Path(config.out, f".lock-{rank.rank}"), busy):
                run(config, sources, sets, rank)
        except KeyboardInterrupt:
            log.warning("\nencode: interrupted; start it again to do the shards that are not done")
            sys.exit(130)


if __name__ == "__main__":
    main(sys.argv[1:])
