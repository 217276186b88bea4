"""Gradients from their arrival in backward to the divided sum of an accumulation.

A unit whose gradients are complete is *posted*: its reduction starts, on a group of its own. Units
are posted in one fixed order on every rank. Nobody has to wait for a reduction before backward
ends, but where two are on the way the next unit gives the older one a moment, so that its memory
can be used again. The end of backward (the *flush*) posts the rest, waits for all, and tells
everybody which parameters were used by whom.
"""

from __future__ import annotations

import enum
import math
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.profiler import record_function

from zero_partition._errors import OrderError, RanksDisagree
from zero_partition._gradients import GradientBuffers
from zero_partition._order import RunOrder
from zero_partition._rendezvous import Place, Rendezvous, Report
from zero_partition._slots import Slots
from zero_partition._transport import Transport
from zero_partition._unit import Unit

_MOST_ON_THE_WAY = 2  # units whose reductions may run while the next one's gradients arrive
_PATIENCE_S, _SLOWEST_BYTES_PER_S = 5e-3, 2e9
_WORD = 63  # bits of a payload word that are used; int64 has a sign


class Accumulation(enum.Enum):
    """Where an accumulation stands."""

    EMPTY = enum.auto()
    """No gradient since the last zero_grad() or step()."""
    OPEN = enum.auto()
    """The sums hold one or more backwards, undivided."""
    FINISHED = enum.auto()
    """Divided; waiting for step() or zero_grad()."""
    STEPPED = enum.auto()
    """An optimizer has used them; the next backward starts anew."""


