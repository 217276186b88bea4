"""NVRTC from its wheel compiles for GPUs that are not there, and reports registers and spills."""

from __future__ import annotations

import pytest

from cudahost import ARCHITECTURES, CompileError, compile_cubin

COPY = (
    'extern "C" __global__ void copy(float* x, const float* y) { x[threadIdx.x] = y[threadIdx.x]; }'
)
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) many(float* x) {
    float kept[64];
#pragma unroll
    for (int i = 0; i < 64; i++) kept[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; i++) x[threadIdx.x * 64 + i] = kept[i] * kept[(i * 7 + 3) % 64];
}
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_kernel_becomes_machine_code(architecture: str) -> None:
    compiled = compile_cubin(COPY, architecture=architecture)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.num_registers > 0
    assert compiled.spill_bytes == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_spills_are_seen(architecture: str) -> None:
    assert compile_cubin(SPILLS, architecture=architecture).spill_bytes > 0


def test_a_mistake_is_refused_in_the_compilers_words() -> None:
    with pytest.raises(CompileError, match=r'(?s)sm_90 -DX=1:.*identifier "nonsense" is undefined'):
        compile_cubin("__global__ void f() { nonsense; }", architecture="sm_90", options=["-DX=1"])
