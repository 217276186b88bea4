"""What ranks of one host send each other: through the slots of a channel, or read in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_partition._channel import Channel, Transfer
from zero_partition._wire import sum_rows

_CHUNK_NUMEL = 2**15  # of sums of three and more rows, so that partial sums stay in the cache


class Gather(Transfer):
    """Rank r's `rows[r]` goes to everyone.

    Args:
        channel: Where it will run.
        rows: uint8, one a rank, of equal length; an empty one where a rank has nothing to give.
    """

    def __init__(self, channel: Channel, rows: Sequence[Tensor]) -> None:
        self._slots, self._rank = channel.slots, channel.rank
        self._chunks = [_split(row, channel.slot_bytes) for row in rows]
        self._others = [r for r, row in enumerate(rows) if r != channel.rank and row.numel()]
        self.num_rounds = max(len(chunks) for chunks in self._chunks)

    def put(self, index: int, slot: int) -> None:
        """See `Transfer.put`."""
        if own := self._chunks[self._rank]:
            _fitted(self._slots[self._rank][slot], own[index]).copy_(own[index])

    def take(self, index: int, slot: int) -> None:
        """See `Transfer.take`."""
        for other in self._others:
            chunk = self._chunks[other][index]
            chunk.copy_(_fitted(self._slots[other][slot], chunk))


class Exchange(Transfer):
    """Rank r's `given[s]` becomes rank s's `taken[r]`.

    Args:
        channel: Where it will run.
        given: One row a rank, all of equal length and one dtype.
        taken: Rows for what the others give.
    """

    def __init__(self, channel: Channel, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        self._rank = channel.rank
        self._others = [r for r in range(channel.num_ranks) if r != channel.rank]
        numel = channel.part_bytes // given[0].element_size()
        self._given = [_split(row, numel) for row in given]
        self._taken = [_split(row, numel) for row in taken]
        self._parts = channel.parts(given[0].dtype)
        self.num_rounds = len(self._given[channel.rank])

    def put(self, index: int, slot: int) -> None:
        """See `Transfer.put`."""
        for other in self._others:
            chunk = self._given[other][index]
            _fitted(self._parts[self._rank][slot][other], chunk).copy_(chunk)

    def take(self, index: int, slot: int) -> None:
        """See `Transfer.take`."""
        for other in self._others:
            chunk = self._taken[other][index]
            chunk.copy_(_fitted(self._parts[other][slot][self._rank], chunk))


class Reduction(Transfer):
    """Everyone's row r goes to rank r, which sums them in rank order.

    Args:
        channel: Where it will run.
        out: Where this rank's sum goes; may be this rank's own row.
        rows: One a rank, of equal length and one dtype.
    """

    def __init__(self, channel: Channel, out: Tensor, rows: Sequence[Tensor]) -> None:
        self._rank = channel.rank
        self._others = [r for r in range(channel.num_ranks) if r != channel.rank]
        numel = channel.part_bytes // rows[0].element_size()
        self._chunks = [_split(row, numel) for row in rows]
        self._sums = _split(out, numel)
        self._parts = channel.parts(rows[0].dtype)
        # From the third row on, an own row in `out` would be overwritten before its turn comes.
        self._keeps_own = channel.rank >= 2 and out.data_ptr() == rows[channel.rank].data_ptr()
        self.num_rounds = len(self._chunks[0])

    def put(self, index: int, slot: int) -> None:
        """See `Transfer.put`."""
        for other in self._others:
            chunk = self._chunks[other][index]
            _fitted(self._parts[self._rank][slot][other], chunk).copy_(chunk)

    def take(self, index: int, slot: int) -> None:
        """See `Transfer.take`."""
        own = self._chunks[self._rank][index]
        if self._keeps_own:
            own = own.clone()
        rows = [_fitted(parts[slot][self._rank], own) for parts in self._parts]
        rows[self._rank] = own
        sum_rows(self._sums[index], rows)


class GatherInPlace(Transfer):
    """Rank r's own row goes to everyone, out of the buffer in which rank r holds it.

    Args:
        channel: Where it will run.
        rows: One a rank.
        theirs: Each rank's own row, where that rank has it.
    """

    num_rounds = 1
    reads_in_place = True

    def __init__(self, channel: Channel, rows: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        pairs = enumerate(zip(rows, theirs, strict=True))
        self._pairs = [pair for rank, pair in pairs if rank != channel.rank]

    def put(self, index: int, slot: int) -> None:
        """Nothing: the others look where it is."""

    def take(self, index: int, slot: int) -> None:  # noqa: ARG002  a part of the protocol
        """See `Transfer.take`."""
        for row, source in self._pairs:
            row.copy_(source)


class ReductionInPlace(Transfer):
    """Everyone's row r goes to rank r, out of the buffers in which the ranks hold them.

    Args:
        channel: Where it will run.
        out: Where this rank's sum goes; may be this rank's own row.
        rows: Every rank's row for this rank.
    """

    num_rounds = 1
    reads_in_place = True

    def __init__(self, channel: Channel, out: Tensor, rows: Sequence[Tensor]) -> None:
        self._out, self._rows, self._rank = out, rows, channel.rank
        self._keeps_own = channel.rank >= 2 and out.data_ptr() == rows[channel.rank].data_ptr()

    def put(self, index: int, slot: int) -> None:
        """Nothing: the others look where it is."""

    def take(self, index: int, slot: int) -> None:  # noqa: ARG002  a part of the protocol
        """See `Transfer.take`."""
        numel = _CHUNK_NUMEL if len(self._rows) > 2 else max(self._out.numel(), 1)
        columns = zip(*(row.split(numel) for row in (self._out, *self._rows)), strict=True)
        for out, *rows in columns:
            if self._keeps_own:
                rows[self._rank] = rows[self._rank].clone()
            sum_rows(out, rows)


def _split(row: Tensor, numel: int) -> tuple[Tensor, ...]:
    return row.split(numel) if row.numel() else ()


def _fitted(place: Tensor, chunk: Tensor) -> Tensor:
    return place if place.numel() == chunk.numel() else place[: chunk.numel()]
