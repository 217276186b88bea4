"""`HierarchicalWire`: nodes of several ranks, each slice crossing between two nodes once."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from zero_partition._groups import is_gloo
from zero_partition._wire import Pending, TorchWire, sum_rows

Works: TypeAlias = Sequence[dist.Work]

# Both go over the same pairs of ranks, in other orders; backends without tags want two groups.
_GATHERS, _REDUCTIONS = 1, 2


@dataclass(frozen=True, slots=True)
class Nodes:
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

    def neighbours(self, rank: int) -> list[int]:
        """The other ranks of a rank's node, in order."""
        first = rank - rank % self.num_local
        return [other for other in range(first, first + self.num_local) if other != rank]

    def counterparts(self, rank: int) -> list[int]:
        """The ranks of a rank's place on the other nodes, in order."""
        return [
            r for r in range(rank % self.num_local, self.num_ranks, self.num_local) if r != rank
        ]


@dataclass(eq=False, slots=True)
class _Line:
    """What goes over one group.

    Attributes:
        nodes: Where the ranks are.
        waiting: Transfers that have not begun their second hop. They begin it in the order in which
            they began, on every rank, whichever is asked or waited for first.
        kept: What crossed to this rank, by name: a slice of each node.
    """

    nodes: Nodes
    waiting: deque[_TwoHops] = field(default_factory=deque)
    kept: dict[Hashable, Tensor] = field(default_factory=dict)


