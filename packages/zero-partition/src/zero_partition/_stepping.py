"""Around an optimizer's step: which pieces it gets, and how results become everyone's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from zero_partition._clipping import Clipping
from zero_partition._gathers import Gathers
from zero_partition._optimizer import ZeroOptimizer, make_optimizer
from zero_partition._probe import probe
from zero_partition._reductions import Accumulation, Reductions
from zero_partition._rendezvous import Place, Rendezvous
from zero_partition._segment import OwnPiece
from zero_partition._transport import Transport
from zero_partition._unit import Unit
from zero_partition._wire import Pending


class Stepping:
    """Owns the optimizers of a partition.

    Args:
        units: All units.
        gathers: Lets go of whole values before they become stale.
        reductions: Holds the gradients.
        clipping: Knows whether gradients are finite.
        transport: How messages travel.
        rendezvous: Where ranks meet.
        finish: Ends the accumulation if that has not been done.
    """

    def __init__(
        self,
        units: list[Unit],
        *,
        gathers: Gathers,
        reductions: Reductions,
        clipping: Clipping,
        transport: Transport,
        rendezvous: Rendezvous,
        finish: Callable[[], None],
    ) -> None:
        self._segments = [segment for unit in units for segment in unit.segments]
        self._buffers, self._reductions = reductions.all_buffers, reductions
        self._gathers, self._clipping, self._transport = gathers, clipping, transport
        self._rendezvous, self._finish = rendezvous, finish
        self.optimizers: weakref.WeakSet[ZeroOptimizer] = weakref.WeakSet()
        self._pieces: dict[nn.Parameter, list[OwnPiece]] = {}
        for segment in (buffers.segment for buffers in self._buffers):
            self._pieces |= {parameter: [] for parameter in segment.parameters}
            for piece in segment.pieces:
                self._pieces[segment.parameters[piece.slot]].append(piece)

    def make(
        self,
        cls: type[torch.optim.Optimizer],
        params: Iterable[Any] | None,
        options: Mapping[str, Any],
    ) -> ZeroOptimizer:
        """Make an optimizer; see `Zero.optimizer`."""
        if not self._buffers:
            raise ValueError("optimizer: the model has no trainable parameters")
        first = self._buffers[0].segment
        form = probe(
            cls,
            options,
            dtype=first.sum_dtype,
            device=first.device,
            sliced=first.residence.optimizer_sharded,
        )
        chosen = list(self._pieces) if params is None else list(params)
        made = make_optimizer(self, cls, chosen, form=form, options=options)
        self.optimizers.add(made)
        return made

    def made(self, optimizer: object) -> bool:
        """Whether `optimizer` is one of this partition's."""
        return any(optimizer is known for known in self.optimizers)

    def attach(self) -> None:
        """Give every piece its gradient."""
        for buffers in self._buffers:
            for piece in buffers.segment.pieces:
                piece.values.grad = buffers.piece(piece)

    def detach(self) -> None:
        """Take the pieces' gradients away."""
        for buffers in self._buffers:
            for piece in buffers.segment.pieces:
                piece.values.grad = None

    # What an optimizer asks for.

    def trainable(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """The trainable ones among `parameters`.

        Raises:
            ValueError: One of them does not belong to the partitioned model.
        """
        known = {id(p) for segment in self._segments for p in segment.parameters}
        for parameter in parameters:
            if id(parameter) not in known:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} is not one of the partitioned "
                    "model's"
                )
        return [parameter for parameter in parameters if parameter in self._pieces]

    def pieces_of(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """What this rank steps of `parameters`: 1-D views (whole shapes at stage 0)."""
        return [piece.values for p in parameters for piece in self._pieces[p]]

    def step_with(self, step: Callable[[], Any]) -> bool:
        """Step on finished gradients; see `ZeroOptimizer.step`."""
        self._finish()
        if not any(buffers.used for buffers in self._buffers):
            return False
        if self._clipping.skip_nonfinite and not self._clipping.all_finite():
            self._reductions.state = Accumulation.STEPPED
            return False
        self._gathers.release_all()
        self._gathers.forget_kept()
        for segment in self._segments:
            segment.adopt_edits()
        if any(segment.is_shared for segment in self._segments):
            self._wait_for_readers()
        step()
        self._publish()
        self._reductions.state = Accumulation.STEPPED
        return True

    def _wait_for_readers(self) -> None:
        """Let nobody be in a pass over the values that this step changes.

        Passes begin with a meeting, so the ranks know whether there was one since the last finish.
        """
        if self._rendezvous.latest not in (Place.FINISH, Place.NORM):
            self._rendezvous.meet(Place.STEP)

    def clear(self, optimizer: ZeroOptimizer, *, set_to_none: bool) -> None:
        """Forget or zero the gradients of an optimizer's parameters."""
        self._reductions.check_alive()
        self._reductions.squares = None
        chosen = {id(p) for members in optimizer.logical for p in members}
        for buffers in self._buffers:
            parameters = buffers.segment.parameters
            slots = [slot for slot, p in enumerate(parameters) if id(p) in chosen]
            if not set_to_none:
                for slot in slots:
                    buffers.zero(slot)
            elif slots:
                buffers.forget(None if len(slots) == len(parameters) else slots)
        if not set_to_none:
            return
        for piece in (p for group in optimizer.param_groups for p in group["params"]):
            piece.grad = None
        if not any(buffers.used for buffers in self._buffers):
            self._reductions.state = Accumulation.EMPTY

    def _publish(self) -> None:
        """Make stepped values the parameters' values on every rank."""
        pending: list[Pending] = []
        changed = [segment for segment in self._segments if segment.trainable]
        for segment in changed:
            segment.cast_master()
            residence = segment.residence
            if residence.optimizer_sharded and not residence.parameters_sharded:
                pending += segment.start_gather(segment.full, segment.full, self._transport)
        for transfer in pending:
            transfer.wait()
        for segment in changed:
            torch.autograd.graph.increment_version(segment.parameters)
            segment.note_versions()
