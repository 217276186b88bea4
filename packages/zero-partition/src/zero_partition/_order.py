"""The order in which units run: registration first, then what every rank recorded. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


class RunOrder:
    """One list for gathers and reductions, the same on every rank.

    Attributes:
        forward: Units in the order of a forward pass; one that runs twice is listed twice.
        backward: Each unit once, the last to start first.

    Example:
        >>> order = RunOrder(3)
        >>> order.begin()
        >>> for unit in (0, 2, 1):
        ...     order.record(unit)
        >>> order.end()
        >>> order.adopt([order.digest(), order.digest()])
        >>> order.forward, order.backward
        ([0, 2, 1], [1, 2, 0])
    """

    def __init__(self, num_units: int) -> None:
        self.forward = list(range(num_units))
        self.backward = self.forward[::-1]
        self._recorded: list[int] = []
        self._is_recording = False
        self._is_settled = False

    def begin(self) -> None:
        """Start recording at the model's first training forward."""
        if not self._is_settled:
            self._recorded = []
            self._is_recording = True

    def record(self, unit: int) -> None:
        """Note that a unit runs."""
        if self._is_recording:
            self._recorded.append(unit)

    def end(self) -> None:
        """Stop recording."""
        self._is_recording = False

    def digest(self) -> int:
        """A checksum of the record, for comparing ranks."""
        return zlib.crc32(repr(self._recorded).encode())

    def adopt(self, digests: Sequence[int]) -> None:
        """Settle the order, once: the record if all ranks have the same and it names every unit."""
        if self._is_settled or not self._recorded:
            return
        self._is_settled = True
        if len(set(digests)) == 1 and set(self._recorded) == set(self.forward):
            self.forward = list(self._recorded)
            self.backward = list(dict.fromkeys(self._recorded))[::-1]
