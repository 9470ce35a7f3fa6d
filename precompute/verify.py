"""Check an encoded set: its files against their hashes, and random records against a second encoding of their images.

    python precompute/verify.py runs/openmoji/latents/train
    python precompute/verify.py runs/docs/packed/docs                       # packed texts: the files only
    python precompute/verify.py yamls/openmoji_encode.yaml --records=64 --seed=0 --out=runs/verified --workers=8

The argument is the folder of one set, or the YAML of an encode job with the overrides with which the job ran. Every
file is read once, by `workers` processes (by default one per CPU core, at most 8); a check that was interrupted goes on
where it stopped. `records` random samples are read from their source again and encoded at other batch sizes and in
fp32. LABEL.json with the results, and LABEL.png with decoded samples beside the originals, are written into `--out`, by
default the folder `verified` beside the sets. Exits with status 1 if the set has faults.

Of a set of packed texts, files, numbers of rows, their lengths and tokens, and the vocabulary are compared with
index.json and text.json; the texts are not packed again.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# This script's folder must not stay on the import path: its files would hide other packages' modules.
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

from data.encoded.manifest import NAME as MANIFEST
from data.encoded.text_manifest import NAME as PACKED
from data.system.log import log
from data.system.threads import set_default_threads
from precompute.config import EncodeConfig
from precompute.output.output_set import CONFIG
from recipes.config.command_line import fail, path_of, read_command_line, user_errors
from recipes.config.reading import read_values
from recipes.config.values import ConfigError

RECORDS = 64  # by default


def without_others(file: Path, label: str) -> list[str]:
    """Overrides of a job's config that remove all sources but one: the others, which are not read, may be gone."""
    try:
        sources = read_values(file, []).get("sources")
    except ConfigError:  # which is reported when the config is read with all overrides
        return []
    others = [name for name in sources if name != label] if isinstance(sources, dict) and label in sources else []
    return [f"sources={json.dumps(dict.fromkeys(others))}"] if others else []


def _packs(file: str) -> bool:
    """Whether a YAML is of a job that packs texts."""
    try:
        return Path(file).is_file() and "positions" in read_values(Path(file), [])
    except ConfigError:  # as above
        return False


def _check_results(out: Path) -> None:
    """Refuse a folder of results that cannot be written, as the one beside a set that others have made often is."""
    out = out.absolute()
    above = next(folder for folder in (out, *out.parents) if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        fail([f"{out}: the results cannot be written there; give another folder by --out=FOLDER"])


def _verify_packed(folder: Path, options: argparse.Namespace, others: list[str]) -> bool:
    others = [f"--{name}" for name in ("records", "seed") if getattr(options, name) is not None] + others
    if others:
        fail([f"{others[0]}: {folder} is a set of packed texts, which are checked with --out and --workers only"])
    out = options.out or folder.parent / "verified"
    _check_results(out)
    with user_errors():
        from precompute.checking.packed import verify_packed

        return verify_packed(folder, out, options.workers)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("verify.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--records", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=path_of)
    parser.add_argument("--workers", type=int, default=min(8, len(os.sched_getaffinity(0))))
    options, rest = parser.parse_known_args(arguments)
    for name, least in (("records", 1), ("seed", 0), ("workers", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            fail([f"--{name}={value}; give {least} or more"])
    label = None
    if rest and Path(rest[0]).is_dir():
        folder = Path(rest[0]).absolute()
        if not (folder / MANIFEST).is_file():
            if (folder / PACKED).is_file():
                return 0 if _verify_packed(folder, options, rest[1:]) else 1
            sets = sorted(str(file.parent) for name in (MANIFEST, PACKED) for file in folder.glob(f"*/{name}"))
            give = f"; give {sets[0]}" if sets else ""
            fail([f"{folder}: not an encoded set, or not finished: it has no {MANIFEST}{give}"])
        if not (folder / CONFIG).is_file():
            fail([f"{folder}: no {CONFIG} in it; give the YAML of the job that encoded the set"])
        label = folder.name
        # Quoted: of a folder such as `a: b`, YAML would make a key and a value.
        out = f"out={json.dumps(str(folder.parent), ensure_ascii=False)}"
        rest = [str(folder / CONFIG), *without_others(folder / CONFIG, label), *rest[1:], out]
    elif rest and "://" in rest[0] and "=" not in rest[0]:
        fail([f"{rest[0]}: remote; copy the set to this machine and give its folder"])
    elif rest and re.fullmatch("[^-=][^=]*", rest[0]) and not Path(rest[0]).suffix and not Path(rest[0]).exists():
        fail([f"{rest[0]}: no such folder"])
    elif rest and _packs(rest[0]):
        fail([f"{rest[0]}: a job of precompute/pack.py; give the folder of one of its sets"])
    command = read_command_line(rest, EncodeConfig, __doc__)
    config: EncodeConfig = command.config
    if command.dry_run:
        fail(["--dry-run: verify.py only reads, it has nothing to try"])
    if label is not None and label not in config.sources:
        fail([f"{rest[0]}: names no source {label}; the folder of a set has its source's name"])
    out = options.out or Path(config.out, "verified")
    _check_results(out)
    set_default_threads(spare=0)
    with user_errors():
        from precompute.checking.verification import verify

        labels = [label] if label else list(config.sources)
        try:
            records, seed = RECORDS if options.records is None else options.records, options.seed or 0
            holds = verify(config, labels, records, seed, out, options.workers)
        except KeyboardInterrupt:
            log.warning("\nverify: interrupted; the same command goes on where it stopped, unless there were faults")
            sys.exit(130)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
