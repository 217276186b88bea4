"""`quantize` and `dequantize`: the kernels against their definition, and their error bounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from comm_quant import BlockQuant, Codec, Float8Quant, dequantize, quantize
from comm_quant._kernels.dequantize_ref import dequantize_ref
from comm_quant._kernels.quantize_ref import quantize_ref
from strategies import DEVICES, DTYPES, codecs, tensors

SEEDS = st.integers(0, 2**40)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit, but for the bits of a NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0.0, None, None), b.nan_to_num(0.0, None, None)
    )


@given(x=tensors(), spec=codecs(), seed=SEEDS, device=DEVICES)
def test_codes_and_scales_are_those_of_the_definition(
    x: Tensor, spec: Codec, seed: int, device: str
) -> None:
    codes, scales = (made.cpu() for made in quantize(x.to(device), spec, seed=seed))
    expected_codes, expected_scales = quantize_ref(x, spec, seed=seed)
    assert same(scales, expected_scales)
    assert torch.equal(codes, expected_codes)


@given(x=tensors(), spec=codecs(), dtype=DTYPES, device=DEVICES)
def test_values_are_those_of_the_definition(
    x: Tensor, spec: Codec, dtype: torch.dtype, device: str
) -> None:
    codes, scales = quantize(x, spec)
    expected = dequantize_ref(codes, scales, spec, numel=x.numel()).to(dtype)
    found = dequantize(codes.to(device), scales.to(device), spec, numel=x.numel(), dtype=dtype)
    assert same(found.cpu(), expected)


@given(
    spec=codecs(),
    code=st.integers(0, 255),
    scale=st.sampled_from([0.0, 1.0, -2.5, 1e-6, 3e4, float("inf"), float("nan")]),
)
def test_every_byte_and_scale_decodes_as_defined(spec: Codec, code: int, scale: float) -> None:
    codes = torch.full((1, spec.block_bytes), code, dtype=torch.uint8)
    scales = torch.tensor([scale], dtype=spec.scale_dtype)
    numel = spec.block_numel
    assert same(
        dequantize(codes, scales, spec, numel=numel),
        dequantize_ref(codes, scales, spec, numel=numel),
    )


def bound(x: Tensor, spec: Codec) -> Tensor:
    """The docstring's error bound for each element."""
    _, scales = quantize_ref(x, spec, seed=0)
    s = scales.float().repeat_interleave(spec.block_numel)[: x.numel()]
    slack, random = 1 + 2.0**-15, spec.rounding == "stochastic"
    if isinstance(spec, BlockQuant):
        inside = s * ((1 if random else 0.5) + 2.0**-15)
    else:
        mantissa, tiny = (2.0**-4, 2.0**-10) if spec.format == "e4m3" else (2.0**-3, 2.0**-17)
        inside = torch.maximum(x.float().abs() * mantissa, s * tiny) * slack * (2 if random else 1)
    lost = spec.max_code * (2.0**-25 if spec.scale_dtype == torch.float16 else 2.0**-126)
    return torch.where(s == 0, lost, inside)


@given(x=tensors(finite=True), spec=codecs(), seed=SEEDS)
def test_the_error_is_within_its_bound(x: Tensor, spec: Codec, seed: int) -> None:
    if isinstance(spec, BlockQuant) and spec.bits == 1:
        return  # signs promise none
    codes, scales = quantize(x, spec, seed=seed)
    y = dequantize(codes, scales, spec, numel=x.numel())
    normal = scales.float().isfinite()
    if spec.scale_dtype == torch.float16:
        normal &= (scales == 0) | (scales >= 2.0**-14)
    checked = normal.repeat_interleave(spec.block_numel)[: x.numel()]
    error = (x.double() - y.double()).abs()
    assert bool((error <= bound(x, spec).double())[checked].all())


@given(x=tensors(), spec=codecs())
def test_a_block_decodes_to_nan_exactly_where_it_was_not_finite(x: Tensor, spec: Codec) -> None:
    if spec.scale_dtype == torch.float16:
        x = x.clamp(-1.0, 1.0)  # larger scales are too large for float16
    if isinstance(spec, BlockQuant) and spec.bits == 1:
        x = torch.where(x.isfinite(), x.clamp(-1.0, 1.0), x)  # or the sum might overflow
    codes, scales = quantize(x, spec)
    y = dequantize(codes, scales, spec, numel=x.numel())
    for start in range(0, x.numel(), spec.block_numel):
        block = slice(start, start + spec.block_numel)
        if x[block].isfinite().all():
            assert bool(y[block].isfinite().all())
        else:
            assert bool(y[block].isnan().all())


@given(x=tensors(finite=True), spec=codecs(), seed=SEEDS)
def test_zeros_stay_zeros(x: Tensor, spec: Codec, seed: int) -> None:
    if isinstance(spec, BlockQuant) and spec.bits == 1:
        return
    codes, scales = quantize(x, spec, seed=seed)
    y = dequantize(codes, scales, spec, numel=x.numel())
    kept = scales.isfinite().repeat_interleave(spec.block_numel)[: x.numel()]
    assert bool((y[(x == 0) & kept] == 0).all())


