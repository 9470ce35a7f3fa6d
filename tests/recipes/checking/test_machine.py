import os
import resource
import shutil
from importlib import metadata
from types import SimpleNamespace

import pytest

from recipes import doctor
from recipes.checking import machine
from recipes.checking.machine import (
    ALONE,
    MEETING,
    launcher,
    load,
    open_files,
    packages,
    shared_memory,
    threads,
)


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def lock(tmp_path, name, **changes):
    installed = {package: metadata.version(package) for package in ("torch", "numpy", "mosaicml", "pyyaml")}
    file = tmp_path / name
    file.write_text("".join(f"{package}=={version}\n" for package, version in (installed | changes).items()))
    return file


def test_packages_are_compared_with_the_lock_of_the_installed_torch(tmp_path):
    other, right = lock(tmp_path, "other.lock", torch="1.0", numpy="1.0"), lock(tmp_path, "right.lock")
    found = packages((other, right))
    assert found.level == "ok" and found.text == "4 as in right.lock"
    # A name may be written in several ways.
    assert packages((lock(tmp_path, "right.lock", PyYAML=metadata.version("pyyaml")),)).level == "ok"


def test_packages_of_other_versions_are_named(tmp_path):
    found = packages((lock(tmp_path, "a.lock", numpy="1.0", absent="2"),))
    assert found.level == "warning" and "run `make install`" in found.text
    assert f"numpy {metadata.version('numpy')} (1.0)" in found.text and "absent is not installed (2)" in found.text


def test_this_environment_is_that_of_its_lock():
    assert packages().level == "ok"


@pytest.mark.parametrize(
    ("limit", "level"), [(1024, "warning"), (4095, "warning"), (4096, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_open_files(monkeypatch, limit, level):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert open_files().level == level


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "one process"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "one process"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=1, WORLD_SIZE=2"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 in the environment, without RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT: "),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "WORLD_SIZE=2 in the environment, without MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT is 'x' in the environ"),
    ],
)
def test_variables_that_another_job_has_left(monkeypatch, variables, text):
    for name in (*ALONE, *MEETING):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher().text.startswith(text)
    assert launcher().level == ("error" if "environ" in text else "ok")


def test_a_rank_that_another_job_has_left(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="RANK is 1 of WORLD_SIZE 1 .*unset both"):
        launcher()


def test_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 << 30))
    assert shared_memory(tmp_path).level == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 << 20))
    small = shared_memory(tmp_path)
    assert small.level == "warning" and "67.1 MB free" in small.text and "--shm-size" in small.text
    assert shared_memory(tmp_path / "absent").level == "error"


@pytest.mark.parametrize(("number", "ranks", "level"), [("4", 1, "ok"), ("4", 2, "warning"), ("1", 4, "ok")])
def test_threads(four_cores, monkeypatch, number, ranks, level):
    monkeypatch.setenv("OMP_NUM_THREADS", number)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert threads().level == level


def test_threads_that_are_not_set(four_cores, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads().level == "ok"


@pytest.mark.parametrize(("average", "level"), [(0.5, "ok"), (2.5, "warning")])
def test_other_programs(four_cores, monkeypatch, average, level):
    monkeypatch.setattr(os, "getloadavg", lambda: (average, 0.0, 0.0))
    assert load().level == level


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_90", (9, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_120", (12, 0), True),
        ("compute_90", (9, 0), False),
    ],
)
def test_which_gpus_run_the_code_of_an_architecture(architecture, capability, runs):
    assert machine._runs(architecture, capability) == runs


@pytest.mark.parametrize(
    ("driver", "cuda", "why"),
    [
        ("470.57.02", "12.6", "its CUDA 12.6 needs driver 525 or newer; update the driver"),
        ("550.54.15", "13.0", "its CUDA 13.0 needs driver 580 or newer"),
        ("535.104.05", "12.6", "CUDA_VISIBLE_DEVICES="),
        ("535.104.05", None, "built without CUDA"),
        ("[N/A]", "12.6", "CUDA_VISIBLE_DEVICES="),
    ],
)
def test_a_gpu_that_torch_cannot_use(monkeypatch, driver, cuda, why):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_driver_gpus", lambda: ([("NVIDIA H200", driver)], ""))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    found = machine.gpu()
    assert found.level == "error" and f"the driver {driver} shows NVIDIA H200" in found.text and why in found.text
    monkeypatch.setattr(machine, "_driver_gpus", lambda: ([], ""))
    assert machine.gpu().level == "ok"


def test_a_driver_that_fails(monkeypatch, tmp_path):
    """The machine was said to have no GPU, as those are that have none."""
    import torch

    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = machine.gpu()
    assert found.level == "warning" and "mend its driver: nvidia-smi says `Failed to initialize NVML: " in found.text


def test_each_process_looks_at_its_own_gpu(monkeypatch):
    import torch

    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9, 0))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(machine, "_driver_gpus", lambda: ([], ""))
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert machine.gpu().text.startswith("8 x GPU 5") and chosen == [5]
    monkeypatch.setenv("LOCAL_RANK", "8")
    with pytest.raises(ValueError, match="GPU: process 8 of .* has no GPU, as PyTorch sees 8 GPUs there"):
        machine.gpu()


def test_a_driver_that_hangs(monkeypatch, tmp_path, capsys):
    """It is one line of the doctor, who does not ask torch, which would hang too."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    run = machine.subprocess.run
    monkeypatch.setattr(machine.subprocess, "run", lambda *given, **named: run(*given, **named | {"timeout": 1}))
    with pytest.raises(SystemExit):
        doctor.main([])
    assert capsys.readouterr().err.startswith("error: GPU: nvidia-smi hangs: the driver or a GPU is broken; restart")
