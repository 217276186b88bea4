"""Memory that one buffer after the other uses in a backward; fresh memory costs several times more.

A buffer that is given back is lent again to the next one of its length; whatever is free when the
backward ends is let go of, so that nothing is held between backward and update.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class Slots:
    """Buffers without an owner at the moment."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = defaultdict(list)

    def lend(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D buffer with arbitrary content."""
        free = self._free[numel, dtype, device]
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=device)

    def take_back(self, buffer: Tensor) -> None:
        """Accept a buffer that nobody reads or writes any more."""
        self._free[buffer.numel(), buffer.dtype, buffer.device].append(buffer)

    def empty(self) -> None:
        """Let go of all memory."""
        self._free.clear()