class Reductions:
    """The backward half of the data path.

    Args:
        units: All units, in registration order.
        transport: How messages travel.
        rendezvous: Where ranks meet.
        overlap: Whether to post before backward ends.
        on_flush: Called when backward ends, before the ranks meet.
        on_join: Takes part in the gathers another rank still has to do before this rank's place.
        order: Records in which order the units ran.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        transport: Transport,
        rendezvous: Rendezvous,
        overlap: bool,
        on_flush: Callable[[], None],
        on_join: Callable[[Place, Sequence[Report]], None],
        order: RunOrder,
    ) -> None:
        self._units, self._overlap = units, overlap
        self._rendezvous, self._transport = rendezvous, transport
        self._on_flush, self._on_join = on_flush, on_join
        self._slots = Slots()
        self.buffers = {
            unit.index: [
                GradientBuffers(s, transport, self._slots, key=(unit.index, index))
                for index, s in enumerate(unit.trainable_segments)
            ]
            for unit in units
        }
        self.state = Accumulation.EMPTY
        self._order = order
        self.task: int | None = None  # the outermost graph task of the running backward
        self._next = 0
        self._posted: deque[Unit] = deque()
        self.squares: Tensor | None = None  # of the finished gradients, until they change

    @property
    def all_buffers(self) -> list[GradientBuffers]:
        """Every trainable segment's buffers, unit by unit."""
        return [buffers for unit in self._units for buffers in self.buffers[unit.index]]

    # One backward.

    def begin(self) -> None:
        """Enter a backward, if it is a new one: before its first gradient is accumulated."""
        if self.task is not None:
            return
        if self.state is Accumulation.FINISHED and any(b.live() for b in self.all_buffers):
            raise OrderError(
                "backward() after the gradients were finished (by finish() or clip_grad_norm_()) "
                "and before step() or zero_grad(): they are divided already"
            )
        self._start_accumulation()
        self.task = torch._C._current_graph_task_id()
        self._next = 0
        Variable._execution_engine.queue_callback(self.flush)

    def _start_accumulation(self) -> None:
        restart = self.state is not Accumulation.OPEN
        for buffers in self.all_buffers:
            buffers.hide(restart=restart)
        self.squares = None
        self.state = Accumulation.OPEN

    def arrive(self, unit: Unit, segment: int, slot: int, gradient: Tensor) -> None:
        """Take a gradient that autograd has just accumulated."""
        self.begin()
        parameter = self.buffers[unit.index][segment].segment.names[slot]
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"the gradient of {parameter!r} is sparse; use dense gradients (sparse=False)"
            )
        if unit.is_posted:
            raise OrderError(
                f"internal: a gradient of {parameter!r} came after its reduction had started; "
                "please report the model's structure; partition(overlap=False) avoids it"
            )
        buffers = self.buffers[unit.index][segment]
        if buffers.needs_memory and len(self._posted) >= _MOST_ON_THE_WAY:
            self._make_room()
        buffers.arrive(slot, gradient)
        unit.arrived.add((segment, slot))
        unit.tasks.add(torch._C._current_graph_task_id())
        if self._overlap:
            self._advance()

    def _advance(self) -> None:
        while self._next < len(self._order.backward):
            unit = self._units[self._order.backward[self._next]]
            if not unit.gradients_complete(self.task):
                break
            self._post(unit)
        while self._posted and all(b.done() for b in self.buffers[self._posted[0].index]):
            self._settle(self._posted.popleft())

    def _make_room(self) -> None:
        """Give the oldest reduction the time that it takes, so that its memory can be used again.

        Without this, a backward that is faster than its reductions holds all gradients at once, in
        fresh memory. No rank waits for good: another may be elsewhere and need this one first.
        """
        oldest = self.buffers[self._posted[0].index]
        if any(buffers.segment.device.type != "cpu" for buffers in oldest):
            return  # its allocator keeps memory, and the host runs ahead of the device
        num_bytes = sum(buffers.message_bytes for buffers in oldest)
        deadline = time.perf_counter() + _PATIENCE_S + num_bytes / _SLOWEST_BYTES_PER_S
        with record_function("zero_partition::reduce"):
            while not all(buffers.done() for buffers in oldest):
                if time.perf_counter() > deadline:
                    return
                os.sched_yield()
        self._settle(self._posted.popleft())

    def _post(self, unit: Unit) -> None:
        with record_function("zero_partition::reduce"):
            for buffers in self.buffers[unit.index]:
                buffers.post()
        unit.is_posted = True
        self._posted.append(unit)
        self._next += 1

    def _settle(self, unit: Unit) -> None:
        for buffers in self.buffers[unit.index]:
            buffers.settle()

    def flush(self) -> None:
        """End a backward: reduce what is left, and learn which parameters were used by whom."""
        self._on_flush()
        mine = self._used_bits()
        while True:
            reports = self._rendezvous.meet(Place.FLUSH, [0, *mine])
            lead = min(report.place for report in reports)
            if lead == Place.FLUSH:
                break
            self._on_join(lead, reports)
        self._reduce_rest(reports)

    def take_part(self, reports: Sequence[Report]) -> None:
        """Add zeros to a backward that this rank did not have."""
        self._start_accumulation()
        self._next = 0
        self._reduce_rest(reports)

    def _reduce_rest(self, reports: Sequence[Report]) -> None:
        while self._next < len(self._order.backward):
            self._post(self._units[self._order.backward[self._next]])
        while self._posted:
            self._settle(self._posted.popleft())
        self._slots.empty()
        flushing = [report for report in reports if report.place == Place.FLUSH]
        self._note_used([report.payload[1:] for report in flushing])
        for buffers in self.all_buffers:
            buffers.expose()
            buffers.show(finished=False)
        for unit in self._units:
            unit.reset()
        self.task = None

    def _used_bits(self) -> list[int]:
        words, position = [0], 0
        for unit in self._units:
            for segment, buffers in enumerate(self.buffers[unit.index]):
                for slot in range(len(buffers.segment.parameters)):
                    if position and position % _WORD == 0:
                        words.append(0)
                    if (segment, slot) in unit.arrived:
                        words[-1] |= 1 << (position % _WORD)
                    position += 1
        return words

    def _note_used(self, payloads: Sequence[Sequence[int]]) -> None:
        position = 0
        for buffers in self.all_buffers:
            for slot in range(len(buffers.segment.parameters)):
                word, bit = divmod(position, _WORD)
                if any(payload[word] >> bit & 1 for payload in payloads):
                    buffers.used.add(slot)
                position += 1

    def check_alive(self) -> None:
        """Outside backward: refuse to go on after a backward that raised half way.

        Raises:
            OrderError: Its reductions may match nothing on the other ranks.
        """
        if self.task is None:
            return
        posted = self._next > 0
        self.task, self._next = None, 0
        self._posted.clear()
        for buffers in self.all_buffers:
            buffers.abandon()
            buffers.forget()
        self._slots.empty()
        for unit in self._units:
            unit.reset()
        self.state = Accumulation.EMPTY
        if posted and self._transport.num_ranks > 1:
            raise OrderError(
                "an earlier backward() raised after some of its reductions had started; the ranks "
                "no longer match: restart from the last checkpoint"
            )

    # The accumulation.

    def finish(self, denominator: float | None) -> None:
        """Divide the sums, once: see `Zero.finish`."""
        self.check_alive()
        if self.state in (Accumulation.FINISHED, Accumulation.STEPPED):
            if denominator is None:
                return
            raise OrderError(
                "finish(denominator=...) on gradients that are divided already; call it once, "
                "after the last backward() and before clip_grad_norm_() and step()"
            )
        divisor = _check_denominator(denominator, self._transport.num_ranks)
        self._meet_to_finish(divisor)
        if self.state is Accumulation.EMPTY:
            return
        for buffers in self.all_buffers:
            buffers.dropped()
        with record_function("zero_partition::finish"):
            for buffers in self.all_buffers:
                if divisor != 0:
                    buffers.divide(divisor)
            for transfer in [t for buffers in self.all_buffers for t in buffers.gather()]:
                transfer.wait()
        for buffers in self.all_buffers:
            buffers.show(finished=True)
        self.state = Accumulation.FINISHED

    def _meet_to_finish(self, divisor: float) -> None:
        said = struct.unpack("<q", struct.pack("<d", divisor))[0]
        while True:
            reports = self._rendezvous.meet(Place.FINISH, [said, self._order.digest()])
            lead = min(report.place for report in reports)
            if lead == Place.FINISH:
                break
            if lead == Place.FLUSH:
                self.take_part(reports)
            else:
                self._on_join(lead, reports)
        self._order.adopt([report.payload[1] for report in reports])
        values = [struct.unpack("<d", struct.pack("<q", r.payload[0]))[0] for r in reports]
        if any(value != divisor for value in values):
            told = ", ".join(f"rank {rank}: {value:g}" for rank, value in enumerate(values))
            raise RanksDisagree(
                f"finish: every rank must pass the same denominator, got {told}; add the ranks' "
                "counts up first (dist.all_reduce)"
            )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.check_alive()
        for buffers in self.all_buffers:
            buffers.forget()
        self.state = Accumulation.EMPTY
        self.squares = None


def _check_denominator(denominator: float | None, num_ranks: int) -> float:
    value = float(num_ranks if denominator is None else denominator)
    if math.isnan(value) or value < 0 or math.isinf(value):
        raise ValueError(
            f"denominator must be a finite number that is not negative, got {denominator}"
        )
    return value
