"""Run by test_shipped.py on two ranks in the folder argv[1]: trains each recipe of recipes.json, and writes what was
seen to seen.<rank>.json, or the error that ended it."""

import itertools
import json
import os
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:] = [str(ROOT)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402
from streaming.base.shared import prefix  # noqa: E402
from torch import nn  # noqa: E402

from callbacks.throughput import Throughput  # noqa: E402
from recipes.config.recipe import Recipe, load_config  # noqa: E402
from recipes.training.ranks import rank, world_size  # noqa: E402
from tests.recipes.engines.recording import Recorder, record  # noqa: E402


class Watch(Recorder):
    """Also keeps the number formats that the layers of the blocks gave in training."""

    def __init__(self):
        super().__init__()
        self.formats = set()

    def begin(self, run):
        blocks = nn.ModuleList(run.task.blocks() or [run.task])
        for module in blocks.modules():
            if not list(module.children()):
                module.register_forward_hook(self._note)

    def _note(self, module, inputs, output):
        if isinstance(output, torch.Tensor):
            self.formats.add(str(output.dtype))


def main():
    folder = Path(sys.argv[1])
    # streaming tries names of shared memory from 0 on, for each data set: hundreds, where many were left on a machine.
    first = 1000 * int(os.environ["MASTER_PORT"])
    prefix._each_prefix_int = lambda: itertools.count(first)
    seen = {}
    for name, (engine, path) in json.loads((folder / "recipes.json").read_text()).items():
        watch = Watch()
        try:
            record(engine, load_config(path, [], Recipe), watch)
        except BaseException:
            seen[name] = {"error": traceback.format_exc()}
        else:
            (throughput,) = (callback for callback in watch.callbacks.values() if isinstance(callback, Throughput))
            seen[name] = {
                "losses": watch.losses,
                "digests": watch.digests,
                "formats": sorted(watch.formats),
                "validated": [(batch, figures) for batch, _, figures in watch.evals],
                "flops": throughput.flops,
            }
        (folder / f"seen.{rank()}.json").write_text(json.dumps(seen))
        if "error" in seen[name]:  # the other rank may wait for this one
            os._exit(1)
        if world_size() > 1:
            torch.distributed.barrier()
    os._exit(0)  # without waiting for Composer's threads


if __name__ == "__main__":
    main()
