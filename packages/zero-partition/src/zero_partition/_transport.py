"""The wire together with the groups it runs over; nothing travels where there is one rank."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from zero_partition._lanes import Lane, lend_lane
from zero_partition._wire import (
    FrozenWire,
    KeepingWire,
    LossyWire,
    NodesWire,
    OpeningWire,
    Pending,
    SharingWire,
    TorchWire,
    Wire,
)


class Transport:
    """Moves flat buffers between the ranks of `group`.

    Args:
        group: The ranks; None for a single process.
        device: A device whose backend decides which groups are needed.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, device: torch.device) -> None:
        self.group = group
        self.wire: Wire = TorchWire()
        self._exact: Wire = self.wire
        self._gathering: dict[bool, Wire] = {}  # by whether it is trained
        self._nodes: dict[bool, NodesWire | None] = {}
        self._take(self.wire)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.lane: Lane | None = None
        if group is not None:
            self.lane = lend_lane(group, device)
            self._gathers = self.lane.reductions
            weakref.finalize(self, _give_back, self.lane).atexit = False

    def use(self, wire: Wire) -> None:
        """Move everything over `wire` from now on, one transfer after the other (collective)."""
        self._take(wire)
        if self.lane is not None:
            self._gathers = self.lane.reductions
            self._open(self._gathers)

    def _take(self, wire: Wire) -> None:
        self.wire = wire
        self._exact = wire.exact if isinstance(wire, LossyWire) else wire
        frozen = wire.frozen if isinstance(wire, FrozenWire) else wire
        self._gathering = {True: wire, False: frozen}
        for trained, each in self._gathering.items():
            self._nodes[trained] = each if isinstance(each, NodesWire) else None

    def part_gathers(self) -> None:
        """Let gathers overlap with reductions from now on (collective)."""
        if self.lane is not None:
            self._gathers = self.lane.gathers
            self._open(self._gathers)

    def _open(self, group: dist.ProcessGroup) -> None:
        if isinstance(self.wire, OpeningWire):
            self.wire.open(group)

    def shared_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Memory that all ranks see, if there is any on `device` (collective)."""
        if self.lane is None or device.type != "cpu" or not isinstance(self.wire, SharingWire):
            return None
        return self.wire.shared_buffer(numel, dtype, group=self.lane.reductions)

    def exposed_buffer(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Memory of this rank that the others can read, if there is any (collective)."""
        if self.lane is None or device.type != "cpu" or not isinstance(self.wire, SharingWire):
            return None
        return self.wire.exposed_buffer(numel, dtype, group=self.lane.reductions)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, exactly: bool = True, trainable: bool = True
    ) -> Pending:
        """Start to fill `out` with every rank's `shard`, or what a lossy wire makes of it."""
        if self.lane is None:
            return _Copied(out, shard)
        wire = self._exact if exactly else self._gathering[trainable]
        return _InFlight(wire.all_gather(out, shard, group=self._gathers), self.lane)

    def all_gather_keeping(
        self, out: Tensor, shard: Tensor, *, key: Hashable, trainable: bool
    ) -> Pending:
        """Start to fill `out`; what crosses between nodes is kept by the name `key`."""
        nodes = self._nodes[trainable]
        if self.lane is None or nodes is None:
            return self.all_gather(out, shard, exactly=False, trainable=trainable)
        return _InFlight(nodes.all_gather(out, shard, group=self._gathers, keep=key), self.lane)

    def all_gather_kept(
        self, out: Tensor, shard: Tensor, *, key: Hashable, trainable: bool
    ) -> Pending:
        """Start to fill `out` as the last gather with this key did, within the nodes."""
        nodes = self._nodes[trainable]
        if self.lane is None or nodes is None:
            return self.all_gather(out, shard, exactly=False, trainable=trainable)
        return _InFlight(nodes.all_gather_kept(out, group=self._gathers, key=key), self.lane)

    def forget_kept(self) -> None:
        """Let go of what crossed between nodes."""
        nodes = self._nodes[True]
        if self.lane is not None and nodes is not None:
            nodes.forget_kept(group=self._gathers)

    @property
    def secondary_bytes(self) -> int:
        """Bytes of secondary shards on this rank."""
        nodes = self._nodes[True]
        if self.lane is None or nodes is None:
            return 0
        return nodes.kept_bytes(group=self._gathers)

    @property
    def keeps(self) -> bool:
        """Whether the wire may keep something for later transfers."""
        return self.lane is not None and isinstance(self.wire, KeepingWire)

    def wire_state(self) -> dict[str, Tensor]:
        """What the wire keeps on this rank for later transfers, by name, 1-D."""
        return {
            f"{name}/{part}": tensor
            for name, group, wire in self._keepers()
            for part, tensor in wire.state_dict(group=group).items()
        }

    def load_wire_state(self, state: Mapping[str, Tensor]) -> None:
        """Let the wire go on from the `wire_state` of the rank of the same number, or anew."""
        for name, group, wire in self._keepers():
            here = f"{name}/"
            parts = {n.removeprefix(here): t for n, t in state.items() if n.startswith(here)}
            wire.load_state_dict(parts, group=group)

    def _keepers(self) -> Iterator[tuple[str, dist.ProcessGroup, KeepingWire]]:
        """The wire, if it keeps something, over each of the groups that it was opened for."""
        if self.lane is not None and isinstance(self.wire, KeepingWire):
            yield "reductions", self.lane.reductions, self.wire
            if self._gathers is not self.lane.reductions:
                yield "gathers", self._gathers, self.wire

    def reduce_scatter(self, out: Tensor, contributions: Tensor, *, key: Hashable) -> Pending:
        """Start to sum this rank's slice of all ranks' `contributions` into `out`."""
        if self.lane is None:
            return _Copied(out, contributions)
        group = self.lane.reductions
        pending = self.wire.reduce_scatter(out, contributions, group=group, key=key)
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
