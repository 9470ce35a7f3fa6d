"""Every Triton kernel of the repository compiles for the GPUs that recipes run on, for one of them also at size 1.

Triton compiles without a GPU. The kernels are launched by the functions that launch them in a run, with tensors of the
CPU; in place of a launch, Triton specialises the arguments (an integer of 1 becomes a constant, one that 16 divides is
marked) and compiles. A kernel that no launch below reaches fails the test: add one.
"""

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from recipes.algorithms.sixteen_bit.adam16 import FORMATS as MOMENTS

ROOT = Path(__file__).resolve().parents[4]
CAPABILITIES = [80, 90, 100]
SIZE_1 = ("1 x 1 grid", "one number")  # cases for sm_90 alone: an integer of 1 is a constant for any GPU
NORMS = "recipes.models.kernels.group_norm_kernels"
GEGLU = "recipes.models.kernels.geglu_kernels"
FORMATS = "recipes.algorithms.sixteen_bit.formats_kernel"
ADAM = "recipes.algorithms.sixteen_bit.adam16_kernel"


def norms(samples, channels, side, groups, dtype=torch.bfloat16, splits=1, silu=True):
    """Forward and backward pass of a norm; two launches each if programs share rows."""
    module = importlib.import_module(NORMS)
    x = torch.empty(samples, channels, side, side, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.empty(2, channels)
    stats = torch.empty(2, samples, groups)
    plan = module.make_plan(samples, side * side, channels, groups, 132, splits)
    module.forward_with(plan, x, weight, bias, groups, 1e-5, silu, dtype)
    module.backward_with(plan, torch.empty_like(x), x, weight, bias, stats, groups, silu)


def geglu(*shape, dtype=torch.bfloat16):
    module = importlib.import_module(GEGLU)
    x = torch.empty(*shape, dtype=dtype)
    module.backward(x, module.forward(x))


def formats(count):
    module = importlib.import_module(FORMATS)
    for fmt in MOMENTS[16]:
        module.encode(torch.empty(count), fmt.constants)
        module.decode(torch.empty(count, dtype=torch.int16), fmt.constants)


def adam(count, bits, first=0):
    """Tensors that begin `first` elements after an aligned address."""
    moment = torch.int16 if bits == 16 else torch.float32
    dtypes = (torch.float32, torch.float32, moment, moment)
    tensors = [tuple(torch.empty(first + count, dtype=dtype)[first:] for dtype in dtypes)]
    module = importlib.import_module(ADAM)
    module.update_all(tensors, (1e-3, 1e-3, 1.0), MOMENTS[bits], (0.9, 0.95), 1e-8, None)


# Module -> name of a case -> what launches its kernels.
LAUNCHES = {
    NORMS: {
        "1 x 1 grid": lambda: norms(1, 32, 1, 32),
        "odd sizes, float32": lambda: norms(3, 34, 7, 2, torch.float32, silu=False),
        "512 pixels, shared rows, float16": lambda: norms(16, 320, 64, 32, torch.float16, splits=4),
    },
    GEGLU: {
        "one number": lambda: geglu(1, 2),
        "256 pixels": lambda: geglu(2, 1024, 2560),
        "odd sizes, float32": lambda: geglu(3, 34, dtype=torch.float32),
    },
    FORMATS: {"one number": lambda: formats(1), "many": lambda: formats(4096)},
    ADAM: {"one number": lambda: adam(1, 16), "16 bits": lambda: adam(4096, 16), "32 bits": lambda: adam(4096, 32)},
}
CASES = {
    f"sm_{capability}, {module.rsplit('.', 1)[1]}, {name}": (capability, module, name)
    for capability in CAPABILITIES
    for module, cases in LAUNCHES.items()
    for name in cases
    if capability == 90 or name not in SIZE_1
}


class Compiler:
    """In place of Triton's driver of a GPU: it says which GPU the kernels are for, and there is none.

    Attributes:
        capability: of the GPU, such as 90.
        compiled: each kernel that was launched, with what it was compiled to.
    """

    def __init__(self, capability):
        self.capability = capability
        self.compiled = []

    def get_current_device(self):
        return f"sm_{self.capability}"  # Triton's key of what it has compiled; that of a GPU is an integer

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)


@pytest.fixture
def compiler(request, monkeypatch, tmp_path):
    """A Compiler for `request.param`: kernels that are launched are compiled by it and not run."""
    found, run = Compiler(request.param), JITFunction.run

    def compile_only(self, *arguments, warmup, **options):
        found.compiled.append((self, run(self, *arguments, warmup=True, **options)))

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    # Not reset_active(): since Triton 3.4 that makes the driver of a GPU, which a machine without one has not.
    monkeypatch.setattr(driver, "_active" if hasattr(driver, "_active") else "active", found)
    return found


@pytest.mark.parametrize(("compiler", "module", "name"), CASES.values(), ids=CASES, indirect=["compiler"])
def test_kernels_compile(compiler, module, name):
    LAUNCHES[module][name]()
    assert compiler.compiled
    for kernel, binary in compiler.compiled:
        assert f".target sm_{compiler.capability}" in binary.asm["ptx"], kernel.fn.__name__
        assert binary.asm["cubin"][:4] == b"\x7fELF"  # the assembler took it


@pytest.mark.parametrize("compiler", [90], indirect=True)
@pytest.mark.parametrize(
    ("count", "first", "widths"), [(4096, 0, {"v4.b32"}), (4096, 1, {"b16", "b32"}), (4097, 0, {"b16", "b32"})]
)
def test_the_optimizer_reads_and_writes_16_bytes_at_a_time(count, first, widths, compiler):
    """Triton knows nothing of addresses from a table; where all are aligned, the kernel says so."""
    adam(count, 16, first)
    ((_, binary),) = compiler.compiled
    inside = re.findall(r"@%p\d+ (?:ld|st)\.global\.(\S+)", binary.asm["ptx"])  # what a mask covers: not the table
    assert set(inside) == widths


# --- that nothing is left out ------------------------------------------------------------------


def kernels_of(name):
    """The functions for Triton that a module defines, with or without a tuner around them."""
    module = importlib.import_module(name)
    functions = [
        value if isinstance(value, JITFunction) else getattr(value, "fn", None) for value in vars(module).values()
    ]
    return [one for one in functions if isinstance(one, JITFunction) and one.fn.__module__ == name]


def called_by(kernel):
    """The functions for Triton that a kernel's source names, and those which they name."""
    tree = ast.parse(textwrap.dedent(kernel.src))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    called = {value for name in names if isinstance(value := kernel.fn.__globals__.get(name), JITFunction)} - {kernel}
    return called.union(*(called_by(function) for function in called))


@pytest.mark.parametrize("compiler", [90], indirect=True)
def test_every_kernel_of_the_repository_is_among_them(compiler):
    files = [path for path in (ROOT / "recipes").rglob("*.py") if "triton.jit" in path.read_text(encoding="utf-8")]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    unknown = sorted(set(modules) - set(LAUNCHES))
    assert not unknown, f"{unknown}: kernels that no test compiles; add what launches them to LAUNCHES"
    everything = {kernel: f"{name}.{kernel.fn.__name__}" for name in modules for kernel in kernels_of(name)}
    assert len(everything) >= 10
    for cases in LAUNCHES.values():
        for launch in cases.values():
            launch()
    reached = {kernel for kernel, _ in compiler.compiled}
    reached = reached.union(*(called_by(kernel) for kernel in reached))
    idle = sorted(name for kernel, name in everything.items() if kernel not in reached)
    assert not idle, f"{idle}: no launch in LAUNCHES reaches them; add one"
