"""Compiles stub.c, and says with which variables a process takes it for a GPU.

Everything that runs on the host is what it is with a GPU: PyTorch's dispatch and its caching allocator, autocast,
autograd, FSDP, compiled graphs, Triton's compiler for compute capability 9.0. Kernels do nothing, so that tensors hold
zeros or what was there before, and no result means anything.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("stub.c")
LIBRARY = "libcuda.so.1"
PYTORCH = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so")
STUBBED = re.compile(r"(cuda|cublas|cudnn|cusolver|cusparse|cufft|nccl)[A-Za-z0-9_]+")
# Functions of the real libraries that need no GPU, such as versions and texts of errors.
REAL = re.compile(r"(cu|nccl)\w*Get(Version|ErrorString|ErrorName|LastErrorString|Property|Status\w+)(_v2)?")


def why_not() -> str | None:
    """Why it cannot be built here, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "the stub GPU is made for Linux on x86_64"
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    missing = [program for program in ("gcc", "nm") if shutil.which(program) is None]
    return f"no {' and no '.join(missing)} here" if missing else None


def build(folder: Path) -> Path:
    """Write the library into a folder; returns its path.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its output says why.
    """
    import triton

    # Structures are those of PyTorch's CUDA; Triton has the headers of the compiler, which they include.
    own_cuda = sorted(_libraries().parents[1].glob("nvidia/*/include/driver_types.h"))
    headers = [*(file.parent for file in own_cuda), Path(triton.__file__).parent / "backends" / "nvidia" / "include"]
    compiler = ["gcc", "-w", "-O1", "-fPIC"]
    own, others = folder / "stub.o", folder / "others.c"
    subprocess.run([*compiler, "-c", *(f"-I{include}" for include in headers), str(SOURCE), "-o", str(own)], check=True)
    here = _symbols(own, "--defined-only")
    needed = {name for file in PYTORCH for name in _symbols(_libraries() / file, "--dynamic", "--undefined-only")}
    names = sorted(n for n in needed - here if STUBBED.fullmatch(n) and not REAL.fullmatch(n))
    # A function that creates something gives its handle by its first argument.
    texts = ["int {0}(void **made) {{ *made = (void *)16; return 0; }}", "int {0}() {{ return 0; }}"]
    creates = re.compile(r"\w*Create\w*|ncclCommInit\w+")
    others.write_text("\n".join(texts[not creates.fullmatch(name)].format(name) for name in names), encoding="utf-8")
    library = folder / LIBRARY
    made = ["-shared", f"-Wl,-soname,{LIBRARY}", "-o", str(library)]
    subprocess.run([*compiler, str(own), str(others), *made, "-ldl", "-lpthread"], check=True)
    for other in ("libcuda.so", "libnvidia-ml.so.1"):  # Triton's launchers are linked with it; PyTorch may ask NVML
        (folder / other).symlink_to(LIBRARY)
    return library


def variables(library: Path) -> dict[str, str]:
    """Environment variables of a process that takes the library for a GPU."""
    return {
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(library.parent), os.environ.get("LD_LIBRARY_PATH")])),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TRITON_CACHE_DIR": str(library.parent / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(library.parent / "inductor"),
        "PYTHONFAULTHANDLER": "1",  # prints the line that touches what a copy has not written, or not read, yet
    }


def _libraries() -> Path:
    return Path(torch.__file__).parent / "lib"


def _symbols(file: Path, *options: str) -> set[str]:
    if not file.is_file():
        return set()
    listed = subprocess.run(["nm", *options, str(file)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines() if line.strip()}
