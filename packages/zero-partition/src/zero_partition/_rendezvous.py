"""Where the ranks meet before they move data, so that a mismatch is an error and not a hang.

Before each series of collectives every rank says in a few words where it is: what it is about to
do, how often it has done that, and a little payload. If all say the same, they go on. A rank that
is further on in the step than another (it had no backward, say, or used a module less often) takes
part in what the other still has to do and asks again. Anything else is a `RanksDisagree` on every
rank.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zero_partition._errors import RanksDisagree
from zero_partition._lanes import Lane

_TAG = 7
_GRACE = timedelta(milliseconds=50)


class Place(enum.IntEnum):
    """Where a rank is in its step.

    A rank at a later place lets those at an earlier one go first, where `JOINS` allows it.
    """

    FORWARD = 1
    EVALUATION = 2
    BACKWARD = 3
    FLUSH = 4
    FINISH = 5
    NORM = 6
    STEP = 7
    WHOLE = 8
    SAVE = 9
    LOAD = 10
    SYNC = 11

    @property
    def phrase(self) -> str:
        """What the rank is doing, for messages."""
        return _PHRASES[self]


_PHRASES = {
    Place.FORWARD: "in a training forward",
    Place.EVALUATION: "in an evaluation forward",
    Place.BACKWARD: "in backward",
    Place.FLUSH: "at the end of backward",
    Place.FINISH: "in finish()",
    Place.NORM: "in clip_grad_norm_()",
    Place.STEP: "in optimizer.step()",
    Place.WHOLE: "gathering whole values",
    Place.SAVE: "in save()",
    Place.LOAD: "in load()",
    Place.SYNC: "in sync()",
}

JOINS: Mapping[Place, frozenset[Place]] = {
    Place.BACKWARD: frozenset({Place.FORWARD}),
    Place.FLUSH: frozenset({Place.FORWARD, Place.BACKWARD}),
    Place.FINISH: frozenset({Place.FORWARD, Place.BACKWARD, Place.FLUSH}),
    Place.SYNC: frozenset({Place.EVALUATION}),
}
"""Which earlier places a rank at a later one takes part in."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank said: where it is, how often it has been there before, and its payload."""

    place: Place
    count: int
    payload: tuple[int, ...]


class Rendezvous:
    """A small all-to-all of a few integers over a group of its own.

    Args:
        lane: Whose control group to use; None for a single process.
        payload_words: 64-bit words that a report can carry.
    """

    def __init__(self, lane: Lane | None, *, payload_words: int) -> None:
        self._lane = lane
        group = None if lane is None else lane.control
        self._rank = 0 if group is None else dist.get_rank(group)
        self._num_ranks = 1 if group is None else dist.get_world_size(group)
        self._payload_words = payload_words
        self._visits: dict[Place, int] = dict.fromkeys(Place, 0)
        self.latest: Place | None = None  # what the ranks went on with; the same on all of them

    def meet(self, place: Place, payload: Sequence[int] = ()) -> list[Report]:
        """Exchange reports once; return them in rank order.

        Raises:
            RanksDisagree: Some rank is at a place that this one neither shares nor joins nor goes
                before, or did not come before the group's time-out.
        """
        padding = [0] * (self._payload_words - len(payload))
        mine = Report(place, self._visits[place], (*payload, *padding))
        reports = [mine] if self._lane is None else self._exchange(mine, self._lane)
        lead = min(report.place for report in reports)
        if any(r.place != lead and lead not in JOINS.get(r.place, ()) for r in reports):
            if self._lane is not None:
                self._lane.is_broken = True
            raise RanksDisagree(_describe(reports))
        self.latest = lead
        if place == lead:
            self._visits[place] += 1
        return reports

    def _exchange(self, mine: Report, lane: Lane) -> list[Report]:
        group = lane.control
        said = torch.tensor([mine.place, mine.count, *mine.payload], dtype=torch.int64)
        heard = torch.empty(self._num_ranks, said.numel(), dtype=torch.int64)
        heard[self._rank] = said
        peers = [(self._rank + step) % self._num_ranks for step in range(1, self._num_ranks)]
        receives = [
            (peer, _posted(dist.irecv(heard[peer], group=group, group_src=peer, tag=_TAG)))
            for peer in peers
        ]
        sends = [_posted(dist.isend(said, group=group, group_dst=peer, tag=_TAG)) for peer in peers]
        silent: dict[int, str] = {}
        for peer, work in receives:
            try:
                work.wait(_GRACE) if silent else work.wait()
            except RuntimeError as error:
                silent[peer] = str(error).splitlines()[0]
        if silent:
            lane.is_broken = True
            raise RanksDisagree(self._absent(mine, silent))
        for work in sends:
            work.wait()
        return [Report(Place(row[0]), row[1], tuple(row[2:])) for row in heard.tolist()]

    def _absent(self, mine: Report, silent: Mapping[int, str]) -> str:
        who = ", ".join(str(rank) for rank in sorted(silent))
        reason = next(iter(silent.values()))
        return (
            f"rank {self._rank} is {_phrase(mine)}; rank {who} did not come "
            f"(it has been there {mine.count} times). Every rank must make the same calls; "
            f"for evaluation loops of unequal length end each with zero.sync(). [{reason}]"
        )


def _posted(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("internal: this process is not in the group it talks to")
    return work


def _describe(reports: Sequence[Report]) -> str:
    groups = itertools.groupby(
        sorted(enumerate(reports), key=lambda item: (item[1].place, item[1].count, item[0])),
        key=lambda item: (item[1].place, item[1].count),
    )
    told = []
    for _, members in groups:
        listed = list(members)
        ranks = ", ".join(str(rank) for rank, _ in listed)
        told.append(f"rank {ranks} is {_phrase(listed[0][1])}")
    return (
        "the ranks are at different places: " + "; ".join(told) + ". Every rank must make the same "
        "calls in the same order; for evaluation loops of unequal length end each with zero.sync()"
    )


def _phrase(report: Report) -> str:
    return f"{report.place.phrase} (its number {report.count + 1})"
