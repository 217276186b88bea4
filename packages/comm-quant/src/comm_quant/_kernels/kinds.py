"""How operators, which take no dataclasses, spell a codec: a number for the kind of its codes."""

from __future__ import annotations

import torch

from comm_quant._codec import BlockQuant, Codec, Float8Quant

E4M3, E5M2 = 43, 52


def kind_of(spec: Codec) -> int:
    """The bits of integer codes, or the digits of a float format: 43 for e4m3."""
    if isinstance(spec, BlockQuant):
        return spec.bits
    return E4M3 if spec.format == "e4m3" else E5M2


def spec_of(
    kind: int, block_numel: int, scale_dtype: torch.dtype, *, stochastic: bool = False
) -> Codec:
    """The inverse of `kind_of`."""
    if kind in (E4M3, E5M2):
        return Float8Quant(
            format="e4m3" if kind == E4M3 else "e5m2",
            block_numel=block_numel,
            scale_dtype=scale_dtype,
            rounding="stochastic" if stochastic else "nearest",
        )
    return BlockQuant(
        bits=kind,
        block_numel=block_numel,
        scale_dtype=scale_dtype,
        rounding="stochastic" if stochastic else "nearest",
    )
