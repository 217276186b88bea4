"""`HostsWire`: the wire between hosts of several ranks each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from zero_partition._channel import Channel, Transfer
from zero_partition._host_memory import NoRegion
from zero_partition._shared_wire import SLOT_BYTES, open_channel, warn_of_gloo
from zero_partition._transfers import Exchange, Gather
from zero_partition._wire import Pending, TorchWire, sum_rows


@dataclass(frozen=True, slots=True)
class Hosts:
    """Which ranks of a group share a host. Pure.

    Attributes:
        members: Ranks of each host, in order; every rank once.
    """

    members: tuple[tuple[int, ...], ...]

    def of(self, rank: int) -> tuple[int, ...]:
        """The ranks on the host of `rank`."""
        return next(members for members in self.members if rank in members)

    def receiver(self, rank: int, host: Sequence[int]) -> int:
        """Who on another host takes a row of `rank` in for all of them."""
        return host[self.of(rank).index(rank) % len(host)]

    def held(self, rank: int) -> list[int]:
        """Whose rows `rank` has for the others of its host: its own, and those it took in."""
        here = self.of(rank)
        away = [r for host in self.members if host is not here for r in host]
        return [rank, *(r for r in away if self.receiver(r, here) == rank)]


@dataclass(eq=False, slots=True)
class _Line:
    """What goes over one group: transfers in the order in which they began.

    Attributes:
        channel: To the other ranks of this host; None where there are none.
        waiting: Second halves, within the host, that have not been begun.
    """

    channel: Channel | None
    waiting: deque[_Crossing] = field(default_factory=deque)


class HostsWire:
    """A wire for hosts of several ranks: shared memory within a host, gloo between them.

    A gather brings every row into each host once and hands it on there through shared memory. In a
    reduction a rank's contributions travel to the ranks that sum them, through memory or gloo: sums
    of whole hosts would be another order of additions. Same bits as `TorchWire`.

    Args:
        hosts: Which ranks share a host, in every group it is used for.
        slot_bytes: See `SharedMemoryWire`.
    """

    def __init__(self, hosts: Hosts, *, slot_bytes: int = SLOT_BYTES) -> None:
        self._hosts, self._slot_bytes = hosts, slot_bytes
        self._lines: dict[dist.ProcessGroup, _Line | None] = {}
        self._elsewhere = TorchWire()

    def open(self, group: dist.ProcessGroup) -> None:
        """See `SharingWire.open`.

        Raises:
            ValueError: `hosts` does not list the ranks of the group, each once.
        """
        if group in self._lines:
            return
        listed = sorted(rank for members in self._hosts.members for rank in members)
        if listed != list(range(dist.get_world_size(group))):
            raise ValueError(
                f"hosts: expected each rank of 0 to {dist.get_world_size(group) - 1} once, got "
                f"{self._hosts.members}"
            )
        here = self._hosts.of(dist.get_rank(group))
        try:
            line = _Line(open_channel(group, here, slot_bytes=self._slot_bytes))
        except NoRegion as error:
            warn_of_gloo(group, error)
            line = None
        self._lines[group] = line

    def shared_buffer(
        self,
        numel: int,  # noqa: ARG002  a part of the protocol
        dtype: torch.dtype,  # noqa: ARG002  the same
        *,
        group: dist.ProcessGroup,  # noqa: ARG002  the same
    ) -> Tensor | None:
        """None: no memory is common to all hosts."""
        return None

    exposed_buffer = shared_buffer

    def all_gather(self, out: Tensor, shard: Tensor, *, group: dist.ProcessGroup) -> Pending:
        """See `Wire.all_gather`."""
        line = self._line(out, group)
        if line is None:
            return self._elsewhere.all_gather(out, shard, group=group)
        rank, hosts = dist.get_rank(group), self._hosts
        rows = out.view(torch.uint8).view(dist.get_world_size(group), -1).unbind()
        own, here = shard.view(torch.uint8), hosts.of(rank)
        if rows[rank].data_ptr() != own.data_ptr():
            rows[rank].copy_(own)
        works = [
            dist.irecv(rows[other], group=group, group_src=other)
            for other in hosts.held(rank)
            if other != rank
        ]
        for host in hosts.members:
            if host is not here:
                to = hosts.receiver(rank, host)
                works.append(dist.isend(rows[rank], group=group, group_dst=to))

        def within(channel: Channel) -> list[Transfer]:
            held = [hosts.held(member) for member in here]
            nothing = rows[rank][:0]
            return [
                Gather(channel, [rows[h[i]] if i < len(h) else nothing for h in held])
                for i in range(max(map(len, held)))
            ]

        return _Crossing(line, works, within)

    def reduce_scatter(
        self,
        out: Tensor,
        contributions: Tensor,
        *,
        group: dist.ProcessGroup,
        key: Hashable = None,  # noqa: ARG002  nothing is kept
    ) -> Pending:
        """See `Wire.reduce_scatter`."""
        line = self._line(out, group)
        if line is None:
            return self._elsewhere.reduce_scatter(out, contributions, group=group)
        rank, here = dist.get_rank(group), self._hosts.of(dist.get_rank(group))
        given = contributions.view(dist.get_world_size(group), -1)
        arrived = torch.empty_like(given)
        works: list[dist.Work | None] = []
        for other in (r for r in range(len(given)) if r not in here):
            came, gone = arrived[other].view(torch.uint8), given[other].view(torch.uint8)
            works.append(dist.irecv(came, group=group, group_src=other))
            works.append(dist.isend(gone, group=group, group_dst=other))

        def within(channel: Channel) -> list[Transfer]:
            return [Exchange(channel, [given[r] for r in here], [arrived[r] for r in here])]

        def after() -> None:
            arrived[rank].copy_(given[rank])
            sum_rows(out, arrived)

        return _Crossing(line, works, within, after)

    def _line(self, tensor: Tensor, group: dist.ProcessGroup) -> _Line | None:
        if tensor.device.type != "cpu":
            return None
        self.open(group)
        return self._lines[group]


class _Crossing:
    """A transfer whose first half is under way between hosts; the second is within this one.

    Second halves begin in the order of the first ones, on every rank.
    """

    def __init__(
        self,
        line: _Line,
        works: Sequence[dist.Work | None],
        within: Callable[[Channel], list[Transfer]],
        after: Callable[[], None] | None = None,
    ) -> None:
        self._line, self._within, self._after = line, within, after
        self._works = [work for work in works if work is not None]
        self._is_over = False
        line.waiting.append(self)

    def done(self) -> bool:
        return self._is_over

    def wait(self) -> None:
        while not self._is_over:
            self._line.waiting.popleft()._cross()

    def _cross(self) -> None:
        for work in self._works:
            work.wait()
        if self._line.channel is not None:
            for transfer in self._within(self._line.channel):
                self._line.channel.wait(self._line.channel.start(transfer))
        if self._after is not None:
            self._after()
        self._is_over = True
