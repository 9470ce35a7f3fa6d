"""Copies between page-locked memory and the stub GPU, and when the host touches it. Run by test_stub_gpu.py."""

import sys

import torch

numbers = torch.arange(5, device="cuda")
other = torch.cuda.Stream()


def read(when):
    on_host = numbers.to("cpu", non_blocking=True)
    assert on_host.is_pinned()
    event = torch.cuda.Event()
    if when == "after the stream":
        torch.cuda.current_stream().synchronize()
    elif when == "after a stream that waits for the stream":
        other.wait_stream(torch.cuda.current_stream())
        other.synchronize()
    elif when == "after an event":
        event.record()
        assert not event.query()
        event.synchronize()
        assert event.query()
    elif when == "after another stream":
        other.synchronize()
    elif when == "after an event before it":
        event.record()
        later = numbers.to("cpu", non_blocking=True)
        event.synchronize()
        on_host.tolist()  # its copy is complete
        on_host = later
    on_host.tolist()


def write(when):
    on_host = torch.zeros(5).pin_memory()
    on_device = on_host.to("cuda", non_blocking=True)
    on_host.tolist()  # may be read
    if when == "after the stream":
        torch.cuda.current_stream().synchronize()
    on_host.add_(1)
    assert on_device.cpu().tolist() == [0.0] * 5


{"read": read, "write": write}[sys.argv[1]](sys.argv[2])
print("done")
