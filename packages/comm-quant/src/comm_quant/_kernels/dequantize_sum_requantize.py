"""`torch.ops.comm_quant.dequantize_sum` and `.dequantize_sum_requantize`: a hop's arithmetic."""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_uint32

import torch
from torch import Tensor

from comm_quant._cuda import (
    NUM_THREADS,
    Argument,
    Launch,
    check_block,
    num_thread_blocks,
    pointer,
    run,
    sum_build,
)
from comm_quant._kernels.dequantize_sum_requantize_ref import dequantize_sum_ref
from comm_quant._kernels.kinds import spec_of
from comm_quant._kernels.quantize import quantize_into
from comm_quant._native import TYPES, call, is_native

LIBRARY = torch.library.Library("comm_quant", "FRAGMENT")
LIBRARY.define(
    "dequantize_sum(Tensor codes, Tensor scales, Tensor? own, int own_index, Tensor(a!) out, "
    "int kind, int block_numel) -> ()"
)
LIBRARY.define(
    "dequantize_sum_requantize(Tensor codes, Tensor scales, Tensor? own, int own_index, int numel, "
    "int kind, int block_numel, Tensor(a!) to_codes, Tensor(b!) to_scales, int to_kind, "
    "int to_block_numel, bool to_stochastic, int seed) -> ()"
)


@torch.library.impl(LIBRARY, "dequantize_sum", "CompositeExplicitAutograd")
def dequantize_sum_into(
    codes: Tensor,
    scales: Tensor,
    own: Tensor | None,
    own_index: int,
    out: Tensor,
    kind: int,
    block_numel: int,
) -> None:
    """Sum rows (P, B, W) and (P, B), whose strides within a row are dense, into float32 `out`."""
    if not is_native(codes):
        spec = spec_of(kind, block_numel, scales.dtype)
        out.copy_(
            dequantize_sum_ref(
                codes, scales, spec, numel=out.numel(), own_N=own, own_index=own_index
            )
        )
        return
    call(
        "comm_quant_dequantize_sum_requantize",
        *_rows(codes, scales, own, own_index, out.numel(), kind, block_numel),
        out.data_ptr(),
        *(0, 1, False, False, 0, None, None),
    )


@torch.library.impl(LIBRARY, "dequantize_sum_requantize", "CompositeExplicitAutograd")
def dequantize_sum_requantize_into(
    codes: Tensor,
    scales: Tensor,
    own: Tensor | None,
    own_index: int,
    numel: int,
    kind: int,
    block_numel: int,
    to_codes: Tensor,
    to_scales: Tensor,
    to_kind: int,
    to_block_numel: int,
    to_stochastic: bool,
    seed: int,
) -> None:
    """The sum of `dequantize_sum`, as codes."""
    if not is_native(codes):
        spec = spec_of(kind, block_numel, scales.dtype)
        total = dequantize_sum_ref(codes, scales, spec, numel=numel, own_N=own, own_index=own_index)
        quantize_into(total, to_codes, to_scales, to_kind, to_block_numel, to_stochastic, seed)
        return
    call(
        "comm_quant_dequantize_sum_requantize",
        *_rows(codes, scales, own, own_index, numel, kind, block_numel),
        None,
        to_kind,
        to_block_numel,
        to_scales.dtype == torch.float16,
        to_stochastic,
        seed & 0xFFFFFFFF,
        to_codes.data_ptr(),
        to_scales.data_ptr(),
    )


def _rows(
    codes: Tensor,
    scales: Tensor,
    own: Tensor | None,
    own_index: int,
    numel: int,
    kind: int,
    block_numel: int,
) -> tuple[object, ...]:
    return (
        codes.data_ptr(),
        codes.stride(0),
        scales.data_ptr(),
        scales.stride(0) * scales.element_size(),
        len(codes),
        kind,
        block_numel,
        scales.dtype == torch.float16,
        numel,
        None if own is None else own.data_ptr(),
        0 if own is None else TYPES[own.dtype],
        own_index,
    )


def plan_sum(
    codes: Tensor,
    scales: Tensor,
    own: Tensor | None,
    own_index: int,
    out: Tensor,
    kind: int,
    block_numel: int,
) -> Launch:
    """What `dequantize_sum_into` launches on CUDA."""
    return Launch(
        build=sum_build(kind),
        num_thread_blocks=-(-out.numel() // NUM_THREADS),  # a thread an element
        arguments=(
            *_cuda_rows(codes, scales, own, own_index, out.numel(), block_numel),
            pointer(out),
        ),
    )


def plan_sum_requantize(
    codes: Tensor,
    scales: Tensor,
    own: Tensor | None,
    own_index: int,
    numel: int,
    kind: int,
    block_numel: int,
    to_codes: Tensor,
    to_scales: Tensor,
    to_kind: int,
    to_block_numel: int,
    to_stochastic: bool,
    seed: int,
) -> Launch:
    """What `dequantize_sum_requantize_into` launches on CUDA."""
    return Launch(
        build=sum_build(kind, to_kind),
        num_thread_blocks=num_thread_blocks(len(to_scales)),
        arguments=(
            *_cuda_rows(codes, scales, own, own_index, numel, block_numel),
            c_uint32(check_block(to_block_numel)),
            c_int32(to_scales.dtype == torch.float16),
            c_int32(to_stochastic),
            c_uint32(seed & 0xFFFFFFFF),
            pointer(to_codes),
            pointer(to_scales),
        ),
    )


def _cuda_rows(
    codes: Tensor,
    scales: Tensor,
    own: Tensor | None,
    own_index: int,
    numel: int,
    block_numel: int,
) -> tuple[Argument, ...]:
    return (
        pointer(codes),
        c_int64(codes.stride(0)),
        pointer(scales),
        c_int64(scales.stride(0) * scales.element_size()),
        c_int32(len(codes)),
        c_uint32(check_block(block_numel)),
        c_int32(scales.dtype == torch.float16),
        c_int64(numel),
        pointer(own),
        c_int32(0 if own is None else TYPES[own.dtype]),
        c_int32(own_index),
    )


@torch.library.impl(LIBRARY, "dequantize_sum", "CUDA")
def _sum_cuda(codes: Tensor, *others: Tensor | int | None) -> None:
    run(plan_sum(codes, *others), codes.device)  # type: ignore[arg-type]  # the schema checks them


@torch.library.impl(LIBRARY, "dequantize_sum_requantize", "CUDA")
def _sum_requantize_cuda(codes: Tensor, *others: Tensor | int | None) -> None:
    run(plan_sum_requantize(codes, *others), codes.device)  # type: ignore[arg-type]  # as above


def _nothing(*_: object) -> None:
    """What the operator does to tensors without data."""


torch.library.register_fake("comm_quant::dequantize_sum", _nothing, lib=LIBRARY)
torch.library.register_fake("comm_quant::dequantize_sum_requantize", _nothing, lib=LIBRARY)

dequantize_sum_op = torch.ops.comm_quant.dequantize_sum
dequantize_sum_requantize_op = torch.ops.comm_quant.dequantize_sum_requantize