class HierarchicalWire:
    """A wire over nodes of several ranks, without codes; see `NodesWire`.

    A gather crosses between the ranks of the same place on all nodes, then goes on within the
    nodes. A reduction is that of `TorchWire`, in rank order, unless nodes are to be summed first.

    Args:
        num_local: Ranks a node, where the ranks of a group are ``node * num_local + local``; None:
            what `partition(mesh=...)` says.
        round_node_sums: Sum gradients within each node first, and send a node's sum in the type of
            the gradients: 1 / num_local of the bytes cross. A sum is then one of node sums, no
            longer of rank order, and those of other nodes are rounded once to that type.

    Raises:
        ValueError: `num_local` is no number of ranks.

    Error bound:
        Gathers: none. Reductions: none; with `round_node_sums`, half a unit in the last place of
        the gradients' type for each node's sum but the own one, and another order of additions.
    """

    def __init__(self, *, num_local: int | None = None, round_node_sums: bool = False) -> None:
        if num_local is not None and (isinstance(num_local, bool) or num_local < 1):
            raise ValueError(f"HierarchicalWire: num_local must be at least 1, got {num_local!r}")
        self._num_local, self._round_node_sums = num_local, round_node_sums
        self._lines: dict[dist.ProcessGroup, _Line] = {}
        self._in_one_hop = TorchWire()

    def spread_over(self, num_local: int) -> None:
        """See `NodesWire.spread_over`.

        Raises:
            ValueError: The wire was made for other nodes, or is in use.
        """
        if self._num_local == num_local:
            return
        if self._num_local is not None or self._lines:
            raise ValueError(
                f"HierarchicalWire: made for num_local={self._num_local}, and the mesh has nodes "
                f"of {num_local} ranks; use a wire of its own for each mesh"
            )
        self._num_local = num_local

    def open(self, group: dist.ProcessGroup) -> None:
        """See `OpeningWire.open`.

        Raises:
            ValueError: The nodes do not cover the group, or the ranks' settings differ; on all.
        """
        if group in self._lines:
            return
        num_local = 1 if self._num_local is None else self._num_local
        found = _everyones([num_local, int(self._round_node_sums)], group)
        for rank, theirs in enumerate(found):
            if theirs != found[0]:
                raise ValueError(
                    "HierarchicalWire: all ranks need the same settings; rank 0 has "
                    f"{_told(found[0])}, rank {rank} has {_told(theirs)}"
                )
        nodes = Nodes(len(found), num_local)
        if nodes.num_ranks % nodes.num_local:
            raise ValueError(
                f"HierarchicalWire: nodes of num_local={nodes.num_local} ranks do not cover a "
                f"group of {nodes.num_ranks}; choose a divisor"
            )
        self._lines[group] = _Line(nodes)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, group: dist.ProcessGroup, keep: Hashable = None
    ) -> Pending:
        """See `NodesWire.all_gather`."""
        self.open(group)
        line, rank = self._lines[group], dist.get_rank(group)
        rows = out.view(torch.uint8).view(line.nodes.num_ranks, -1)
        own = shard.view(torch.uint8)
        if rows[rank].data_ptr() != own.data_ptr():
            rows[rank].copy_(own)

        def hops() -> Iterator[Works]:
            others = line.nodes.counterparts(rank)
            yield _swap(group, [(rows[r], r) for r in others], [(rows[rank], r) for r in others])
            crossed = _column(rows, rank, line.nodes).clone()
            if keep is not None:
                line.kept[keep] = crossed
            yield from _hand_on(rows, crossed, line.nodes, group)

        return _TwoHops(hops(), line)

    def all_gather_kept(self, out: Tensor, *, group: dist.ProcessGroup, key: Hashable) -> Pending:
        """See `NodesWire.all_gather_kept`.

        Raises:
            KeyError: Nothing was kept by this name.
        """
        line, rank = self._lines[group], dist.get_rank(group)
        rows = out.view(torch.uint8).view(line.nodes.num_ranks, -1)
        crossed = line.kept[key]

        def hops() -> Iterator[Works]:
            yield ()  # nothing crosses, but its turn within the node comes in the same order
            _column(rows, rank, line.nodes).copy_(crossed)
            yield from _hand_on(rows, crossed, line.nodes, group)

        return _TwoHops(hops(), line)

    def forget_kept(self, *, group: dist.ProcessGroup) -> None:
        """See `NodesWire.forget_kept`."""
        if group in self._lines:
            self._lines[group].kept.clear()

    def kept_bytes(self, *, group: dist.ProcessGroup) -> int:
        """See `NodesWire.kept_bytes`."""
        line = self._lines.get(group)
        return 0 if line is None else sum(each.nbytes for each in line.kept.values())

    def reduce_scatter(
        self,
        out: Tensor,
        contributions: Tensor,
        *,
        group: dist.ProcessGroup,
        key: Hashable = None,
    ) -> Pending:
        """See `Wire.reduce_scatter`."""
        self.open(group)
        line = self._lines[group]
        nodes = line.nodes
        if not self._round_node_sums or 1 in (nodes.num_local, nodes.num_nodes):
            return self._in_one_hop.reduce_scatter(out, contributions, group=group, key=key)
        rank = dist.get_rank(group)

        def hops() -> Iterator[Works]:
            given = contributions.view(nodes.num_nodes, nodes.num_local, -1)
            near = {r: given[:, r % nodes.num_local].contiguous() for r in nodes.neighbours(rank)}
            arrived = {r: torch.empty_like(sent) for r, sent in near.items()}
            came = [(tensor, r) for r, tensor in arrived.items()]
            gone = [(tensor, r) for r, tensor in near.items()]
            yield _swap(group, came, gone, tag=_REDUCTIONS)
            arrived[rank] = given[:, rank % nodes.num_local]
            sums = torch.empty(arrived[rank].shape, dtype=out.dtype, device=out.device)
            sum_rows(sums, [arrived[r] for r in sorted(arrived)])
            sent = sums.to(contributions.dtype)
            others = nodes.counterparts(rank)
            far = {r: torch.empty_like(sent[0]) for r in others}
            came = [(tensor, r) for r, tensor in far.items()]
            gone = [(sent[r // nodes.num_local], r) for r in others]
            yield _swap(group, came, gone, tag=_REDUCTIONS)
            rows = {r: t.to(out.dtype) for r, t in far.items()}
            rows[rank] = sums[rank // nodes.num_local]
            sum_rows(out, [rows[r] for r in sorted(rows)])

        return _TwoHops(hops(), line)


def _everyones(numbers: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Every rank's few numbers, in rank order."""
    device = torch.device("cpu")
    if not is_gloo(group, device):
        device = torch.accelerator.current_accelerator() or device
    mine = torch.tensor(numbers, device=device)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]


def _told(settings: list[int]) -> str:
    return f"num_local={settings[0]}, round_node_sums={bool(settings[1])}"


def _hand_on(
    rows: Tensor, crossed: Tensor, nodes: Nodes, group: dist.ProcessGroup
) -> Iterator[Works]:
    """Fill the other places of all nodes from this node's ranks."""
    near = nodes.neighbours(dist.get_rank(group))
    arrived = {other: torch.empty_like(crossed) for other in near}
    yield _swap(group, [(t, r) for r, t in arrived.items()], [(crossed, r) for r in near])
    for other, part in arrived.items():
        _column(rows, other, nodes).copy_(part)


def _column(rows: Tensor, rank: int, nodes: Nodes) -> Tensor:
    """The rows of a rank's place on every node."""
    return rows.view(nodes.num_nodes, nodes.num_local, -1)[:, rank % nodes.num_local]


def _swap(
    group: dist.ProcessGroup,
    received: Sequence[tuple[Tensor, int]],
    sent: Sequence[tuple[Tensor, int]],
    *,
    tag: int = _GATHERS,
) -> Works:
    """Receive and send whole tensors, as bytes; each with the rank at the other end."""
    works = [
        dist.irecv(tensor.view(-1).view(torch.uint8), group=group, group_src=rank, tag=tag)
        for tensor, rank in received
        if tensor.numel()
    ]
    works += [
        dist.isend(tensor.view(-1).view(torch.uint8), group=group, group_dst=rank, tag=tag)
        for tensor, rank in sent
        if tensor.numel()
    ]
    return [work for work in works if work is not None]


class _TwoHops:
    """A transfer that yields the messages of a hop, then uses them.

    The first hop begins at once, and so do the first hops of later transfers; second hops begin in
    that order.
    """

    def __init__(self, hops: Iterator[Works], line: _Line) -> None:
        self._hops: Iterator[Works] | None = hops
        self._line = line
        self._is_first = True
        self._works = next(hops)
        line.waiting.append(self)

    def done(self) -> bool:
        while self._hops is not None and all(work.is_completed() for work in self._works):
            first = self._line.waiting[0] if self._is_first else self
            if first is not self:
                first.done()
                if self._line.waiting[0] is first:
                    return False
                continue
            self._go_on()
        return self._hops is None

    def wait(self) -> None:
        while self._hops is not None:
            self._go_on()

    def _go_on(self) -> None:
        while self._is_first and self._line.waiting[0] is not self:
            self._line.waiting[0]._go_on()
        for work in self._works:
            work.wait()
        assert self._hops is not None  # the callers have asked
        following = next(self._hops, None)
        if self._is_first:
            self._line.waiting.popleft()
            self._is_first = False
        if following is None:
            self._hops = None
        self._works = following or ()
