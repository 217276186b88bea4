"""The norm of all gradients, over logical elements, once each."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 131_072


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of squares of all elements in float64, as a 0-d tensor on the tensors' device.

    Float32 values are widened in chunks that stay in cache, which is several times faster than one
    float64 copy.
    """
    total: Tensor | None = None
    for tensor in tensors:
        for chunk in tensor.detach().reshape(-1).split(_CHUNK):
            wide = chunk.double()
            square = torch.dot(wide, wide)
            total = square if total is None else total + square.to(total.device)
    return torch.zeros((), dtype=torch.float64) if total is None else total


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """``min(1, max_norm / (norm + 1e-6))``, torch's formula, as a 0-d float32 tensor."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
