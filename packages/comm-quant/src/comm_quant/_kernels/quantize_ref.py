"""The definition of `quantize`, in plain torch; the C++ and CUDA kernels give the same bits.

Legend: B blocks, K elements a block, W bytes of a block's codes.

x is read in float32, block by block; the last block is padded with zeros. Then

    s    = max|x| / max_code            integers and fp8
    s    = mean|x|                      signs: over the block's real elements, summed as below
    s    = 0 where s < 2**-126, then rounded to the type of the scales; NaN where not finite
    inv  = 1 / s, or 0 where s is 0 or NaN
    code = round(x * inv), within +-max_code; the sign code is x >= 0

all in float32. The mean adds |x| in 32 lanes, lane i the elements i, i + 32, ... in order, then
lane i + 16 to lane i, i + 8 to i, and so on; one division by the number of elements follows.

A block's codes lie in W = ceil(K / n) bytes of n codes each: element i * W + j is field i of byte
j, in two's complement, lowest bits first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from comm_quant._codec import BlockQuant, Codec, Float8Quant

NUM_LANES = 32
SMALLEST_NORMAL = 2.0**-126


def quantize_ref(x_N: Tensor, spec: Codec, *, seed: int) -> tuple[Tensor, Tensor]:
    """Codes, uint8 (B, W), and scales, (B,)."""
    num_blocks = spec.num_blocks(x_N.numel())
    missing = num_blocks * spec.block_numel - x_N.numel()
    x_BK = F.pad(x_N.float(), (0, missing)).view(num_blocks, spec.block_numel)
    scales_B = _scales(x_BK, spec, missing=missing)
    s_B = scales_B.float()
    usable = torch.isfinite(s_B) & (s_B > 0)
    inv_B = torch.where(usable, 1.0 / s_B, 0.0)
    x_BK = torch.where(torch.isfinite(s_B)[:, None], x_BK, 0.0)
    return _pack(_codes(x_BK, inv_B[:, None], spec, seed=seed), spec), scales_B


def _scales(x_BK: Tensor, spec: Codec, *, missing: int) -> Tensor:
    if not len(x_BK):
        s_B = x_BK.new_zeros(0)
    elif isinstance(spec, BlockQuant) and spec.bits == 1:
        counts_B = torch.full((len(x_BK),), float(spec.block_numel))
        counts_B[-1:] -= missing
        s_B = _lane_sums(x_BK.abs()) / counts_B.to(x_BK.device)
    else:
        s_B = x_BK.abs().amax(1) / spec.max_code
    s_B = torch.where(s_B < SMALLEST_NORMAL, 0.0, s_B).to(spec.scale_dtype)
    return torch.where(torch.isfinite(s_B), s_B, torch.nan)


def _lane_sums(x_BK: Tensor) -> Tensor:
    rest = -x_BK.shape[1] % NUM_LANES
    x_BML = F.pad(x_BK, (0, rest)).view(len(x_BK), -1, NUM_LANES)
    sums_BL = x_BML[:, 0].clone()
    for step in range(1, x_BML.shape[1]):
        sums_BL += x_BML[:, step]
    width = NUM_LANES
    while width > 1:
        width //= 2
        sums_BL = sums_BL[:, :width] + sums_BL[:, width:]
    return sums_BL[:, 0]


def _codes(x_BK: Tensor, inv_B1: Tensor, spec: Codec, *, seed: int) -> Tensor:
    """One code an element, as its bits in an uint8."""
    scaled_BK = x_BK * inv_B1
    drawn_BK = draw(scaled_BK.shape, seed, x_BK.device) if spec.rounding == "stochastic" else None
    if not isinstance(spec, BlockQuant):
        limited_BK = scaled_BK.clamp(-spec.max_code, spec.max_code)
        if drawn_BK is not None:
            limited_BK = _round_to_float8(limited_BK, drawn_BK, spec)
        float8_BK: Tensor = limited_BK.to(spec.code_dtype)
        return float8_BK.view(torch.uint8)
    if spec.bits == 1:
        return (x_BK >= 0).to(torch.uint8)
    if drawn_BK is None:
        rounded_BK = scaled_BK.round()
    else:
        rounded_BK = (scaled_BK + (drawn_BK >> 16) * 2.0**-16).floor()
    limited_BK = rounded_BK.clamp(-spec.max_code, spec.max_code)
    bits_BK: Tensor = limited_BK.to(torch.int8).view(torch.uint8) & (2**spec.bits - 1)
    return bits_BK


def draw(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """32 bits for each element, from its place and the seed, as int64."""
    mask = 0xFFFFFFFF
    place = torch.arange(shape.numel(), device=device)
    h = (place * 0x9E3779B1 + (seed & mask) * 0x85EBCA77) & mask
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & mask
    return (h ^ (h >> 16)).view(shape)


def _round_to_float8(y: Tensor, drawn: Tensor, spec: Float8Quant) -> Tensor:
    """Round to a neighbour that fp8 can hold, up with the probability of the part cut off."""
    mantissa, smallest = (3, 2.0**-6) if spec.format == "e4m3" else (2, 2.0**-14)
    cut = 23 - mantissa
    bits = y.abs().view(torch.int32).long() + (drawn & (2**cut - 1))
    normal = (bits >> cut << cut).to(torch.int32).view(torch.float32)
    quantum = smallest * 2.0**-mantissa
    tiny = (y.abs() / quantum + (drawn >> 16) * 2.0**-16).floor() * quantum
    rounded = torch.where(y.abs() < smallest, tiny, normal).clamp(max=spec.max_code)
    return torch.copysign(rounded, y)


def _pack(codes_BK: Tensor, spec: Codec) -> Tensor:
    per, width = spec.codes_a_byte, spec.block_bytes
    if per == 1:
        return codes_BK.contiguous()
    rest = per * width - spec.block_numel
    fields_BPW = F.pad(codes_BK, (0, rest)).view(len(codes_BK), per, width)
    packed_BW = fields_BPW[:, 0].clone()
    for field in range(1, per):
        packed_BW |= fields_BPW[:, field] << (field * 8 // per)
    return packed_BW
