"""Everything legal, drawn by hypothesis: codecs, and tensors with the values that are hard."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from comm_quant import BlockQuant, Codec, Float8Quant

BLOCKS = (1, 2, 3, 5, 7, 8, 31, 32, 33, 64, 100, 128, 256, 257, 2048)
SIZES = (0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 65, 127, 128, 129, 255, 256, 257, 1000, 4099)
EXPONENTS = (-45, -41, -38, -20, -8, -5, -2, 0, 2, 4, 30, 38)
ODD_VALUES = (
    *(math.nan, math.inf, -math.inf, 0.0, -0.0),
    *(1e-45, -1e-40, 2.0**-126, 3e38, -3.4e38, 65504.0, 1e7),
)
DTYPES: SearchStrategy[torch.dtype] = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16]
)
# The kernels run where there is something to run them on; elsewhere see integration/kernels.
DEVICES: SearchStrategy[str] = st.sampled_from(
    ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
)


@st.composite
def codecs(draw: DrawFn) -> Codec:
    """Every codec, of any block length, scale type and rounding."""
    kind = draw(st.sampled_from([8, 4, 2, 1, "e4m3", "e5m2"]))
    block_numel = draw(st.sampled_from(BLOCKS))
    scale_dtype = draw(st.sampled_from([torch.float32, torch.float16]))
    rounding = "nearest" if kind == 1 else draw(st.sampled_from(["nearest", "stochastic"]))
    if isinstance(kind, int):
        return BlockQuant(
            bits=kind, block_numel=block_numel, scale_dtype=scale_dtype, rounding=rounding
        )
    return Float8Quant(
        format=kind, block_numel=block_numel, scale_dtype=scale_dtype, rounding=rounding
    )


@st.composite
def tensors(draw: DrawFn, *, finite: bool = False) -> Tensor:
    """1-D tensors: of any magnitude, with ties, zeros, subnormals, infinities and NaN."""
    numel = draw(st.sampled_from(SIZES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["normal", "ties", "zeros", "mixed"]))
    if kind == "ties":
        x = torch.randint(-254, 255, (numel,), generator=generator) / 2
    elif kind == "zeros":
        x = torch.zeros(numel)
    else:
        x = torch.randn(numel, generator=generator) * 10.0 ** draw(st.sampled_from(EXPONENTS))
    if kind == "mixed" and numel:
        for _ in range(draw(st.integers(1, 3))):
            value = draw(st.sampled_from(ODD_VALUES))
            if math.isfinite(value) or not finite:
                x[draw(st.integers(0, numel - 1))] = value
    if finite:
        x = x.clamp(-3e38, 3e38)
    return x.to(draw(DTYPES))
