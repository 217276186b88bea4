"""comm_quant's CUDA kernels, run on the CPU, give the bits of their definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from comm_quant import Codec
from comm_quant._cuda import KINDS, MAX_BLOCK_NUMEL, NUMBERS, Launch
from comm_quant._kernels.dequantize import plan_dequantize
from comm_quant._kernels.dequantize_ref import dequantize_ref
from comm_quant._kernels.dequantize_sum_requantize import plan_sum, plan_sum_requantize
from comm_quant._kernels.dequantize_sum_requantize_ref import dequantize_sum_ref
from comm_quant._kernels.kinds import spec_of
from comm_quant._kernels.quantize import plan_quantize
from comm_quant._kernels.quantize_ref import quantize_ref

Run: TypeAlias = Callable[[Launch], None]

BLOCKS = (1, 3, 8, 32, 33, 128, 256, 1500)
SIGN = 1
SEED = 2**33 + 7


def sizes(block_numel: int) -> Iterator[int]:
    """Around one block, and several."""
    yield from {1, block_numel - 1, block_numel, block_numel + 1, 4 * block_numel + 5} - {0}


def numbers(numel: int, dtype: torch.dtype) -> Tensor:
    """With ties, zeros, subnormals, and now and then what is not finite."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(
        -3, 3, (1,), generator=generator
    )
    x[::7] = torch.randint(-127, 128, (len(x[::7]),), generator=generator) / 2
    x[::5] = 0.0
    odd = (1e-45, 2.0**-126, math.nan, -math.inf, 3e38, 65504.0)
    if numel > 40:
        x[numel // 2] = odd[numel % len(odd)]
    return x.to(dtype)


def room_for(spec: Codec, numel: int, *, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scales full of a pattern that must not remain."""
    shape = () if rows is None else (rows,)
    codes = torch.full((*shape, spec.num_blocks(numel), spec.block_bytes), 0xA5, dtype=torch.uint8)
    return codes, torch.full(codes.shape[:-1], 7.0, dtype=spec.scale_dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit, but for the bits of a NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0.0, None, None), b.nan_to_num(0.0, None, None)
    )


def shifted(x: Tensor) -> Tensor:
    """The same numbers where no vector of four begins."""
    return torch.cat([x.new_zeros(1), x])[1:]


@pytest.mark.parametrize("dtype", NUMBERS, ids=NUMBERS.values())
@pytest.mark.parametrize("kind", KINDS, ids=KINDS.values())
def test_quantize(run: Run, kind: int, dtype: torch.dtype) -> None:
    options = itertools.product(BLOCKS, (torch.float32, torch.float16), (False, True))
    for block_numel, scale_dtype, stochastic in options:
        if stochastic and kind == SIGN:
            continue
        spec = spec_of(kind, block_numel, scale_dtype, stochastic=stochastic)
        for numel in sizes(block_numel):
            x = numbers(numel, dtype)
            for given in (x, shifted(x)):
                codes, scales = room_for(spec, numel)
                run(plan_quantize(given, codes, scales, kind, block_numel, stochastic, SEED))
                expected_codes, expected_scales = quantize_ref(x, spec, seed=SEED)
                assert torch.equal(codes, expected_codes), (spec, numel)
                assert same(scales, expected_scales), (spec, numel)


@pytest.mark.parametrize("dtype", NUMBERS, ids=NUMBERS.values())
@pytest.mark.parametrize("kind", KINDS, ids=KINDS.values())
def test_dequantize(run: Run, kind: int, dtype: torch.dtype) -> None:
    for block_numel, scale_dtype in itertools.product(BLOCKS, (torch.float32, torch.float16)):
        spec = spec_of(kind, block_numel, scale_dtype)
        for numel in sizes(block_numel):
            codes, scales = room_for(spec, numel)
            codes.copy_(torch.arange(codes.numel()).view_as(codes) * 37 % 256)  # every byte
            scales.copy_(torch.linspace(-2.0, 3.0, len(scales)))
            expected = dequantize_ref(codes, scales, spec, numel=numel).to(dtype)
            for out in (
                torch.full((numel,), 7.0, dtype=dtype),
                shifted(torch.zeros(numel, dtype=dtype)),
            ):
                run(plan_dequantize(codes, scales, out, kind, block_numel))
                assert same(out, expected), (spec, numel)


@pytest.mark.parametrize("kind", KINDS, ids=KINDS.values())
def test_dequantize_sum(run: Run, kind: int) -> None:
    own_of = (None, *NUMBERS)
    for number, (block_numel, rows) in enumerate(itertools.product(BLOCKS, (1, 2, 5))):
        spec = spec_of(kind, block_numel, (torch.float32, torch.float16)[number % 2])
        for numel in sizes(block_numel):
            codes, scales = filled(spec, numel, rows=rows)
            dtype = own_of[number % len(own_of)]
            own = None if dtype is None else numbers(numel, dtype)
            out = torch.full((numel,), 7.0)
            run(plan_sum(codes, scales, own, rows // 2, out, kind, block_numel))
            expected = dequantize_sum_ref(
                codes, scales, spec, numel=numel, own_N=own, own_index=rows // 2
            )
            assert same(out, expected), (spec, numel, rows, dtype)


@pytest.mark.parametrize("to_kind", KINDS, ids=KINDS.values())
@pytest.mark.parametrize("kind", KINDS, ids=KINDS.values())
def test_dequantize_sum_requantize(run: Run, kind: int, to_kind: int) -> None:
    own_of = (None, *NUMBERS)
    blocks = [(1, 1), (8, 3), (3, 8), (128, 128), (256, 128), (33, 256), (128, 1500)]
    for number, (block_numel, to_block_numel) in enumerate(blocks):
        spec = spec_of(kind, block_numel, torch.float32)
        to = spec_of(
            to_kind,
            to_block_numel,
            (torch.float32, torch.float16)[number % 2],
            stochastic=number % 3 == 1 and to_kind != SIGN,
        )
        rows, dtype = 1 + number % 4, own_of[number % len(own_of)]
        for numel in {1, block_numel, to_block_numel + 1, 2 * block_numel + to_block_numel + 3}:
            codes, scales = filled(spec, numel, rows=rows)
            own = None if dtype is None else numbers(numel, dtype)
            made = room_for(to, numel)
            stochastic = to.rounding == "stochastic"
            run(
                plan_sum_requantize(
                    *(codes, scales, own, rows - 1, numel, kind, block_numel),
                    *(*made, to_kind, to_block_numel, stochastic, SEED),
                )
            )
            total = dequantize_sum_ref(
                codes, scales, spec, numel=numel, own_N=own, own_index=rows - 1
            )
            expected = quantize_ref(total, to, seed=SEED)
            assert torch.equal(made[0], expected[0]), (spec, to, numel)
            assert same(made[1], expected[1]), (spec, to, numel)


def filled(spec: Codec, numel: int, *, rows: int) -> tuple[Tensor, Tensor]:
    """What several peers send; their messages lie apart."""
    codes, scales = room_for(spec, numel, rows=2 * rows)
    for row in range(rows):
        made = quantize_ref(numbers(numel, torch.float32) * (row + 1), spec, seed=row)
        codes[2 * row], scales[2 * row] = made
    return codes[::2], scales[::2]


def test_a_block_that_the_kernels_cannot_count_is_refused() -> None:
    x = torch.zeros(1)
    with pytest.raises(ValueError, match=rf"blocks of at most {MAX_BLOCK_NUMEL} elements, got"):
        plan_quantize(x, x.view(torch.uint8), x, 8, MAX_BLOCK_NUMEL + 1, False, 0)
