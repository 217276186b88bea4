"""Gathers at stage 3: one list of units a pass, the same on every rank.

A pass over the model is a *lap*. On reaching a unit, a rank first takes part in the gathers of all
units that come before it in the list and that it did not reach itself, so that ranks on different
paths still issue the same gathers in the same order; the rest of the list follows when the lap
ends. A unit that is reached again after its turn starts another lap. The list is the order of
registration and, after the first step, the order in which the units ran, if all ranks recorded the
same.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.profiler import record_function

from zero_partition._errors import OrderError
from zero_partition._order import RunOrder
from zero_partition._rendezvous import Place, Rendezvous, Report
from zero_partition._transport import Transport
from zero_partition._unit import Unit
from zero_partition._wire import Pending


class Gathers:
    """Makes units whole and lets go of them again.

    Args:
        units: All units, in registration order.
        transport: How messages travel.
        rendezvous: Where ranks meet.
        sharded: Whether parameters are sharded at all (stage 3); if not, units are always whole.
        prefetch: Whether to start the next gather of the list before it is needed.
        order: In which order units run.
        secondary: Whether backward gathers within the nodes what forward brought there.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        transport: Transport,
        rendezvous: Rendezvous,
        sharded: bool,
        prefetch: bool,
        order: RunOrder,
        secondary: bool = False,
    ) -> None:
        self._secondary, self._kept = secondary, set[int]()  # units with a secondary shard
        self._units, self._transport, self._rendezvous = units, transport, rendezvous
        self.sharded, self._prefetch = sharded, prefetch
        self._order = order
        segments = [segment for unit in units for segment in unit.segments]
        self._nothing_moves = all(s.is_shared or not s.layout.numel for s in segments)
        self.pinned = False  # inside gathered(): everything is whole and stays so
        self._place: Place | None = None
        self._list: list[int] = []
        self._cursor = 0
        self._served: set[int] = set()
        self._coming: dict[int, list[Pending]] = {}

    def need(self, unit: Unit, place: Place) -> None:
        """Make `unit` whole, for a pass of the kind `place`."""
        if not self.sharded or self.pinned:
            return
        if place is Place.BACKWARD and self.is_kept(unit) and unit.is_whole:
            return
        if place is Place.BACKWARD and self._nothing_moves:
            self._show(unit)  # what the forward's rendezvous made whole stays so until step()
            return
        if self._place is not place:
            self._enter(place)
        if unit.is_whole and unit.index in self._served:
            return
        position = self._position(unit)
        if position is None:
            self._enter(place)
            position = self._position(unit)
        if position is None:
            raise RuntimeError(f"internal: unit {unit.name!r} is not in the list of gathers")
        while self._cursor < position:
            self._pass_by()
        self._serve()

    def close(self) -> None:
        """End the lap: take part in the gathers that are left of it."""
        if self._place is None:
            return
        while self._cursor < len(self._list):
            self._pass_by()
        self._place = None

    def join(self, place: Place, reports: Sequence[Report]) -> None:
        """Take part in a whole lap that another rank has just announced in `reports`."""
        self.close()
        self._open(place, reports)
        self.close()

    def release(self, unit: Unit) -> None:
        """Let go of a unit's whole values."""
        if not self.sharded or self.pinned or not unit.is_whole:
            return
        self._served.discard(unit.index)
        if unit.index in self._coming:  # it is about to be needed again
            return
        unit.is_whole = False
        edited = [segment.names[0] for segment in unit.segments if segment.edited()]
        for segment in unit.segments:
            segment.empty()
        if edited:
            raise OrderError(
                f"a parameter of unit {unit.name!r} (near {edited[0]!r}) was changed in place "
                "while it was whole for a forward or backward; change values at stage 3 in "
                "`with zero.gathered(modify=True):`"
            )

    def release_all(self) -> None:
        """Let go of everything that is whole."""
        for unit in self._units:
            self.release(unit)

    def gather_now(self, units: Sequence[Unit], *, to_edit: bool) -> None:
        """Make units whole outside any lap; all ranks call it with the same units.

        Args:
            units: Which.
            to_edit: Whether each rank needs values of its own, to change them.
        """
        self.close()
        if not self.sharded:
            return
        if to_edit:
            self.forget_kept()
        for unit in units:
            self._start(unit, exactly=True)
            self._end(unit)
        shared = [segment for unit in units for segment in unit.segments if segment.is_shared]
        if to_edit and shared:
            for segment in shared:
                segment.lend()
            self._rendezvous.meet(Place.WHOLE)  # nobody changes what another is still copying

    def forget_kept(self) -> None:
        """Let go of secondary shards, whose values are about to be the old ones."""
        if self._kept:
            self._kept.clear()
            self._transport.forget_kept()

    # The lap.

    def _enter(self, place: Place) -> None:
        self.close()
        while True:
            reports = self._rendezvous.meet(place, self.wishes(place))
            lead = min(report.place for report in reports)
            if lead == place:
                break
            self.join(lead, reports)
        self._open(place, reports)

    def is_kept(self, unit: Unit) -> bool:
        """Whether a unit stays whole from forward to backward, which needs it at once.

        These are the model's own unit and the one that runs last.
        """
        return unit.is_root or unit.index == self._order.backward[0]

    def wishes(self, place: Place) -> list[int]:
        """What a rank says of the lap it wants: bit u set if backward lacks the kept unit u.

        A second backward over earlier graphs, for one, finds them gone.
        """
        kept = (0, self._order.backward[0])
        lacking = [not self._units[index].is_whole for index in kept]
        return [(lacking[0] | lacking[1] << 1) if place is Place.BACKWARD else 0]

    def _open(self, place: Place, reports: Sequence[Report]) -> None:
        self._place, self._cursor = place, 0
        self._served.clear()
        self._list = self._order.forward
        if place is Place.BACKWARD:
            lacking = 0
            for report in reports:
                lacking |= report.payload[0] if report.place is place else 0
            last = self._order.backward[0]
            wanted = [index for bit, index in enumerate((0, last)) if lacking >> bit & 1]
            inner = [index for index in self._order.backward if index not in (0, last)]
            self._list = [*dict.fromkeys(wanted), *inner]

    def _position(self, unit: Unit) -> int | None:
        for position in range(self._cursor, len(self._list)):
            if self._list[position] == unit.index:
                return position
        return None

    def _serve(self) -> Unit:
        """Do the gather at the cursor; start the next one."""
        index = self._list[self._cursor]
        unit = self._units[index]
        self._start(unit)
        self._cursor += 1
        if self._prefetch and self._cursor < len(self._list):
            following = self._units[self._list[self._cursor]]
            if following is not unit:
                self._start(following)
        self._end(unit)
        self._served.add(index)
        return unit

    def _pass_by(self) -> None:
        """Take part in a gather that this rank has no use for, at least now."""
        was_whole = self._units[self._list[self._cursor]].is_whole
        unit = self._serve()
        is_needed = self._place is Place.BACKWARD and unit.uses > 0
        if not was_whole and not is_needed:
            self.release(unit)

    def _start(self, unit: Unit, *, exactly: bool = False) -> None:
        if unit.index in self._coming:
            return
        with record_function("zero_partition::gather"):
            pending: list[Pending] = []
            again = self._place is Place.BACKWARD and unit.index in self._kept
            for index, segment in enumerate(unit.segments):
                if segment.is_shared:  # the rendezvous of the lap has made it whole
                    continue
                if not unit.is_whole:
                    segment.fill()
                if exactly or not self._secondary:
                    pending += segment.start_gather(
                        segment.full, segment.home(), self._transport, exactly=exactly
                    )
                    continue
                pending += segment.start_gather_with_secondary(
                    self._transport, key=(unit.index, index), again=again
                )
                self._kept.add(unit.index)
            self._coming[unit.index] = pending

    def _end(self, unit: Unit) -> None:
        with record_function("zero_partition::gather"):
            for transfer in self._coming.pop(unit.index):
                transfer.wait()
        self._show(unit)

    def _show(self, unit: Unit) -> None:
        if not unit.is_whole:
            for segment in unit.segments:
                segment.wake()
            unit.is_whole = True
