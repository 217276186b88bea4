"""The gradients of one segment: where they arrive, how they are reduced, where the sums lie.

arrivals  this rank's own gradients of the running backward, in the parameters' dtype
sums      what all ranks contributed in all backwards of this accumulation, summed

stage        arrivals                          sums
0            the buffer of the sums (*)        whole; only owned slices are valid before finish()
1            kept from step to step            the owned slices of the arrivals (*)
2, 3         until the reduction has ended     a shard
(*) 16-bit parameters have fp32 sums in a buffer of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from zero_partition._resting import ShardedGrad
from zero_partition._segment import OwnPiece, Segment
from zero_partition._slots import Slots
from zero_partition._transport import Transport
from zero_partition._wire import Pending


class GradientBuffers:
    """See the module's docstring.

    Args:
        segment: A trainable segment.
        transport: How its messages travel.
        slots: Where arrivals that are not kept come from and go to.
        key: Names the segment, the same on every rank.
    """

    def __init__(
        self, segment: Segment, transport: Transport, slots: Slots, *, key: tuple[int, ...]
    ) -> None:
        self.segment, self._key = segment, key
        self._transport, self._slots = transport, slots
        self._in_place = not segment.has_master and not segment.residence.gradients_sharded
        self._keeps_arrivals = not segment.residence.gradients_sharded and (
            self._in_place or segment.residence.optimizer_sharded
        )
        self.sums: Tensor | None = None
        self.arrivals: Tensor | None = None
        self._is_settled = False  # where the buffers lie
        self.used: set[int] = set()  # slots with a gradient from some rank in this accumulation
        self._zeroed: set[int] = set()
        self._carry: list[Tensor] = []  # in place: what earlier micro-batches left
        self._came: set[int] = set()
        self._landing: list[Tensor] = []
        self._pending: list[tuple[Pending, Tensor, Tensor | None]] = []
        self._grads = [
            ShardedGrad(parameter, name, _WHERE, self._zeroer(slot))
            for slot, (name, parameter) in enumerate(
                zip(segment.names, segment.parameters, strict=True)
            )
        ]

    # A backward: arrivals, then one reduction.

    def arrive(self, slot: int, gradient: Tensor) -> None:
        """Take a gradient of this rank; a second one for the same slot is added."""
        if not self._landing:
            self._open()
        if slot in self._came:
            self._landing[slot].add_(gradient)
        else:
            self._landing[slot].copy_(gradient)
            self._came.add(slot)

    def post(self) -> None:
        """Start the reduction of what arrived; what did not counts as zero."""
        if not self._landing:
            self._open()
        for slot, view in enumerate(self._landing):
            if slot not in self._came:
                view.zero_()
        segment, arrivals = self.segment, _held(self.arrivals)
        targets = segment.owned(arrivals if self._in_place else _held(self.sums))
        messages = zip(segment.messages(arrivals), targets, strict=True)
        for index, (message, target) in enumerate(messages):
            adding = bool(self.used) and not self._in_place
            out = torch.empty_like(target) if adding else target
            pending = self._transport.reduce_scatter(out, message, key=(*self._key, index))
            self._pending.append((pending, target, out if adding else None))

    @property
    def needs_memory(self) -> bool:
        """Whether the next arrival makes this rank lend a buffer that is not kept."""
        return not self._landing and not self._keeps_arrivals

    @property
    def message_bytes(self) -> int:
        """Bytes of all that one reduction sums."""
        return self.segment.layout.numel * self.segment.dtype.itemsize

    def done(self) -> bool:
        """Whether `settle` would not have to wait."""
        return all(pending.done() for pending, _, _ in self._pending)

    def settle(self) -> None:
        """Wait for the reduction and add it to the sums."""
        for index, (pending, target, addend) in enumerate(self._pending):
            pending.wait()
            if addend is not None:
                target.add_(addend)
            elif self._carry:
                target.add_(self._carry[index])
        self._pending.clear()
        self._came.clear()
        self._landing = []
        self._carry = []
        if self.arrivals is not None and not self._keeps_arrivals:
            self._slots.take_back(self.arrivals)
            self.arrivals = None

    def expose(self) -> None:
        """Move a buffer that is kept to where the other ranks can read it (collective).

        Called at the end of a backward: before the first one there is nothing, and within one the
        ranks cannot wait for each other.
        """
        if self._is_settled:
            return
        self._is_settled, segment = True, self.segment
        length, device = segment.layout.numel, segment.device
        if self.arrivals is not None and not self._in_place:
            exposed = self._transport.exposed_buffer(length, segment.dtype, device)
            self.arrivals = self.arrivals if exposed is None else exposed.copy_(self.arrivals)
        elif self.sums is not None and self.sums.numel() == length:
            exposed = self._transport.exposed_buffer(length, segment.sum_dtype, device)
            self.sums = self.sums if exposed is None else exposed.copy_(self.sums)
            self.arrivals = self.sums if self._in_place else self.arrivals

    def _open(self) -> None:
        segment, whole = self.segment, self.segment.layout.numel
        if self.sums is None:
            length = whole if not segment.residence.optimizer_sharded or self._in_place else None
            length = segment.layout.shard_numel if length is None else length
            self.sums = torch.zeros(length, dtype=segment.sum_dtype, device=segment.device)
        if self._in_place:
            self.arrivals = self.sums
            if self.used:
                self._carry = [view.clone() for view in segment.owned(self.sums)]
        elif self.arrivals is None:
            self.arrivals = self._slots.lend(whole, segment.dtype, segment.device)
            for start, stop in segment.layout.gaps():
                self.arrivals[start:stop].zero_()
        self._landing = segment.views(_held(self.arrivals))

    # The accumulation: end, norm, scale, forget.

    def owned_sums(self) -> list[Tensor]:
        """This rank's slices of the sums; padding is zero."""
        return [] if self.sums is None else self.segment.owned(self.sums)

    def divide(self, denominator: float) -> None:
        """Divide the owned sums, truly (not by a reciprocal, which rounds twice)."""
        for view in self.owned_sums():
            view.div_(torch.tensor(denominator, dtype=view.dtype, device=view.device))

    def gather(self) -> list[Pending]:
        """Stage 0: start to make the sums whole."""
        if self.sums is None or self.segment.residence.optimizer_sharded:
            return []
        return self.segment.start_gather(self.sums, self.sums, self._transport)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients by a 0-d tensor."""
        if self.sums is not None:
            whole = not self.segment.residence.optimizer_sharded
            for view in [self.sums] if whole else self.owned_sums():
                view.mul_(factor)

    def piece(self, piece: OwnPiece) -> Tensor | None:
        """The gradient of what this rank's optimizer steps; None if nobody used the parameter."""
        if piece.slot not in self.used or self.sums is None:
            return None
        return self.segment.piece_of(self.sums, piece)

    def owned_parts(self, slots: set[int]) -> list[Tensor]:
        """This rank's elements of some parameters' sums, each element on one rank only."""
        if self.sums is None:
            return []
        return [
            self.segment.part(self.sums, planned)
            for planned in self.segment.layout.pieces(self.segment.rank)
            if planned.slot in slots
        ]

    def scale_some(self, slots: set[int], factor: Tensor) -> None:
        """Multiply some parameters' gradients by a 0-d tensor."""
        if self.sums is not None and not self.segment.residence.optimizer_sharded:
            parts = [view for i, view in enumerate(self.segment.views(self.sums)) if i in slots]
        else:
            parts = self.owned_parts(slots)
        for part in parts:
            part.mul_(factor)

    def bytes_held(self) -> tuple[int, int, int]:
        """Bytes now held: logical gradients, their padding, and buffers that are on the way."""
        segment = self.segment
        whole = segment.layout.logical_numel
        owned = sum(piece.numel for piece in segment.layout.pieces(segment.rank))
        passing = sum(t.untyped_storage().nbytes() for t in self._carry)
        logical = padding = 0
        if self.sums is not None:
            is_whole = self._in_place or not segment.residence.optimizer_sharded
            numel = whole if is_whole else owned
            logical += numel * self.sums.element_size()
            padding += self.sums.untyped_storage().nbytes() - numel * self.sums.element_size()
        if self.arrivals is not None and not self._in_place:
            held = self.arrivals.untyped_storage().nbytes()
            if self._keeps_arrivals:
                logical += whole * self.arrivals.element_size()
                padding += held - whole * self.arrivals.element_size()
            else:
                passing += held
        return logical, padding, passing

    def whole(self) -> Tensor:
        """The sums as one whole buffer; a collective below the surface except at stage 0."""
        sums = _held(self.sums)
        if not self.segment.residence.optimizer_sharded:
            return sums
        segment = self.segment
        out = torch.empty(segment.layout.numel, dtype=segment.sum_dtype, device=segment.device)
        for transfer in segment.start_gather(out, sums, self._transport):
            transfer.wait()
        return out

    def show(self, *, finished: bool) -> None:
        """Put into ``.grad`` what the user may see: the gradient, a stand-in, or None."""
        segment = self.segment
        readable = finished and self._in_place and not segment.residence.optimizer_sharded
        views = segment.views(_held(self.sums)) if readable and self.used else self._grads
        with torch._C.DisableTorchFunctionSubclass():  # resting parameters answer faster so
            for slot, parameter in enumerate(segment.parameters):
                parameter.grad = views[slot] if slot in self.used else None

    def live(self) -> bool:
        """Whether the user has left a gradient that is not zero."""
        return any(
            self.segment.parameters[slot].grad is not None and not self._is_zeroed(slot)
            for slot in self.used
        )

    def hide(self, *, restart: bool) -> None:
        """Clear every ``.grad`` before a backward; forget what the user cleared.

        Args:
            restart: Forget the rest too, but for gradients the user set to zero in place.
        """
        parameters = self.segment.parameters
        kept = {
            slot
            for slot in self.used
            if parameters[slot].grad is not None and (not restart or self._is_zeroed(slot))
        }
        if kept:  # the next sums are added to these; otherwise they overwrite everything
            for slot in self.used - kept:
                self.zero(slot)
        self.used = kept
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                parameter.grad = None
        self._zeroed.clear()

    def _is_zeroed(self, slot: int) -> bool:
        gradient = self.segment.parameters[slot].grad
        if isinstance(gradient, ShardedGrad) or gradient is None:
            return slot in self._zeroed
        return not bool(gradient.any())

    def dropped(self) -> None:
        """Forget the gradients whose ``.grad`` the user set to None."""
        for slot in list(self.used):
            if self.segment.parameters[slot].grad is None:
                self.zero(slot)
                self.used.discard(slot)

    def zero(self, slot: int) -> None:
        """Set one parameter's sums to zero."""
        if self.sums is None:
            return
        self._zeroed.add(slot)
        if self.sums.numel() == self.segment.layout.numel:
            self.segment.views(self.sums)[slot].zero_()
            return
        for planned in self.segment.layout.pieces(self.segment.rank):
            if planned.slot == slot:
                self.sums[planned.shard_start :][: planned.numel].zero_()

    def forget(self, slots: Iterable[int] | None = None) -> None:
        """Drop gradients (all of them by default): the next ones start anew."""
        dropped = list(self.used if slots is None else slots)
        with torch._C.DisableTorchFunctionSubclass():
            for slot in dropped:
                self.segment.parameters[slot].grad = None
        for slot in dropped if slots is not None else ():
            self.zero(slot)
        self.used.difference_update(dropped)

    def abandon(self) -> None:
        """Drop a backward that died half way."""
        self._pending.clear()
        self._came.clear()
        self._landing, self._carry = [], []
        if not self._keeps_arrivals:
            self.arrivals = None

    def _zeroer(self, slot: int) -> Callable[[], None]:
        here = weakref.ref(self)  # what hangs in .grad may not keep the buffers alive

        def zero() -> None:
            if (buffers := here()) is not None:
                buffers.zero(slot)

        return zero


_WHERE = (
    "it is reduced and lies on its owners, one slice a rank; clip with zero.clip_grad_norm_(), "
    "read it with zero.gradients()"
)


def _held(buffer: Tensor | None) -> Tensor:
    assert buffer is not None  # allocated by _open
    return buffer
