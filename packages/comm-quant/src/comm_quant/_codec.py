"""What a codec is: code width, block length, scale type; and the sizes that follow. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

Rounding: TypeAlias = Literal["nearest", "stochastic"]

_MAX_CODES = {8: 127, 4: 7, 2: 1, 1: 1}
_MAX_VALUES = {"e4m3": 448.0, "e5m2": 57344.0}
_SCALE_DTYPES = (torch.float32, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Blocks(ABC):
    """What all codecs have: blocks of elements, each with a scale."""

    block_numel: int = 256
    scale_dtype: torch.dtype = torch.float32
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        name = type(self).__name__
        numel: object = self.block_numel
        if not isinstance(numel, int) or isinstance(numel, bool) or numel < 1:
            raise ValueError(f"{name}: block_numel must be a whole number from 1 on, got {numel!r}")
        if self.scale_dtype not in _SCALE_DTYPES:
            found = self.scale_dtype
            raise ValueError(
                f"{name}: scale_dtype must be torch.float32 or torch.float16, got {found}"
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f"{name}: rounding must be 'nearest' or 'stochastic', got {self.rounding!r}"
            )

    @property
    @abstractmethod
    def max_code(self) -> float:
        """The largest code's value."""

    @property
    @abstractmethod
    def codes_a_byte(self) -> int:
        """How many codes lie in a byte."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's codes."""
        return -(-self.block_numel // self.codes_a_byte)

    def num_blocks(self, numel: int) -> int:
        """Blocks that `numel` elements fill; the last one may be filled in part."""
        return -(-numel // self.block_numel)

    def code_bytes(self, numel: int) -> int:
        """Bytes of the codes of `numel` elements."""
        return self.num_blocks(numel) * self.block_bytes

    def scale_bytes(self, numel: int) -> int:
        """Bytes of the scales of `numel` elements."""
        return self.num_blocks(numel) * self.scale_dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockQuant(_Blocks):
    """Signed integer codes, one scale a block.

    Attributes:
        bits: Width of a code: 8, 4, 2, or 1 for the sign alone.
        block_numel: Consecutive elements that share a scale, at least 1.
        scale_dtype: float32 or float16.
        rounding: "nearest" (ties to even) or "stochastic" (right on average; not for signs).

    Raises:
        ValueError: One of them does not exist.

    Example:
        >>> BlockQuant(bits=4, block_numel=128).code_bytes(1000)
        512
    """

    bits: int = 8

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or self.bits not in _MAX_CODES:
            raise ValueError(f"BlockQuant: bits must be 8, 4, 2 or 1, got {self.bits!r}")
        _Blocks.__post_init__(self)  # no super(): slots make the class anew
        if self.bits == 1 and self.rounding == "stochastic":
            raise ValueError(
                "BlockQuant: bits=1 sends signs, which are not rounded; use rounding='nearest'"
            )

    @property
    def max_code(self) -> float:
        """The largest code."""
        return _MAX_CODES[self.bits]

    @property
    def codes_a_byte(self) -> int:
        """How many codes lie in a byte."""
        return 8 // self.bits


@dataclass(frozen=True, kw_only=True, slots=True)
class Float8Quant(_Blocks):
    """8-bit floating-point codes, one scale a block.

    Attributes:
        format: "e4m3" (finite values to 448) or "e5m2" (to 57,344).
        block_numel: Consecutive elements that share a scale, at least 1.
        scale_dtype: float32 or float16.
        rounding: "nearest" (ties to even) or "stochastic".

    Raises:
        ValueError: One of them does not exist.

    Example:
        >>> Float8Quant(format="e5m2").max_code
        57344.0
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"

    def __post_init__(self) -> None:
        if self.format not in _MAX_VALUES:
            raise ValueError(f"Float8Quant: format must be 'e4m3' or 'e5m2', got {self.format!r}")
        _Blocks.__post_init__(self)  # no super(): slots make the class anew

    @property
    def max_code(self) -> float:
        """The largest code's value."""
        return _MAX_VALUES[self.format]

    @property
    def code_dtype(self) -> torch.dtype:
        """The codes' own type."""
        return torch.float8_e4m3fn if self.format == "e4m3" else torch.float8_e5m2

    @property
    def codes_a_byte(self) -> int:
        """How many codes lie in a byte."""
        return 1


Codec: TypeAlias = BlockQuant | Float8Quant
