"""The ranks of a group, as one row or as nodes of several; and the groups that hops go over."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from comm_quant._transfer import Transfer


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks as a grid: rank ``node * num_local + local``. Pure.

    Attributes:
        num_ranks: All of them.
        num_local: Ranks a node.
    """

    num_ranks: int
    num_local: int

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return self.num_ranks // self.num_local

    def row(self, rank: int) -> list[int]:
        """The ranks of a rank's node, in order."""
        first = rank - rank % self.num_local
        return list(range(first, first + self.num_local))

    def column(self, rank: int) -> list[int]:
        """The ranks of a rank's place on all nodes, in order."""
        return list(range(rank % self.num_local, self.num_ranks, self.num_local))


@dataclass(frozen=True, eq=False, slots=True)
class Hops:
    """The groups of a rank's two hops.

    Attributes:
        local: The ranks of its node.
        cross: The ranks of its place on all nodes.
        line: See `Transfer`.
    """

    local: dist.ProcessGroup
    cross: dist.ProcessGroup
    line: deque[Transfer] = field(default_factory=deque)


@functools.cache  # groups are dear: threads, sockets, communicators
def make_hops(group: dist.ProcessGroup, mesh: Mesh, device: torch.device) -> Hops:
    """Make the groups of both hops, once (collective over `group`)."""
    rank, world = dist.get_rank(group), dist.get_process_group_ranks(group)
    limit = group._get_backend(device).options._timeout
    made = []
    for chosen in (mesh.row(rank), mesh.column(rank)):
        _level_group_counts(group, device)
        made.append(
            dist.new_group(
                [world[each] for each in chosen],
                timeout=limit,
                backend=str(dist.get_backend_config(group)),
                use_local_synchronization=True,
            )
        )
    return Hops(*made)


def _level_group_counts(group: dist.ProcessGroup, device: torch.device) -> None:
    """Bring the members to the same number of groups, with groups of one where some have fewer.

    torch names a group that only its members make after their ranks and the number of groups the
    process is in already; members that differ in it would wait for each other under two names.
    """
    names = dist.distributed_c10d._world.pg_names
    most = torch.tensor([len(names)], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    while len(dist.distributed_c10d._world.pg_names) < int(most):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def exchange_texts(text: str, group: dist.ProcessGroup, device: torch.device) -> Sequence[str]:
    """Every rank's short text, in rank order (collective)."""
    sent = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    lengths[dist.get_rank(group)] = len(sent)
    dist.all_reduce(lengths, group=group)
    rows = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.uint8, device=device)
    rows[dist.get_rank(group), : len(sent)] = sent
    dist.all_reduce(rows, group=group)
    return [
        bytes(row[:length].tolist()).decode()
        for row, length in zip(rows.cpu(), lengths.tolist(), strict=True)
    ]
