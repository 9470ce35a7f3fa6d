"""The benchmark of norms: the shapes in the U-Net, and each implementation on one shape."""

import pytest
import torch

from benchmarks import norms


def test_the_shapes_of_stable_diffusion_2():
    """22 residual blocks with two norms, 16 blocks of transformers with one, and the last one."""
    counts = norms.norm_shapes(norms.SD2, 32)
    assert counts.total() == 22 * 2 + 16 + 1
    assert sum(count for (*_, silu), count in counts.items() if not silu) == 16
    assert counts[320, 32, 32, True] == 8 and counts[2560, 4, 4, True] == 3


@pytest.mark.parametrize("way", [way for way in norms.ways(False, False) if "compiled" not in way])
def test_a_way(way):
    shape, device = (16, 6, 6, True), torch.device("cpu")
    forward, both, kept, moved = norms.measure(way, norms.ways(False, False)[way], shape, 4, 2, 0.01, device)
    elements = 2 * 16 * 6 * 6
    assert kept >= 2 * 2 * elements  # the norm's input and the activation's
    # The smallest traffic is 5 numbers of 2 bytes per element; computing in 32 bits more than doubles it.
    assert moved > (20 if "32" in way else 10) * elements
    line = norms.row(way, "all", 3, (forward, both, kept, moved), 10 * elements, 1e9)
    assert line["count"] == 3 and line["moved"].endswith("x")
    line = norms.row(way, "all", 3, (2.0, 6.0, kept, None), 3e6, 1e9)
    assert (line["forward ms"], line["backward ms"], line["GB/s"], line["of copy"]) == (2.0, 4.0, 0.5, "50%")


def test_a_way_that_does_not_run_here_is_a_row(monkeypatch, tmp_path):
    def broken(*arguments):
        def function(x):
            raise RuntimeError("no compiler\nand more")

        return function

    found = {}
    monkeypatch.setattr(norms, "copy_rate", lambda device, seconds: 1e9)
    monkeypatch.setattr(norms, "ways", lambda on_gpu, tune: {"compiled": broken, "fine": lambda *_: lambda x: 2 * x})
    monkeypatch.setattr(norms, "write_results", lambda name, size, rows, notes: found.update(rows=rows))
    norms.main(["--most", "1", "--seconds", "0"])
    first, second, _ = found["rows"]
    assert first == {"shape": "all", "count": 5, "way": "compiled", "forward ms": "RuntimeError: no compiler and more"}
    assert second["way"] == "fine" and second["count"] == first["count"]
