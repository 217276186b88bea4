"""The baseline: how well counting pairs of bytes predicts the next byte."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bigram_loss"]

_NUM_BYTES = 256
_PIECE_NUMEL = 1 << 24


def bigram_loss(train: Tensor, tokens: Tensor, targets: Tensor, *, alpha: float = 0.1) -> float:
    """Mean negative log-likelihood of `targets` under bigram counts, in nats a byte.

    ``p(b | a) = (count(ab) + alpha) / (count(a) + 256 alpha)``

    Args:
        train: Text the pairs are counted in; uint8, one dimension.
        tokens: Bytes before; int64, any shape.
        targets: Bytes after; int64, the shape of `tokens`.
        alpha: What is added to every count.

    Example:
        >>> text = torch.tensor([1, 2, 1, 2, 1], dtype=torch.uint8)
        >>> round(bigram_loss(text, torch.tensor([1]), torch.tensor([2])), 3)  # ln(27.6 / 2.1)
        2.576
    """
    counts = torch.zeros(_NUM_BYTES * _NUM_BYTES, dtype=torch.float64)
    for start in range(0, train.numel() - 1, _PIECE_NUMEL):
        piece = train[start : start + _PIECE_NUMEL + 1].long()
        pairs = piece[:-1] * _NUM_BYTES + piece[1:]
        counts += torch.bincount(pairs, minlength=counts.numel())
    counts_AB = counts.view(_NUM_BYTES, _NUM_BYTES) + alpha
    log_probs_AB = counts_AB.log() - counts_AB.sum(dim=1, keepdim=True).log()
    return -log_probs_AB[tokens.flatten(), targets.flatten()].mean().item()
