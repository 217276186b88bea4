"""The wire together with the groups it runs over; nothing travels where there is one rank."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from zero_partition._lanes import Lane, lend_lane
from zero_partition._wire import Pending, Wire


class Transport:
    """Moves flat buffers between the ranks of `group`.

    Args:
        wire: How.
        group: The ranks; None for a single process.
        device: A device whose backend decides which groups are needed.
    """

    def __init__(
        self, wire: Wire, group: dist.ProcessGroup | None, *, device: torch.device
    ) -> None:
        self.wire, self.group = wire, group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.lane: Lane | None = None
        if group is not None:
            self.lane = lend_lane(group, device)
            weakref.finalize(self, _give_back, self.lane).atexit = False

    def all_gather(self, out: Tensor, shard: Tensor) -> Pending:
        """Start to fill `out` with every rank's `shard`."""
        if self.lane is None:
            return _Copied(out, shard)
        return _InFlight(self.wire.all_gather(out, shard, group=self.lane.gathers), self.lane)

    def reduce_scatter(self, out: Tensor, contributions: Tensor) -> Pending:
        """Start to sum this rank's slice of all ranks' `contributions` into `out`."""
        if self.lane is None:
            return _Copied(out, contributions)
        pending = self.wire.reduce_scatter(out, contributions, group=self.lane.reductions)
        return _InFlight(pending, self.lane)

    def broadcast(self, tensor: Tensor) -> None:
        """Make rank 0's content everyone's."""
        if self.lane is not None and tensor.numel():
            flat = tensor.detach()
            plain = flat if flat.is_contiguous() else flat.contiguous()
            dist.broadcast(plain.view(-1).view(torch.uint8), group=self.lane.gathers, group_src=0)
            if plain is not flat:
                flat.copy_(plain)

    def sum_in_rank_order(self, value: Tensor) -> Tensor:
        """The sum of a 0-d float64 tensor over the ranks, added in rank order."""
        if self.lane is None:
            return value
        parts = [torch.empty_like(value) for _ in range(self.num_ranks)]
        dist.all_gather(parts, value, group=self.lane.gathers)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def _give_back(lane: Lane) -> None:
    lane.is_lent = False


class _InFlight:
    """A transfer that its lane counts until it has been waited for."""

    def __init__(self, pending: Pending, lane: Lane) -> None:
        self._pending, self._lane = pending, lane
        self._is_waited = False
        lane.num_in_flight += 1

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> None:
        self._pending.wait()
        if not self._is_waited:
            self._is_waited = True
            self._lane.num_in_flight -= 1


class _Copied:
    """The transfer of a single rank: over as soon as it began."""

    def __init__(self, out: Tensor, source: Tensor) -> None:
        if out.data_ptr() != source.data_ptr() or out.dtype != source.dtype:
            out.copy_(source)

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return
