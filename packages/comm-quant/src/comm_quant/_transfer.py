"""A transfer of one or more hops, and the two ways in which messages move."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

Hop: TypeAlias = Sequence[dist.Work]


class Transfer:
    """A transfer under way: an iterator that yields the messages of a hop, then uses them.

    Args:
        hops: The iterator; it is left between hops only.
        line: Transfers over the same groups that have not begun their second hop. They begin it in
            the order in which they joined, on every rank, whoever is asked or waited for first.
    """

    def __init__(self, hops: Iterator[Hop], *, line: deque[Transfer] | None = None) -> None:
        self._hops: Iterator[Hop] | None = hops
        self._line = line
        self._works: Hop = next(hops, ())
        if line is not None:
            line.append(self)

    def done(self) -> bool:
        """Go on as far as messages have arrived; whether the result is in place."""
        while self._hops is not None and all(work.is_completed() for work in self._works):
            if self._line is not None and self._line[0] is not self:
                first = self._line[0]
                first.done()
                if self._line[0] is first:
                    return False
                continue
            self._next_hop()
        return self._hops is None

    def wait(self) -> None:
        """Return when the result is in place; calling it again does nothing."""
        while self._hops is not None:
            self._next_hop()

    def _next_hop(self) -> None:
        if self._line is not None:
            while self._line[0] is not self:
                self._line[0]._next_hop()
        for work in self._works:
            work.wait()
        assert self._hops is not None  # the callers have asked
        works = next(self._hops, None)
        self._works = works or ()
        if self._line is not None:
            self._line.popleft()
            self._line = None
        if works is None:
            self._hops = None


def spread(
    rows: Sequence[Tensor], own: Tensor, peers: Sequence[int], *, group: dist.ProcessGroup
) -> Hop:
    """Send `own` to each peer, and receive each peer's row; ranks are those of the group."""
    if not own.numel():
        return ()
    rank = dist.get_rank(group)
    others = [(row, peer) for row, peer in zip(rows, peers, strict=True) if peer != rank]
    works = [dist.irecv(row, group=group, group_src=peer) for row, peer in others]
    works += [dist.isend(own, group=group, group_dst=peer) for _, peer in others]
    return [work for work in works if work is not None]


def swap(arrived: Tensor, sent: Tensor, *, group: dist.ProcessGroup) -> Hop:
    """Send row r of `sent` to rank r, and receive its row for this rank in row r of `arrived`."""
    if not sent.numel() or len(sent) == 1:
        return ()
    work = dist.all_to_all_single(arrived.view(-1), sent.view(-1), group=group, async_op=True)
    return () if work is None else (work,)
