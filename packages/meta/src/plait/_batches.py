"""What this rank reads: its slice of every global batch, its share of the held-out windows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from plait._batch import BatchSizes
from plait._text import Text, batch_starts, held_out_starts, windows

__all__ = ["Batches"]


class Batches:
    """The batches of one rank.

    Rank r takes the r-th contiguous slice of the global batch and cuts it into micro-batches.

    Args:
        text: Training and held-out text.
        sizes: Batch sizes, in sequences.
        context_length: Length of a sequence.
        seed: Of the order of the training text.
        rank: This rank.
        device: Where the batches go.
    """

    def __init__(
        self,
        text: Text,
        sizes: BatchSizes,
        *,
        context_length: int,
        seed: int,
        rank: int,
        device: torch.device,
    ) -> None:
        self.text = text
        self.sizes = sizes
        self.context_length = context_length
        self.seed = seed
        self.rank = rank
        self.device = device

    def micro_batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets of each backward of an update; int64, ``(micro_batch_size, T)``."""
        micro = self.sizes.micro_batch_size
        first = self.rank * micro * self.sizes.accumulation_steps
        for start in range(first, first + micro * self.sizes.accumulation_steps, micro):
            starts = batch_starts(
                seed=self.seed,
                step=step,
                samples=range(start, start + micro),
                num_starts=self.text.train.numel() - self.context_length,
            )
            yield self._windows(self.text.train, starts)

    def held_out(self, num_windows: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Inputs, targets and how many leading rows count; as many batches on every rank."""
        starts = held_out_starts(
            held_out_numel=self.text.held_out.numel(),
            context_length=self.context_length,
            num_windows=num_windows,
        )
        size = self.sizes.micro_batch_size
        for first in range(0, len(starts), size * self.sizes.num_ranks):
            mine = starts[first + self.rank * size :][:size]
            padded = mine + starts[:1] * (size - len(mine))
            yield *self._windows(self.text.held_out, padded), len(mine)

    def _windows(self, text: Tensor, starts: list[int]) -> tuple[Tensor, Tensor]:
        tokens_BT, targets_BT = windows(text, starts, context_length=self.context_length)
        return tokens_BT.to(self.device), targets_BT.to(self.device)
