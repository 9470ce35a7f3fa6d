"""How long it takes to compare MDS files with their hashes, beside reading them; the least of several times.

python benchmarks/hashes.py
python benchmarks/hashes.py --mb 256 --algorithms xxh64,sha256
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from timeit import repeat

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import numpy as np
from streaming.base.hashing import get_hash, get_hashes

from benchmarks.common.options import positive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=positive, default=64, help="size of the file in MiB; 64 is the encode job's")
    parser.add_argument("--algorithms", default="xxh64,xxh3_64,sha1")
    parser.add_argument("--repeats", type=positive, default=5)
    options = parser.parse_args()
    unknown = [name for name in options.algorithms.split(",") if name not in get_hashes()]
    if unknown:
        parser.error(f"--algorithms: no {unknown[0]!r}; there are {', '.join(sorted(get_hashes()))}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "shard.mds")
        file.write_bytes(np.random.default_rng(0).bytes(options.mb << 20))
        read = min(repeat(file.read_bytes, number=1, repeat=options.repeats))
        print(f"reading {options.mb} MiB from the page cache: {1e3 * read:.1f} ms")
        data = file.read_bytes()
        for name in options.algorithms.split(","):
            seconds = min(repeat(partial(get_hash, name, data), number=1, repeat=options.repeats))
            print(f"{name}: {1e3 * seconds:.1f} ms, {options.mb * 2**20 / seconds / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
