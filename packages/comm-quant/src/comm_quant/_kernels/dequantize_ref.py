"""The definition of `dequantize`: float32(code) * float32(scale), rounded to the type wanted.

Legend: B blocks, K elements a block, W bytes of a block's codes. Codes of 8, 4 and 2 bits are two's
complement, the sign code stands for +-1, fp8 codes for their values; the packing is `quantize`'s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comm_quant._codec import BlockQuant, Codec


def dequantize_ref(codes_BW: Tensor, scales_B: Tensor, spec: Codec, *, numel: int) -> Tensor:
    """Values, float32 (numel,)."""
    values_BK = _values(codes_BW, spec) * scales_B.float()[:, None]
    return values_BK.reshape(-1)[:numel]


def _values(codes_BW: Tensor, spec: Codec) -> Tensor:
    if not isinstance(spec, BlockQuant):
        return codes_BW.view(spec.code_dtype).float()
    if spec.bits == 8:
        return codes_BW.view(torch.int8).float()
    per, bits = spec.codes_a_byte, spec.bits
    fields = [codes_BW >> (field * bits) & (2**bits - 1) for field in range(per)]
    codes_BK = torch.cat(fields, dim=1)[:, : spec.block_numel].to(torch.int16)
    if bits == 1:
        return (codes_BK * 2 - 1).float()
    half = 2 ** (bits - 1)
    signed_BK: Tensor = (codes_BK ^ half) - half  # two's complement
    return signed_BK.float()
