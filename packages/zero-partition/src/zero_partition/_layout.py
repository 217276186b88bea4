"""Where each parameter lies in a flat buffer, and which slices of the buffer a rank owns.

Pure: integers in, integers out. A *segment* is the flat buffer of parameters that share dtype,
device and trainability. It is cut into *buckets* (one message each); a bucket is `num_ranks` equal
slices, and rank r owns slice r of every bucket. The owned slices, laid end to end, are its *shard*.

    flat    | bucket 0: s0 | s1 | s2 | bucket 1: s0 | s1 | s2 |
    shard of rank 1:  s1 (of bucket 0), s1 (of bucket 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLICE_MULTIPLE = 16
"""A rank's slice is a multiple of this many elements: a vectorised optimizer then gives the same
bits on a slice as on the whole tensor."""

ALIGNMENT_BYTES = 64
"""Every parameter starts on such a boundary of its flat buffer: the bits of a GEMM depend on it."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter lies: elements ``[start, start + numel)`` of the flat buffer."""

    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message: ``num_ranks`` slices of `slice_numel` from `start` on; rank r owns slice r."""

    start: int
    slice_numel: int
    shard_start: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one parameter's elements that lies in one owned slice.

    Attributes:
        slot: Index of the parameter in the segment.
        param_start: First element, counted in the flattened parameter.
        numel: Number of elements (0 only for an empty parameter).
        flat_start: Where the run starts in the flat buffer.
        shard_start: Where it starts in the owner's shard.
    """

    slot: int
    param_start: int
    numel: int
    flat_start: int
    shard_start: int


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The plan of one flat buffer over `num_ranks` ranks."""

    num_ranks: int
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return sum(b.slice_numel for b in self.buckets) * self.num_ranks

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard, padding included."""
        return sum(b.slice_numel for b in self.buckets)

    @property
    def logical_numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    def gaps(self) -> list[tuple[int, int]]:
        """The padding, as ``[start, stop)`` runs of the flat buffer."""
        edges = [(slot.start, slot.start + slot.numel) for slot in self.slots if slot.numel]
        stops = [0, *(stop for _, stop in edges)]
        starts = [*(start for start, _ in edges), self.numel]
        return [(a, b) for a, b in zip(stops, starts, strict=True) if a < b]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What `rank` owns of each parameter, in slot order. An empty parameter is rank 0's."""
        found = []
        for index, slot in enumerate(self.slots):
            if slot.numel == 0:
                if rank == 0:
                    found.append(Piece(index, 0, 0, slot.start, 0))
                continue
            for bucket in self.buckets:
                owned = bucket.start + rank * bucket.slice_numel
                start = max(slot.start, owned)
                stop = min(slot.start + slot.numel, owned + bucket.slice_numel)
                if start < stop:
                    shard_start = bucket.shard_start + start - owned
                    found.append(Piece(index, start - slot.start, stop - start, start, shard_start))
        return tuple(found)


def plan_segment(
    numels: Sequence[int], *, num_ranks: int, alignment: int, bucket_numel: int | None = None
) -> SegmentLayout:
    """Lay parameters out one after another and cut the buffer into owned slices.

    Args:
        numels: Elements of each parameter, in order; 0 is allowed.
        num_ranks: Ranks that share the buffer.
        alignment: Every parameter starts at a multiple of this many elements.
        bucket_numel: Most elements a message should have, over all ranks; None sends the buffer
            whole. A slice never falls under `SLICE_MULTIPLE` elements.

    Returns:
        The layout; the buffer is a little longer than the parameters, so that slices are equal.

    Raises:
        ValueError: A count is negative, or not positive where it must be.
    """
    if num_ranks < 1 or alignment < 1:
        raise ValueError(
            f"num_ranks and alignment must be positive, got {num_ranks} and {alignment}"
        )
    if bucket_numel is not None and bucket_numel < 1:
        raise ValueError(f"bucket_numel must be at least 1, got {bucket_numel}")
    slots, cursor = [], 0
    for numel in numels:
        if numel < 0:
            raise ValueError(f"a parameter cannot have {numel} elements")
        slots.append(Slot(cursor, numel))
        cursor += round_up(numel, alignment)
    end = max((slot.start + slot.numel for slot in slots), default=0)
    return SegmentLayout(num_ranks, tuple(slots), _cut(end, num_ranks, bucket_numel))


def _cut(end: int, num_ranks: int, bucket_numel: int | None) -> tuple[Bucket, ...]:
    whole = round_up(-(-end // num_ranks), SLICE_MULTIPLE)
    most = whole
    if bucket_numel is not None:
        most = max(SLICE_MULTIPLE, bucket_numel // num_ranks // SLICE_MULTIPLE * SLICE_MULTIPLE)
    buckets, start, shard_start = [], 0, 0
    while start < end:
        left = round_up(-(-(end - start) // num_ranks), SLICE_MULTIPLE)
        slice_numel = min(most, left)
        buckets.append(Bucket(start, slice_numel, shard_start))
        start += slice_numel * num_ranks
        shard_start += slice_numel
    return tuple(buckets)


def alignment_numel(itemsize: int) -> int:
    """Elements between parameter starts, so that each is 64-byte aligned and 16-element aligned."""
    return max(SLICE_MULTIPLE, ALIGNMENT_BYTES // itemsize)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not under `value`."""
    return -(-value // multiple) * multiple
