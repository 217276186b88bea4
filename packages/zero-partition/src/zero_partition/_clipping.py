"""The norm of finished gradients, clipping by it, and whether they are finite at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zero_partition._norm import clip_factor, sum_of_squares
from zero_partition._reductions import Reductions
from zero_partition._rendezvous import Place, Rendezvous
from zero_partition._transport import Transport


class Clipping:
    """Works on the owned sums, so that every element counts once whatever the layout.

    Args:
        reductions: Holds the gradients.
        transport: Adds over the ranks.
        rendezvous: Where ranks meet.
        skip_nonfinite: Whether a gradient that is not finite is left alone, to skip the step.
    """

    def __init__(
        self,
        reductions: Reductions,
        *,
        transport: Transport,
        rendezvous: Rendezvous,
        skip_nonfinite: bool,
    ) -> None:
        self._reductions, self._buffers = reductions, reductions.all_buffers
        self._transport, self._rendezvous = transport, rendezvous
        self.skip_nonfinite = skip_nonfinite

    def clip(self, max_norm: float, parameters: Sequence[nn.Parameter] | None) -> Tensor:
        """Scale gradients; see `Zero.clip_grad_norm_`."""
        chosen = None if parameters is None else {id(parameter) for parameter in parameters}
        slots = [
            {
                slot
                for slot, p in enumerate(b.segment.parameters)
                if chosen is None or id(p) in chosen
            }
            for b in self._buffers
        ]
        if chosen is None:
            squares = self._squares()
        else:
            self._rendezvous.meet(Place.NORM)
            pairs = zip(self._buffers, slots, strict=True)
            squares = self._summed(
                sum_of_squares(
                    part for buffers, mine in pairs for part in buffers.owned_parts(mine)
                )
            )
        norm = squares.sqrt().float()
        if self.skip_nonfinite and not self.all_finite():
            return norm
        factor = clip_factor(max_norm, norm)
        for buffers, mine in zip(self._buffers, slots, strict=True):
            if chosen is None:
                buffers.scale(factor)
            else:
                buffers.scale_some(mine, factor)
        self._reductions.squares = None
        return norm

    def all_finite(self) -> bool:
        """Whether every gradient on every rank is finite; the same answer on all ranks."""
        if torch.isfinite(self._squares()):
            return True
        # Float64 gradients may be finite although their squares are not.
        parts = [view for buffers in self._buffers for view in buffers.owned_sums()]
        bad = torch.zeros((), dtype=torch.float64, device=self._device)
        for part in parts:
            bad += (~torch.isfinite(part)).sum()
        return self._summed(bad).item() == 0

    def _squares(self) -> Tensor:
        """Sum of squares of all gradients, a 0-d float64 tensor, equal on all ranks."""
        if self._reductions.squares is None:
            self._rendezvous.meet(Place.NORM)
            own = sum_of_squares(view for b in self._buffers for view in b.owned_sums())
            self._reductions.squares = self._summed(own)
        return self._reductions.squares

    def _summed(self, value: Tensor) -> Tensor:
        return self._transport.sum_in_rank_order(value.to(self._device))

    @property
    def _device(self) -> torch.device:
        return self._buffers[0].segment.device
