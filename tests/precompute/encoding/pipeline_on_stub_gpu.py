"""The pipeline of an encode job with encodings on the stub GPU, which copies but computes nothing.

Run by test_pipeline_on_stub_gpu.py. A value that the host reads or overwrites while it is copied ends the process.
"""

import json
import sys
from pathlib import Path

import torch

from data.sources.base import InputShard, Position
from precompute.encoding import encodings, pipeline
from precompute.encoding.batch import DecodedBatch, ImageFacts, ShardEnd
from precompute.encoding.encodings import Encodings
from precompute.encoding.pipeline import EncodePipeline
from precompute.encoding.progress import EncodeProgress
from precompute.encoding.writer import ShardWriter, Storage
from recipes.encoders.base import Stored
from tests.precompute.output_sets import COLUMNS

IMAGES, BATCH = 12, 4
BAD = 6  # an image whose values are finite in fp32 only
SHARD = InputShard("train", "a")


class Images:
    """The image encoder, of which the pipeline asks this alone; `encode` below takes its place."""

    kind, dtype = "latents", "float16"


def on_gpu(values, dtype):
    return torch.tensor(values, dtype=dtype).pin_memory().to("cuda", non_blocking=True)


def encode(pixels, tokens, images, texts, exact=False):
    """Latents that hold the images' numbers; all values of a new encoding in fp32 are larger by 100."""
    pixels[8].to("cuda", non_blocking=True)
    numbers = [number + 100 * exact for number in pixels[8][:, 0, 0, 0, 0].tolist()]  # does not wait for the copy
    latents = on_gpu([[[[number] * 4] * 4] * 2 for number in numbers], torch.float16)
    good = on_gpu([number != BAD for number in numbers], torch.bool)
    sums = on_gpu([[[number] * 2] * 3 for number in numbers], torch.float64)
    text = on_gpu([[[number] * 5] * 3 for number in numbers], torch.float16)
    return Encodings({8: Stored({"mean": latents, "std": latents}, good, sums)}, text, good, good)


def batches():
    for first in range(0, IMAGES, BATCH):
        numbers = range(first, first + BATCH)
        pixels = torch.tensor(numbers, dtype=torch.uint8).view(-1, 1, 1, 1, 1).expand(-1, 1, 8, 8, 3).contiguous()
        images = [ImageFacts(Position(SHARD, n), str(n), "c", 8, 8, {8: [(0, 0, 8, 8)]}) for n in numbers]
        ends = [ShardEnd(SHARD, IMAGES, 1)] if first + BATCH == IMAGES else []
        yield DecodedBatch({8: pixels}, torch.zeros(BATCH, 3, dtype=torch.int64), images, ends=ends).pin_memory()


class KeepingWriter(ShardWriter):
    def add(self, number, sample):
        super().add(number, sample)
        values = {float(value) for name in ("mean_8", "std_8", "text") for value in sample.columns[name].flat}
        written.append([number, sorted(values), sample.sums[8].tolist(), sample.reencoded])


written = []
pipeline.encode = encodings.encode = encode
job = EncodePipeline(
    Images(),
    None,
    lambda shard: KeepingWriter(Path(sys.argv[1]), shard.shard, COLUMNS, Storage(), {}),
    lambda shard: None,
    EncodeProgress(1, quiet=True),
)
job.run(batches())
print(json.dumps(written))
