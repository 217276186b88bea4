"""A stream of chunks between the ranks of one host, through memory that all of them have mapped.

Every rank has a ring of slots there. Transfers are cut into rounds, numbered through for the whole
life of the channel. In round n each rank

    puts    its chunk into slot ``n % NUM_SLOTS`` of its own ring, and then says ``put = n + 1``
    takes   the other ranks' chunks of round n when they have said so, and says ``taken = n + 1``

and a slot is written again only when every other rank has taken what was in it. What a rank says is
an int64 on a cache line of its own with one writer; x86 shows a rank's stores to the others in the
order in which they were made. So no rank reads another's own memory, and a rank that does not want
to wait never has to: it moves what can be moved and comes back later.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from math import ceil

import torch
from torch import Tensor

from zero_partition._errors import RanksDisagree
from zero_partition._host_memory import PAGE_BYTES, Region
from zero_partition._liveness import Liveness

NUM_SLOTS = 2
_LINE_BYTES = 64
_WORD_BYTES = 8
_NUM_YIELDS = 2000  # tries before it sleeps between them
_NAP_S = 50e-6
_LOOK_S = 0.1  # how often a waiting rank looks whether the others live


def channel_bytes(num_ranks: int, slot_bytes: int) -> int:
    """Bytes of the region that a channel needs."""
    return _rings_start(num_ranks) + num_ranks * NUM_SLOTS * slot_bytes


def _rings_start(num_ranks: int) -> int:
    return ceil(2 * num_ranks * _LINE_BYTES / PAGE_BYTES) * PAGE_BYTES


class Channel:
    """See the module's docstring.

    Args:
        region: `channel_bytes` bytes, mapped by all ranks; the channel closes its file.
        rank: This rank.
        num_ranks: Ranks that mapped it, at least 2.
        slot_bytes: Most bytes a rank puts in a round; a multiple of 64.
        time_limit: How long to wait for another rank.
    """

    def __init__(
        self, region: Region, *, rank: int, num_ranks: int, slot_bytes: int, time_limit: timedelta
    ) -> None:
        self.rank, self.num_ranks, self.slot_bytes = rank, num_ranks, slot_bytes
        start = _rings_start(num_ranks)
        rings = region.content[start:].view(num_ranks, NUM_SLOTS, slot_bytes)
        self.slots = [list(ring) for ring in rings]
        self._parts: dict[torch.dtype, list[list[list[Tensor]]]] = {}
        self._flags = memoryview(region.memory)[:start].cast("q")
        words = _LINE_BYTES // _WORD_BYTES
        self._put_at = [2 * r * words for r in range(num_ranks)]
        self._taken_at = [(2 * r + 1) * words for r in range(num_ranks)]
        self._others = [r for r in range(num_ranks) if r != rank]
        self._liveness = Liveness(region.file, rank)
        self._time_limit_s = time_limit.total_seconds()
        self._to_put: deque[Transfer] = deque()
        self._to_take: deque[Transfer] = deque()
        self._num_rounds = self._num_put = self._num_taken = 0
        self._taken_by_all, self._put_by_all = 0, 0  # what this rank has seen the others say

    @property
    def part_bytes(self) -> int:
        """Most bytes a rank puts in a round for one of the others."""
        return self.slot_bytes // (self.num_ranks - 1) // _LINE_BYTES * _LINE_BYTES

    def parts(self, dtype: torch.dtype) -> list[list[list[Tensor]]]:
        """Views of the slots, by rank that puts, slot, and rank that takes (None of its own)."""
        if dtype not in self._parts:
            size = self.part_bytes
            self._parts[dtype] = [
                [
                    [
                        slot[(taker - (taker > putter)) * size :][:size].view(dtype)
                        for taker in range(self.num_ranks)
                    ]
                    for slot in ring
                ]
                for putter, ring in enumerate(self.slots)
            ]
        return self._parts[dtype]

    def start(self, transfer: Transfer) -> Transfer:
        """Begin a transfer: every rank begins the same ones in the same order."""
        transfer.first_round = self._num_rounds
        self._num_rounds += transfer.num_rounds
        transfer.end_round = self._num_rounds
        if transfer.num_rounds:
            self._to_put.append(transfer)
            self._to_take.append(transfer)
            self.move()
        return transfer

    def finished(self, transfer: Transfer) -> bool:
        """Whether everything of it has been put and taken here."""
        end = transfer.end_round
        if self._num_taken < end or self._num_put < end:
            return False
        return not transfer.reads_in_place or self._all_took(end)

    def _all_took(self, number: int) -> bool:
        """Whether every other rank has taken what was put in the rounds below `number`."""
        if self._taken_by_all < number:
            self._taken_by_all = min(self._flags[self._taken_at[r]] for r in self._others)
        return self._taken_by_all >= number

    def move(self) -> bool:
        """Put and take what can be put and taken without waiting; say whether there was any."""
        before = self._num_put + self._num_taken
        while self._put_some() or self._take_some():
            pass
        return self._num_put + self._num_taken > before

    def wait(self, transfer: Transfer) -> None:
        """Move until `transfer` is finished.

        Raises:
            RanksDisagree: Another rank has ended, or did not take part within the time limit.
        """
        tries, began, looked = 0, 0.0, 0.0
        while not self.finished(transfer):
            if self.move():
                tries = 0
                continue
            tries += 1
            if tries < _NUM_YIELDS:
                os.sched_yield()
                continue
            now = time.monotonic()
            if tries == _NUM_YIELDS:
                began = looked = now
            if now - looked > _LOOK_S:
                looked = now
                self._check_others(now - began)
            time.sleep(_NAP_S)

    def _check_others(self, waited_s: float) -> None:
        late = [
            rank
            for rank in self._others
            if self._flags[self._put_at[rank]] <= self._num_taken
            or self._flags[self._taken_at[rank]] < self._num_put
        ]
        dead = [rank for rank in late if not self._liveness.of(rank)]
        if dead:
            raise RanksDisagree(f"rank {_listed(dead)} ended during a transfer with this rank")
        if waited_s > self._time_limit_s:
            raise RanksDisagree(
                f"rank {self.rank} has waited {waited_s:.0f} s in a transfer for rank "
                f"{_listed(late)}; every rank must make the same calls in the same order"
            )

    def _put_some(self) -> bool:
        if not self._to_put:
            return False
        number = self._num_put
        if not self._all_took(number + 1 - NUM_SLOTS):
            return False
        transfer = self._to_put[0]
        transfer.put(number - transfer.first_round, number % NUM_SLOTS)
        self._num_put = self._flags[self._put_at[self.rank]] = number + 1
        if self._num_put == transfer.end_round:
            self._to_put.popleft()
        return True

    def _take_some(self) -> bool:
        if not self._to_take:
            return False
        number = self._num_taken
        if number >= self._put_by_all:
            self._put_by_all = min(self._flags[self._put_at[r]] for r in self._others)
            if number >= self._put_by_all:
                return False
        transfer = self._to_take[0]
        transfer.take(number - transfer.first_round, number % NUM_SLOTS)
        self._num_taken = self._flags[self._taken_at[self.rank]] = number + 1
        if number + 1 == transfer.end_round:
            self._to_take.popleft()
        return True


class Transfer(ABC):
    """What is put and taken in each of its rounds.

    Attributes:
        num_rounds: Rounds it takes; the same on every rank.
        reads_in_place: Whether ranks read each other's own buffers, which must then stay as they
            are until all have.
        first_round: The channel's number of its first one.
        end_round: The channel's number after its last one.
    """

    num_rounds: int
    reads_in_place: bool = False
    first_round: int = 0
    end_round: int = 0

    @abstractmethod
    def put(self, index: int, slot: int) -> None:
        """Write this rank's chunk of a round."""

    @abstractmethod
    def take(self, index: int, slot: int) -> None:
        """Read the others' chunks of a round."""


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
