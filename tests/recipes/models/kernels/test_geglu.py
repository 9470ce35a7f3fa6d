"""GEGLU by Triton: by its compiler for Hopper and on a GPU. `norms_interpreted.py` runs the kernels on the CPU."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recipes.models.kernels import geglu_kernels
from recipes.models.kernels.geglu import geglu, reference


@pytest.mark.parametrize("name", ["_geglu_forward", "_geglu_backward"])
def test_the_kernels_compile_for_hopper(name, tmp_path, monkeypatch):
    """Numbers are read and written 16 bytes at a time."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(geglu_kernels, name)
    values = {"N": 1280, "BLOCK": geglu_kernels.BLOCK}
    signature = {
        arg: "constexpr" if arg in values else "i32" if arg == "total" else "*bf16" for arg in kernel.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if arg not in values}
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": geglu_kernels.WARPS})
    accesses = [line for line in compiled.asm["ptx"].splitlines() if "ld.global" in line or "st.global" in line]
    assert accesses and all(".v4.b32" in line for line in accesses), accesses


def test_on_a_cpu_pytorch_computes_it():
    x = torch.randn(3, 8, dtype=torch.float64)
    assert torch.equal(geglu(x), reference(x))
    with pytest.raises(ValueError, match="has no two halves"):
        geglu(torch.randn(3, 5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(4, 1024, 2560), (3, 7, 34), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu(shape, dtype):
    """Tolerances as shares of the largest number: those of one rounding."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, device="cuda", generator=generator).to(dtype).requires_grad_()
    dy = torch.randn(*shape[:-1], shape[-1] // 2, device="cuda", generator=generator).to(dtype)
    y = geglu(x)
    exact = x.detach().float().requires_grad_()
    wanted = reference(exact)
    tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 1e-5}[dtype]
    pairs = [(y, wanted), (torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(wanted, exact, dy.float())[0])]
    for one, other in pairs:
        assert one.dtype == dtype
        assert (one.float() - other).abs().max() <= tolerance * other.abs().max()
