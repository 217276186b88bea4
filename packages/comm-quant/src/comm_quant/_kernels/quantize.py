"""`torch.ops.comm_quant.quantize`: into buffers that are there."""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_uint32

import torch
from torch import Tensor

from comm_quant._cuda import Launch, check_block, num_thread_blocks, pointer, quantize_build, run
from comm_quant._kernels.kinds import spec_of
from comm_quant._kernels.quantize_ref import quantize_ref
from comm_quant._native import TYPES, call, is_native

LIBRARY = torch.library.Library("comm_quant", "FRAGMENT")
LIBRARY.define(
    "quantize(Tensor x, Tensor(a!) codes, Tensor(b!) scales, int kind, int block_numel, "
    "bool stochastic, int seed) -> ()"
)


@torch.library.impl(LIBRARY, "quantize", "CompositeExplicitAutograd")
def quantize_into(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    kind: int,
    block_numel: int,
    stochastic: bool,
    seed: int,
) -> None:
    """Quantize 1-D `x`; all tensors are contiguous."""
    if not is_native(x):
        spec = spec_of(kind, block_numel, scales.dtype, stochastic=stochastic)
        found_codes, found_scales = quantize_ref(x, spec, seed=seed)
        codes.copy_(found_codes)
        scales.copy_(found_scales)
        return
    call(
        "comm_quant_quantize",
        x.data_ptr(),
        TYPES[x.dtype],
        x.numel(),
        kind,
        block_numel,
        scales.dtype == torch.float16,
        stochastic,
        seed & 0xFFFFFFFF,
        codes.data_ptr(),
        scales.data_ptr(),
    )


def plan_quantize(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    kind: int,
    block_numel: int,
    stochastic: bool,
    seed: int,
) -> Launch:
    """What `quantize_into` launches on CUDA."""
    return Launch(
        build=quantize_build(kind, x.dtype),
        num_thread_blocks=num_thread_blocks(len(scales)),
        arguments=(
            pointer(x),
            c_int64(x.numel()),
            c_int64(check_block(block_numel)),
            c_int32(scales.dtype == torch.float16),
            c_int32(stochastic),
            c_uint32(seed & 0xFFFFFFFF),
            pointer(codes),
            pointer(scales),
        ),
    )


@torch.library.impl(LIBRARY, "quantize", "CUDA")
def _quantize_cuda(x: Tensor, *others: Tensor | int) -> None:
    run(plan_quantize(x, *others), x.device)  # type: ignore[arg-type]  # the schema checks them


def _nothing(*_: object) -> None:
    """What the operator does to tensors without data."""


torch.library.register_fake("comm_quant::quantize", _nothing, lib=LIBRARY)

quantize_op = torch.ops.comm_quant.quantize
