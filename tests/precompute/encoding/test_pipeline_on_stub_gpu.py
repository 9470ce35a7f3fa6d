"""An encode job waits for the copies from the GPU before it reads what they write."""

import json
from pathlib import Path

import pytest

from tests.stub_gpu import needs_stub_gpu


@pytest.mark.slow
@needs_stub_gpu
def test_encodings_are_read_when_they_have_arrived(stub_gpu, tmp_path):
    done = stub_gpu(Path(__file__).with_name("pipeline_on_stub_gpu.py"), tmp_path / "shard")
    assert done.returncode == 0, done.stderr[-4000:]
    values = {number: number + 100.0 * (number == 6) for number in range(12)}  # the bad one was encoded again
    assert json.loads(done.stdout) == [
        [number, [value], [[value] * 2] * 3, number == 6] for number, value in values.items()
    ]
