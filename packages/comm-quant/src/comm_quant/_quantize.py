"""`quantize`, its inverse, and the two of them with a sum between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comm_quant._codec import Codec
from comm_quant._kernels.dequantize import dequantize_op
from comm_quant._kernels.dequantize_sum_requantize import (
    dequantize_sum_op,
    dequantize_sum_requantize_op,
)
from comm_quant._kernels.kinds import kind_of
from comm_quant._kernels.quantize import quantize_op

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def quantize(
    x: Tensor, spec: Codec, *, seed: int = 0, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize `x` block by block.

    Each run of ``block_numel`` consecutive elements gets a scale: ``max(|x|) / max_code``, or the
    mean of ``|x|`` where only signs are kept. A code is ``x / scale``, rounded. A block with an
    infinite or NaN element gets the scale NaN, and every element of it decodes to NaN; so does one
    whose scale is too large for float16 scales. A scale below 2**-126 becomes 0.

    Args:
        x: Any shape, read in row-major order; float32, bfloat16 or float16.
        spec: `BlockQuant` or `Float8Quant`.
        seed: Where rounding is stochastic: the same seed draws the same numbers, place by place.
        out: Codes and scales to fill, as they would be returned; any memory that is contiguous.

    Returns:
        codes_BW: uint8, shape ``(num_blocks, block_bytes)``; where codes are narrower than a byte,
            element ``i * block_bytes + j`` of a block is field i of byte j.
        scales_B: ``spec.scale_dtype``, one a block.

    Raises:
        TypeError: `x` is of another dtype.
        ValueError: `out` does not fit.

    Error bound:
        ``|x - dequantize(quantize(x))|`` is at most, with s the block's scale (as stored),
        integers: ``s * (1/2 + 2**-15)`` (stochastic: ``s * (1 + 2**-15)``), where float16 scales
        are normal; e4m3: ``max(|x| * 2**-4, s * 2**-10) * (1 + 2**-15)``, e5m2: ``max(|x| * 2**-3,
        s * 2**-17) * (1 + 2**-15)`` (stochastic: twice that); a block whose scale became 0 loses
        its values, which are below ``max_code * 2**-126`` (float16 scales: ``max_code * 2**-25``).
        Signs: no bound; ``sum(x - y)`` of a block of equal magnitudes is 0. Zeros stay zeros,
        except as signs.

    Source:
        Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022 (a linear code
        book here); Seide et al., "1-bit stochastic gradient descent", Interspeech 2014 (signs);
        Micikevicius et al., "FP8 formats for deep learning", 2022.

    Example:
        >>> import torch
        >>> from comm_quant import BlockQuant, dequantize, quantize
        >>> spec = BlockQuant(bits=8, block_numel=2)
        >>> codes, scales = quantize(torch.tensor([0.0, 127.0, -254.0]), spec)
        >>> scales.tolist()
        [1.0, 2.0]
        >>> dequantize(codes, scales, spec, numel=3).tolist()
        [0.0, 127.0, -254.0]
    """
    _check_float("quantize: x", x)
    _check_codec(spec)
    x = x.detach().reshape(-1)
    codes, scales = _codes_for(x.numel(), spec, x.device) if out is None else out
    if out is not None:
        _check_codes("quantize: out", codes, scales, spec, numel=x.numel(), device=x.device)
    if x.numel():
        quantize_op(
            x, codes, scales, kind_of(spec), spec.block_numel, spec.rounding == "stochastic", seed
        )
    return codes, scales


