"""Codecs as values: what exists, and the sizes that follow."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_quant import BlockQuant, Codec, Float8Quant, quantize
from strategies import codecs


@given(spec=codecs(), numel=st.integers(0, 5000))
def test_the_planned_bytes_are_those_of_the_tensors(spec: Codec, numel: int) -> None:
    codes, scales = quantize(torch.zeros(numel), spec)
    assert codes.numel() == spec.code_bytes(numel)
    assert scales.numel() * scales.element_size() == spec.scale_bytes(numel)


@pytest.mark.parametrize("bits", [0, 3, 16, -8, True, "8"])
def test_bits_that_do_not_exist_are_refused(bits: object) -> None:
    with pytest.raises(ValueError, match=r"BlockQuant: bits must be 8, 4, 2 or 1, got"):
        BlockQuant(bits=bits)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [BlockQuant, Float8Quant])
@pytest.mark.parametrize("block_numel", [0, -1, 2.0, True])
def test_a_block_without_elements_is_refused(make: type[Codec], block_numel: object) -> None:
    with pytest.raises(ValueError, match="block_numel must be a whole number from 1 on, got"):
        make(block_numel=block_numel)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [BlockQuant, Float8Quant])
def test_other_scale_types_are_refused(make: type[Codec]) -> None:
    with pytest.raises(ValueError, match=r"float32 or torch.float16, got torch.bfloat16"):
        make(scale_dtype=torch.bfloat16)


@pytest.mark.parametrize("make", [BlockQuant, Float8Quant])
def test_other_roundings_are_refused(make: type[Codec]) -> None:
    with pytest.raises(ValueError, match="rounding must be 'nearest' or 'stochastic', got 'up'"):
        make(rounding="up")  # type: ignore[arg-type]


def test_signs_are_not_rounded_at_random() -> None:
    with pytest.raises(ValueError, match="bits=1 sends signs"):
        BlockQuant(bits=1, rounding="stochastic")


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="format must be 'e4m3' or 'e5m2', got 'e3m4'"):
        Float8Quant(format="e3m4")  # type: ignore[arg-type]
