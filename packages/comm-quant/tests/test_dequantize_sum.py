"""The step between two hops: dequantize several messages, add them up, quantize the sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from comm_quant import (
    BlockQuant,
    Codec,
    dequantize_sum,
    dequantize_sum_requantize,
    quantize,
)
from comm_quant._kernels.dequantize_sum_requantize_ref import dequantize_sum_ref
from comm_quant._kernels.quantize_ref import quantize_ref
from strategies import DEVICES, DTYPES, SIZES, codecs

ROWS = st.integers(1, 11)


def rows(num_rows: int, numel: int, spec: Codec, *, gap: int) -> tuple[Tensor, Tensor]:
    """Messages of several peers, `gap` bytes between them."""
    generator = torch.Generator().manual_seed(num_rows * 10_000 + numel)
    row_bytes = spec.code_bytes(numel) + gap
    codes = torch.zeros(num_rows, row_bytes, dtype=torch.uint8)
    scales = torch.zeros(num_rows, spec.num_blocks(numel) + gap, dtype=spec.scale_dtype)
    num_blocks, width = spec.num_blocks(numel), spec.block_bytes
    for row in range(num_rows):
        x = torch.randn(numel, generator=generator)
        made = quantize(x, spec)
        codes[row, : row_bytes - gap] = made[0].view(-1)
        scales[row, :num_blocks] = made[1]
    spread = codes.as_strided((num_rows, num_blocks, width), (row_bytes, width, 1))
    return spread, scales[:, :num_blocks]


@given(
    num_rows=ROWS,
    numel=st.sampled_from(SIZES),
    spec=codecs(),
    to=codecs(),
    gap=st.sampled_from([0, 16]),
    own_dtype=st.none() | DTYPES,
    place=st.integers(0, 10),
    device=DEVICES,
)
def test_sums_and_their_codes_are_those_of_the_definition(  # noqa: PLR0917  drawn, not passed
    num_rows: int,
    numel: int,
    spec: Codec,
    to: Codec,
    gap: int,
    own_dtype: torch.dtype | None,
    place: int,
    device: str,
) -> None:
    codes, scales = rows(num_rows, numel, spec, gap=gap)
    own = None if own_dtype is None else torch.linspace(-1, 1, numel).to(own_dtype)
    own_index = place % num_rows
    expected = dequantize_sum_ref(codes, scales, spec, numel=numel, own_N=own, own_index=own_index)
    there = (codes.to(device), scales.to(device))
    own_there = None if own is None else own.to(device)
    total = dequantize_sum(*there, spec, numel=numel, own=own_there, own_index=own_index)
    assert torch.equal(total.cpu(), expected)
    found = dequantize_sum_requantize(
        *there, spec, numel=numel, to=to, own=own_there, own_index=own_index, seed=9
    )
    wanted = quantize_ref(expected, to, seed=9)
    assert torch.equal(found[0].cpu(), wanted[0])
    assert torch.equal(found[1].cpu(), wanted[1])


def test_a_broken_row_breaks_the_sum() -> None:
    spec = BlockQuant(bits=4, block_numel=4)
    first = quantize(torch.ones(8), spec)
    second = quantize(torch.tensor([1.0, 1, 1, 1, 1, 1, 1, float("inf")]), spec)
    codes, scales = torch.stack([first[0], second[0]]), torch.stack([first[1], second[1]])
    total = dequantize_sum(codes, scales, spec, numel=8)
    assert total[:4].tolist() == [2.0] * 4
    assert total[4:].isnan().all()
    again = dequantize_sum_requantize(codes, scales, spec, numel=8, to=spec)
    assert again[1].isnan().tolist() == [False, True]


class TestRefusals:
    """What does not fit is refused, by name."""

    spec = BlockQuant(bits=8, block_numel=4)

    def test_no_rows(self) -> None:
        empty = torch.zeros(0, 2, 4, dtype=torch.uint8), torch.zeros(0, 2)
        with pytest.raises(ValueError, match="with one row at least, got"):
            dequantize_sum(*empty, self.spec, numel=8)

    def test_rows_of_another_length(self) -> None:
        codes, scales = rows(2, 8, self.spec, gap=0)
        with pytest.raises(ValueError, match=r"expected codes of shape \(2, 3, 4\)"):
            dequantize_sum(codes, scales, self.spec, numel=9)
        with pytest.raises(ValueError, match=r"expected scales of shape \(2, 2\)"):
            dequantize_sum(codes, scales[:, :1], self.spec, numel=8)

    def test_rows_that_are_not_dense(self) -> None:
        codes, scales = rows(2, 8, self.spec, gap=0)
        with pytest.raises(ValueError, match="each row of codes and of scales must be contiguous"):
            dequantize_sum(
                codes.transpose(1, 2).contiguous().transpose(1, 2), scales, self.spec, numel=8
            )

    def test_own_values_that_do_not_fit(self) -> None:
        codes, scales = rows(2, 8, self.spec, gap=0)
        with pytest.raises(ValueError, match="expected own to have 8 elements on cpu, got 7"):
            dequantize_sum(codes, scales, self.spec, numel=8, own=torch.zeros(7))
        with pytest.raises(TypeError, match="own must be float32, bfloat16 or float16"):
            dequantize_sum(codes, scales, self.spec, numel=8, own=torch.zeros(8).double())
        with pytest.raises(ValueError, match="own_index must be one of 2 rows, got 2"):
            dequantize_sum(codes, scales, self.spec, numel=8, own=torch.zeros(8), own_index=2)
