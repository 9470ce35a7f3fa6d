"""Token batches, samples/s per core: this project's loader compared with streaming and the `tokenizers` library.

Sizes are DALL-E's: 32 x 32 image tokens of four crops, a vocabulary of 16,384 entries, 256 text positions. Captions
consist of invented words with the frequencies of a language (Zipf), because no captions ship with this repository.

    python benchmarks/tokens.py                        # two minutes
    python benchmarks/tokens.py --samples 20000 --words 25

- A rate is samples over CPU seconds of all threads of the training process and the worker, as in benchmarks/loader.py.
  Rates are medians over rounds; readers take turns.
- The library's dropout draws from a generator without a seed, so a resumed run has other batches. It drops fewer merges
  than this loader's, so that the texts have fewer tokens: compare rates at a dropout of 0 first.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch
from streaming import Stream, StreamingDataset
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.common.options import positive
from benchmarks.common.reporting import write_results
from benchmarks.loader import cpu_clock
from data.encoded.dataset import PREFETCH, shared_blocks
from data.tokenizers.bpe import Vocabulary
from data.tokenizers.bpe_training import train
from data.tokens import NO_TOKEN, TokenDataset
from precompute.encoding.columns import TokenColumns
from precompute.encoding.writer import EncodedSample, ShardWriter, Storage

RESOLUTION = 256
GRID = 32 * 32
CROPS = 4
CODES = 8192
POSITIONS = 256
ENTRIES = 16384
DROPOUT = 0.1
OURS = "this loader"
THEIRS = "streaming and tokenizers"
SYLLABLES = [a + b for a in "bcdfghjklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "er", "in", "ou", "st")]


def captions(count: int, words: int) -> list[str]:
    """Captions of about `words` words each, out of 40,000 invented ones."""
    draws = random.Random(1)
    known = ["".join(draws.choices(SYLLABLES, k=draws.choice((1, 1, 2, 2, 3, 4)))) for _ in range(40_000)]
    frequencies = [1 / rank for rank in range(1, len(known) + 1)]
    lengths = [draws.randint(words // 2, words + words // 2) for _ in range(count)]
    return [" ".join(draws.choices(known, frequencies, k=length)) for length in lengths]


def write(folder: Path, texts: list[str]) -> None:
    """Write an encoded set as precompute/encode.py does."""
    rng = np.random.default_rng(0)
    writer = ShardWriter(folder, "all", TokenColumns({RESOLUTION: GRID}, CROPS), Storage(), {})
    for number, text in enumerate(texts):
        row: dict[str, Any] = {"key": f"{number:09d}", "caption": text, "width": 512, "height": 512}
        row[f"crop_{RESOLUTION}"] = np.zeros((CROPS, 4), np.float32)
        row[f"tokens_{RESOLUTION}"] = rng.integers(0, CODES, (CROPS, GRID), dtype=np.uint16)
        writer.add(number, EncodedSample(row, {}))
    writer.end(len(texts))
    writer.finish()


class StockDataset(StreamingDataset):
    """Samples as streaming decodes them, with captions encoded by the library."""

    def __init__(self, tokenizer: Tokenizer, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.tokenizer = tokenizer

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        text = torch.full((POSITIONS,), NO_TOKEN, dtype=torch.int32)
        found = self.tokenizer.encode(sample["caption"]).ids[:POSITIONS]
        text[: len(found)] = torch.tensor(found, dtype=torch.int32)
        crop = sample[f"tokens_{RESOLUTION}"][random.randrange(CROPS)]
        return {"text": text, "image": torch.from_numpy(crop.astype(np.int32))}


def loaders(folder: Path, vocabulary: Tokenizer, batch: int, workers: int) -> dict[str, DataLoader]:
    """The loaders by name."""
    common = {"num_workers": workers, "persistent_workers": workers > 0}
    common["prefetch_factor"] = PREFETCH if workers else None
    found = {}
    for dropout in (0.0, DROPOUT):
        for name in (OURS, THEIRS):
            link = folder / f"{name.split()[0]}{workers}{dropout}"  # streaming allows one data set per folder
            link.symlink_to("mds")
            arguments = {"streams": [Stream(local=str(link))], "batch_size": batch, "shuffle": True}
            title = f"{name}, dropout {dropout:g}"
            if name == OURS:
                ours = TokenDataset(
                    resolution=RESOLUTION,
                    vocabulary=Vocabulary(vocabulary),
                    positions=POSITIONS,
                    dropout=dropout,
                    caption_dropout=0.0,
                    draw_crop=True,
                    blocks=shared_blocks(workers),
                    **arguments,
                )
                found[title] = DataLoader(ours, batch, collate_fn=ours.collate, **common)
                continue
            own = Tokenizer.from_str(vocabulary.to_str())
            own.model.dropout = dropout or None
            found[title] = DataLoader(StockDataset(own, **arguments), batch, **common)
    return found


def measure(loader: DataLoader, clocks: list[Any], seconds: float) -> dict[str, float]:
    """Read whole epochs for at least `seconds`: samples per CPU second, and text tokens per sample."""
    samples = text = 0
    began, cpu = time.perf_counter(), sum(clock() for clock in clocks)
    while True:
        for batch in loader:
            samples += len(batch["text"])
            text += int((batch["text"] != NO_TOKEN).sum()) + 0 * int(batch["image"].sum())  # reads every value
        if time.perf_counter() - began >= seconds:
            return {"per_core": samples / (sum(clock() for clock in clocks) - cpu), "tokens": text / samples}


def run(folder: Path, vocabulary: Tokenizer, batch: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """One row per reader and number of workers."""
    readers = {}
    for workers in (0, 1):
        for name, loader in loaders(folder, vocabulary, batch, workers).items():
            before = set(multiprocessing.active_children())
            measure(loader, [time.process_time], 0)  # warm-up: page cache, cached words, start of the worker
            children = set(multiprocessing.active_children()) - before
            clocks = [cpu_clock(pid) for pid in (os.getpid(), *(child.pid for child in children))]
            readers[name, workers] = loader, clocks
    measured: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in readers}
    for _ in range(rounds):
        for key, (loader, clocks) in readers.items():
            measured[key].append(measure(loader, clocks, seconds))
    rows = []
    for (name, workers), values in measured.items():
        rates = sorted(value["per_core"] for value in values)
        rows.append(
            {
                "reader": name,
                "workers": workers or "in process",
                "samples/s per core": round(statistics.median(rates)),
                "lowest to highest": f"{rates[0]:,.0f} to {rates[-1]:,.0f}",
                "text tokens per sample": round(statistics.fmean(value["tokens"] for value in values), 1),
            }
        )
    return rows


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=positive, default=6000)
    parser.add_argument("--words", type=positive, default=12, help="average number of words per caption")
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="minimum seconds per round and reader")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    try:
        vocabulary = train(captions(20 * arguments.samples, arguments.words), ENTRIES)
    except ValueError as error:
        parser.error(f"--samples {arguments.samples}, --words {arguments.words}: too few for a vocabulary; {error}")
    with tempfile.TemporaryDirectory(prefix="tokens-") as folder:
        write(Path(folder, "mds"), captions(arguments.samples, arguments.words))
        rows = run(Path(folder), vocabulary, arguments.batch, arguments.rounds, arguments.seconds)
    notes = (
        f"{arguments.samples} samples of {CROPS} crops from a warm page cache, batches of {arguments.batch}; medians "
        f"of {arguments.rounds} rounds of at least {arguments.seconds:g} s; readers take turns. Load of the machine "
        f"before: {load:.1f}. Captions of about {arguments.words} invented words, all of them seen before, as most are "
        "after the first minutes of a run. The library's dropout cannot be seeded."
    )
    write_results("tokens", "dalle", rows, notes)
    return rows


if __name__ == "__main__":
    main()