def dequantize(
    codes: Tensor,
    scales: Tensor,
    spec: Codec,
    *,
    numel: int,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Turn codes back into numbers: ``code * scale`` in float32, rounded to the type wanted.

    Args:
        codes: uint8, shape ``(num_blocks, block_bytes)``, as `quantize` made them.
        scales: ``spec.scale_dtype``, one a block.
        spec: What they were quantized with.
        numel: How many elements there were.
        dtype: float32, bfloat16 or float16; not looked at where `out` is given.
        out: 1-D and contiguous, of `numel` elements of one of these types.

    Returns:
        1-D, `numel` elements.

    Raises:
        TypeError: Codes, scales or result are of another dtype.
        ValueError: The shapes do not match `spec` and `numel`.
    """
    _check_codec(spec)
    _check_numel("dequantize", numel)
    _check_codes("dequantize", codes, scales, spec, numel=numel, device=codes.device)
    result = torch.empty(numel, dtype=dtype, device=codes.device) if out is None else out
    _check_result("dequantize", result, numel=numel, device=codes.device)
    if numel:
        dequantize_op(codes, scales, result, kind_of(spec), spec.block_numel)
    return result


def dequantize_sum(
    codes: Tensor,
    scales: Tensor,
    spec: Codec,
    *,
    numel: int,
    own: Tensor | None = None,
    own_index: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Dequantize several rows of codes and add them up in order, in float32.

    Args:
        codes: uint8, shape ``(num_rows, num_blocks, block_bytes)``; rows may lie apart.
        scales: ``spec.scale_dtype``, shape ``(num_rows, num_blocks)``; rows may lie apart.
        spec: What they were quantized with.
        numel: Elements a row.
        own: `numel` exact values (float32, bfloat16 or float16), added in the place of a row.
        own_index: Which row that is; its codes are not read.
        out: float32, 1-D and contiguous, of `numel` elements.

    Returns:
        1-D float32: ``row_0 + row_1 + ...`` from left to right.

    Raises:
        TypeError, ValueError: As `dequantize`.

    Error bound:
        The sum of the rows' own; every rank that adds the same rows gets the same bits.
    """
    _check_rows("dequantize_sum", codes, scales, spec, numel=numel, own=own, own_index=own_index)
    made = torch.empty(numel, device=codes.device) if out is None else out
    _check_result("dequantize_sum", made, numel=numel, device=codes.device, types=(torch.float32,))
    if numel:
        dequantize_sum_op(
            codes, scales, _flat(own), own_index, made, kind_of(spec), spec.block_numel
        )
    return made


def dequantize_sum_requantize(
    codes: Tensor,
    scales: Tensor,
    spec: Codec,
    *,
    numel: int,
    to: Codec,
    own: Tensor | None = None,
    own_index: int = 0,
    seed: int = 0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize what `dequantize_sum` gives, without ever storing it whole.

    The middle step between two hops of a reduction.

    Args:
        codes: See `dequantize_sum`.
        scales: See `dequantize_sum`.
        spec: What the rows were quantized with.
        numel: Elements a row.
        to: What the sum is quantized with.
        own: See `dequantize_sum`.
        own_index: See `dequantize_sum`.
        seed: See `quantize`.
        out: Codes and scales of the sum to fill.

    Returns:
        Codes and scales of the sum, as of ``quantize(dequantize_sum(...), to)``, bit by bit.

    Raises:
        TypeError, ValueError: As `dequantize`.

    Source:
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
        Training", 2023, section 4.3.
    """
    name = "dequantize_sum_requantize"
    _check_rows(name, codes, scales, spec, numel=numel, own=own, own_index=own_index)
    _check_codec(to)
    made = _codes_for(numel, to, codes.device) if out is None else out
    _check_codes(f"{name}: out", *made, to, numel=numel, device=codes.device)
    if numel:
        dequantize_sum_requantize_op(
            codes,
            scales,
            _flat(own),
            own_index,
            numel,
            kind_of(spec),
            spec.block_numel,
            *made,
            kind_of(to),
            to.block_numel,
            to.rounding == "stochastic",
            seed,
        )
    return made


def _flat(own: Tensor | None) -> Tensor | None:
    return None if own is None else own.detach().reshape(-1)


def _codes_for(numel: int, spec: Codec, device: torch.device) -> tuple[Tensor, Tensor]:
    num_blocks = spec.num_blocks(numel)
    codes = torch.empty(num_blocks, spec.block_bytes, dtype=torch.uint8, device=device)
    return codes, torch.empty(num_blocks, dtype=spec.scale_dtype, device=device)


def _check_codec(spec: object) -> None:
    if not isinstance(spec, Codec):
        raise TypeError(f"spec: expected BlockQuant or Float8Quant, got {type(spec).__name__}")


def _check_numel(where: str, numel: int) -> None:
    if numel < 0:
        raise ValueError(f"{where}: numel must not be negative, got {numel}")


def _check_float(where: str, x: Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"{where} must be float32, bfloat16 or float16, got {x.dtype}")


def _check_result(
    where: str,
    out: Tensor,
    *,
    numel: int,
    device: torch.device,
    types: Sequence[torch.dtype] = FLOATS,
) -> None:
    if out.dtype not in types:
        told = " or ".join(str(each) for each in types)
        raise TypeError(f"{where}: the result must be {told}, got {out.dtype}")
    if out.shape != (numel,) or not out.is_contiguous() or out.device != device:
        raise ValueError(
            f"{where}: expected out to be contiguous, of shape ({numel},) on {device}, got "
            f"{tuple(out.shape)}, strides {out.stride()} on {out.device}"
        )


def _check_codes(
    where: str, codes: Tensor, scales: Tensor, spec: Codec, *, numel: int, device: torch.device
) -> None:
    num_blocks = spec.num_blocks(numel)
    wanted = {"codes": (num_blocks, spec.block_bytes), "scales": (num_blocks,)}
    _check_layout(where, codes, scales, spec, wanted=wanted, device=device)
    if not (codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError(f"{where}: codes and scales must be contiguous")


def _check_rows(
    where: str,
    codes: Tensor,
    scales: Tensor,
    spec: Codec,
    *,
    numel: int,
    own: Tensor | None,
    own_index: int,
) -> None:
    _check_codec(spec)
    _check_numel(where, numel)
    if codes.dim() != 3 or not len(codes):
        raise ValueError(
            f"{where}: expected codes of shape (num_rows, num_blocks, block_bytes) with one row at "
            f"least, got {tuple(codes.shape)}"
        )
    num_rows, num_blocks = len(codes), spec.num_blocks(numel)
    wanted = {
        "codes": (num_rows, num_blocks, spec.block_bytes),
        "scales": (num_rows, num_blocks),
    }
    _check_layout(where, codes, scales, spec, wanted=wanted, device=codes.device)
    if not (codes[0].is_contiguous() and scales[0].is_contiguous()):
        raise ValueError(f"{where}: each row of codes and of scales must be contiguous")
    if own is None:
        return
    _check_float(f"{where}: own", own)
    if own.numel() != numel or own.device != codes.device:
        raise ValueError(
            f"{where}: expected own to have {numel} elements on {codes.device}, got {own.numel()} "
            f"on {own.device}"
        )
    if not 0 <= own_index < num_rows:
        raise ValueError(f"{where}: own_index must be one of {num_rows} rows, got {own_index}")


def _check_layout(
    where: str,
    codes: Tensor,
    scales: Tensor,
    spec: Codec,
    *,
    wanted: dict[str, tuple[int, ...]],
    device: torch.device,
) -> None:
    types = {"codes": torch.uint8, "scales": spec.scale_dtype}
    for name, tensor in (("codes", codes), ("scales", scales)):
        if tensor.dtype != types[name]:
            raise TypeError(f"{where}: {name} must be {types[name]}, got {tensor.dtype}")
        if tuple(tensor.shape) != wanted[name] or tensor.device != device:
            raise ValueError(
                f"{where}: expected {name} of shape {wanted[name]} on {device}, got "
                f"{tuple(tensor.shape)} on {tensor.device}"
            )
