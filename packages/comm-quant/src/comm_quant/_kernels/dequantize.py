"""`torch.ops.comm_quant.dequantize`: into a buffer that is there."""

from __future__ import annotations

from ctypes import c_int32, c_int64

import torch
from torch import Tensor

from comm_quant._cuda import Launch, check_block, dequantize_build, num_thread_blocks, pointer, run
from comm_quant._kernels.dequantize_ref import dequantize_ref
from comm_quant._kernels.kinds import spec_of
from comm_quant._native import TYPES, call, is_native

LIBRARY = torch.library.Library("comm_quant", "FRAGMENT")
LIBRARY.define(
    "dequantize(Tensor codes, Tensor scales, Tensor(a!) out, int kind, int block_numel) -> ()"
)


@torch.library.impl(LIBRARY, "dequantize", "CompositeExplicitAutograd")
def dequantize_into(
    codes: Tensor, scales: Tensor, out: Tensor, kind: int, block_numel: int
) -> None:
    """Fill 1-D `out`; all tensors are contiguous."""
    if not is_native(out):
        spec = spec_of(kind, block_numel, scales.dtype)
        out.copy_(dequantize_ref(codes, scales, spec, numel=out.numel()))
        return
    call(
        "comm_quant_dequantize",
        codes.data_ptr(),
        scales.data_ptr(),
        kind,
        block_numel,
        scales.dtype == torch.float16,
        out.numel(),
        TYPES[out.dtype],
        out.data_ptr(),
    )


def plan_dequantize(
    codes: Tensor, scales: Tensor, out: Tensor, kind: int, block_numel: int
) -> Launch:
    """What `dequantize_into` launches on CUDA."""
    return Launch(
        build=dequantize_build(kind, out.dtype),
        num_thread_blocks=num_thread_blocks(len(scales)),
        arguments=(
            pointer(codes),
            pointer(scales),
            c_int64(out.numel()),
            c_int64(check_block(block_numel)),
            c_int32(scales.dtype == torch.float16),
            pointer(out),
        ),
    )


@torch.library.impl(LIBRARY, "dequantize", "CUDA")
def _dequantize_cuda(
    codes: Tensor, scales: Tensor, out: Tensor, kind: int, block_numel: int
) -> None:
    run(plan_dequantize(codes, scales, out, kind, block_numel), out.device)


def _nothing(*_: object) -> None:
    """What the operator does to tensors without data."""


torch.library.register_fake("comm_quant::dequantize", _nothing, lib=LIBRARY)

dequantize_op = torch.ops.comm_quant.dequantize
