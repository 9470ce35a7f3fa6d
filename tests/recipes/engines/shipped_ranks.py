"""Run by test_shipped.py on two ranks in the folder argv[1]: trains each recipe of recipes.json, and writes what was
seen to seen.<rank>.json, or the error that ended it."""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
from torch import nn

from callbacks.throughput import Throughput
from recipes.algorithms.microbatch.search import MicrobatchSearch
from recipes.config.recipe import Recipe, load_config
from recipes.training.ranks import rank, world_size
from tests.recipes.engines.recording import Recorder, record


class Watch(Recorder):
    """Also keeps the number formats that the layers of the blocks gave in training, and the waits of the last step."""

    def __init__(self, counts):
        super().__init__()
        self.formats = set()
        self.counts, self.waits = counts, None

    def begin(self, run):
        blocks = nn.ModuleList(run.task.blocks() or [run.task])
        for module in blocks.modules():
            if not list(module.children()):
                module.register_forward_hook(self._note)

    def batch_start(self, run):
        self._before = self.counts and self.counts.waits

    def step_end(self, run):
        self.waits = self.counts and self.counts.waits - self._before
        super().step_end(run)

    def end(self, run):
        """Keeps no weights and moments: gathering those of shards takes a tenth of the time, and nothing reads them."""

    def _note(self, module, inputs, output):
        if isinstance(output, torch.Tensor):
            self.formats.add(str(output.dtype))


def main(counts=None):
    """`counts` are those of a stub GPU."""
    folder = Path(sys.argv[1])
    seen = {}
    for name, (engine, path) in json.loads((folder / "recipes.json").read_text()).items():
        watch = Watch(counts)
        try:
            record(engine, load_config(path, [], Recipe), watch)
        except BaseException:
            seen[name] = {"error": traceback.format_exc()}
        else:
            (throughput,) = (callback for callback in watch.callbacks.values() if isinstance(callback, Throughput))
            seen[name] = {
                "engine": engine,
                "losses": watch.losses,
                "digests": watch.digests,
                "formats": sorted(watch.formats),
                "validated": [(batch, figures) for batch, _, figures in watch.evals],
                "flops": throughput.flops,
                "captured": sum(f.called for lever in watch.levers for f in getattr(lever, "forwards", ())),
                "strays": counts and counts.strays,
                "waits": watch.waits,
                "found": [s.size for s in watch.levers if isinstance(s, MicrobatchSearch) and s.settled],
            }
        (folder / f"seen.{rank()}.json").write_text(json.dumps(seen))
        if world_size() > 1:
            if "error" in seen[name]:  # the other rank may wait for this one
                os._exit(1)
            torch.distributed.barrier()
    os._exit(0)  # without waiting for Composer's threads


if __name__ == "__main__":
    main()