def test_too_large_a_scale_for_float16_is_nan_and_not_a_wrong_number() -> None:
    spec = BlockQuant(bits=8, block_numel=2, scale_dtype=torch.float16)
    codes, scales = quantize(torch.tensor([1e8, 1.0, 2.0, 3.0]), spec)
    assert dequantize(codes, scales, spec, numel=4)[:2].isnan().all()
    assert dequantize(codes, scales, spec, numel=4)[2:].isfinite().all()


@pytest.mark.parametrize(
    "spec",
    [
        *(BlockQuant(bits=bits, block_numel=64, rounding="stochastic") for bits in (8, 4, 2)),
        *(Float8Quant(format=f, block_numel=64, rounding="stochastic") for f in ("e4m3", "e5m2")),
    ],
)
def test_stochastic_rounding_is_right_on_average(spec: Codec) -> None:
    x = torch.rand(64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    total = torch.zeros(64, dtype=torch.float64)
    for seed in range(2000):
        total += dequantize(*quantize(x, spec, seed=seed), spec, numel=64)
    error = (total / 2000 - x).abs()
    one_step = bound(x, spec)  # a draw is off by less, so the mean by 5 / sqrt(4 * 2000) of it
    assert bool((error < one_step * 0.056 + 1e-4).all())


def test_the_seed_decides_the_draws() -> None:
    spec = BlockQuant(bits=4, block_numel=64, rounding="stochastic")
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(quantize(x, spec, seed=3)[0], quantize(x, spec, seed=3)[0])
    assert not torch.equal(quantize(x, spec, seed=3)[0], quantize(x, spec, seed=4)[0])


@given(spec=codecs())
def test_many_elements_on_several_threads_give_the_same_bits(spec: Codec) -> None:
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(2))
    one = quantize(x, spec, seed=5)
    torch.set_num_threads(2)
    two = quantize(x, spec, seed=5)
    y = dequantize(*two, spec, numel=x.numel())
    torch.set_num_threads(1)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])
    assert torch.equal(y, dequantize(*one, spec, numel=x.numel()))


def test_a_message_is_filled_in_place() -> None:
    spec = BlockQuant(bits=8, block_numel=4)
    message = torch.zeros(32, dtype=torch.uint8)
    out = (message[:8].view(2, 4), message[16:24].view(torch.float32))
    quantize(torch.arange(8.0), spec, out=out)
    assert torch.equal(out[0], quantize(torch.arange(8.0), spec)[0])
    assert bool(message[:24].any())
    assert not bool(message[24:].any())


def test_any_shape_and_strides_are_read_in_row_major_order() -> None:
    spec = BlockQuant(bits=8, block_numel=3)
    x = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(quantize(x, spec)[0], quantize(x.reshape(-1), spec)[0])


class TestRefusals:
    """What does not fit is refused, by name."""

    spec = BlockQuant(bits=8, block_numel=4)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
    def test_numbers_of_other_types(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match="quantize: x must be float32, bfloat16 or float16"):
            quantize(torch.zeros(4).to(dtype), self.spec)

    def test_what_is_no_codec(self) -> None:
        with pytest.raises(TypeError, match="expected BlockQuant or Float8Quant, got dict"):
            quantize(torch.zeros(4), {"bits": 8})  # type: ignore[arg-type]

    def test_out_of_another_shape_type_or_layout(self) -> None:
        codes, scales = quantize(torch.zeros(8), self.spec)
        x = torch.zeros(8)
        with pytest.raises(ValueError, match=r"expected codes of shape \(2, 4\).*got \(1, 4\)"):
            quantize(x, self.spec, out=(codes[:1], scales))
        with pytest.raises(TypeError, match=r"codes must be torch.uint8, got torch.int8"):
            quantize(x, self.spec, out=(codes.view(torch.int8), scales))
        with pytest.raises(TypeError, match=r"scales must be torch.float32, got torch.float16"):
            quantize(x, self.spec, out=(codes, scales.half()))
        with pytest.raises(ValueError, match="must be contiguous"):
            quantize(x, self.spec, out=(torch.zeros(4, 2, dtype=torch.uint8).t(), scales))

    def test_codes_of_another_length(self) -> None:
        codes, scales = quantize(torch.zeros(8), self.spec)
        with pytest.raises(ValueError, match=r"expected codes of shape \(3, 4\)"):
            dequantize(codes, scales, self.spec, numel=9)
        with pytest.raises(ValueError, match="numel must not be negative, got -1"):
            dequantize(codes, scales, self.spec, numel=-1)

    def test_results_of_another_type_or_shape(self) -> None:
        codes, scales = quantize(torch.zeros(8), self.spec)
        with pytest.raises(TypeError, match=r"the result must be .*got torch.float64"):
            dequantize(codes, scales, self.spec, numel=8, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"of shape \(8,\) on cpu, got \(2, 4\)"):
            dequantize(codes, scales, self.spec, numel=8, out=torch.zeros(2, 4))
