"""How bytes move between the ranks that share a buffer.

`Wire` is what this library needs from whoever moves them; `TorchWire` is the default, on
torch.distributed alone. A wire moves bytes and sums contributions; it decides nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from zero_partition._groups import is_gloo


class Pending(Protocol):
    """A transfer under way."""

    def done(self) -> bool:
        """Whether `wait` would return at once. May be False although it would."""
        ...

    def wait(self) -> None:
        """Return when the result is in place; calling it again does nothing."""
        ...


class Wire(Protocol):
    """All-gather and reduce-scatter over a process group.

    Every rank calls the same methods in the same order with tensors of the same sizes. Tensors are
    1-D and contiguous; the caller leaves them alone until the returned handle has been waited on.
    """

    def all_gather(self, out: Tensor, shard: Tensor, *, group: dist.ProcessGroup) -> Pending:
        """Put rank r's `shard` at ``out[r * n : (r + 1) * n]`` on every rank.

        Args:
            out: ``num_ranks * n`` elements.
            shard: n elements of the same dtype; may be this rank's own slice of `out`.
            group: The ranks taking part.
        """
        ...

    def reduce_scatter(
        self,
        out: Tensor,
        contributions: Tensor,
        *,
        group: dist.ProcessGroup,
        key: Hashable = None,
    ) -> Pending:
        """Sum slice r of every rank's `contributions` on rank r, in rank order.

        The sum is taken in the dtype of `out`, which is at least as wide.

        Args:
            out: n elements; may be this rank's own slice of `contributions`.
            contributions: ``num_ranks * n`` elements.
            group: The ranks taking part.
            key: Names the buffer, the same in every step and on every rank: a wire that keeps
                something from step to step keeps it by this name.
        """
        ...


@runtime_checkable
class OpeningWire(Wire, Protocol):
    """A wire that has something to set up before the first transfer."""

    def open(self, group: dist.ProcessGroup) -> None:
        """Set up what transfers over `group` need (collective)."""
        ...


@runtime_checkable
class LossyWire(Wire, Protocol):
    """A wire whose gathers may deliver other values than were sent, the same on every rank.

    Attributes:
        lossy_gathers: Whether they do.
        exact: The wire for whatever must arrive as it is: checkpoints, edits, sums of gradients.
    """

    @property
    def exact(self) -> Wire:
        """See the class."""
        ...

    @property
    def lossy_gathers(self) -> bool:
        """See the class."""
        ...


@runtime_checkable
class FrozenWire(Wire, Protocol):
    """A wire that moves parameters which are not trained in a way of their own."""

    @property
    def frozen(self) -> Wire:
        """The wire for them; a `NodesWire` where this one is, which opens, lets go and counts."""
        ...


@runtime_checkable
class NodesWire(OpeningWire, Protocol):
    """A wire over nodes of several ranks, which can repeat a gather within each node.

    A gather brings every slice to each node once. Kept there, divided among the node's ranks, what
    it brought is a *secondary shard*: gathered again, it gives the same values and nothing crosses.
    """

    def spread_over(self, num_local: int) -> None:
        """Take the ranks of every group as ``node * num_local + local``."""
        ...

    def all_gather(
        self, out: Tensor, shard: Tensor, *, group: dist.ProcessGroup, keep: Hashable = None
    ) -> Pending:
        """See `Wire.all_gather`; what crosses is kept under the name `keep`, if there is one."""
        ...

    def all_gather_kept(self, out: Tensor, *, group: dist.ProcessGroup, key: Hashable) -> Pending:
        """Fill `out` as the last gather did that kept its messages under the name `key`."""
        ...

    def forget_kept(self, *, group: dist.ProcessGroup) -> None:
        """Let go of everything that is kept of a group's gathers."""
        ...

    def kept_bytes(self, *, group: dist.ProcessGroup) -> int:
        """Bytes that are kept of a group's gathers on this rank."""
        ...


@runtime_checkable
class SharingWire(OpeningWire, Protocol):
    """A wire between ranks that share memory."""

    def shared_buffer(
        self, numel: int, dtype: torch.dtype, *, group: dist.ProcessGroup
    ) -> Tensor | None:
        """Memory that all ranks of `group` see, 1-D and zero, or None (collective)."""
        ...

    def exposed_buffer(
        self, numel: int, dtype: torch.dtype, *, group: dist.ProcessGroup
    ) -> Tensor | None:
        """Memory of this rank that the others can read, 1-D and zero, or None (collective).

        A buffer that the caller fills and hands to transfers; those need no copy of it then.
        """
        ...


@runtime_checkable
class KeepingWire(OpeningWire, Protocol):
    """A wire that keeps something for later transfers, such as what its messages have lost.

    It goes into checkpoints: a training that goes on is then the training that was not interrupted.
    """

    def state_dict(self, *, group: dist.ProcessGroup) -> Mapping[str, Tensor]:
        """What this rank keeps of transfers over `group`: 1-D tensors by name."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor], *, group: dist.ProcessGroup) -> None:
        """Go on from the `state_dict` of the rank of the same number; an empty one begins anew."""
        ...


class TorchWire:
    """The wire for any backend: torch.distributed's own transports.

    On gloo, whose built-in all-gather and reduce-scatter are slow (and whose reduce-scatter sums in
    an order of its own), gathers go point to point and reductions are an all-to-all followed by a
    sum in rank order: the same bits for every layout. Other backends use their native collectives;
    16-bit contributions travel as they are and are summed in the wider dtype of the result.

    Error bound:
        None on gloo. On backends with a native reduce-scatter (NCCL) the order of a same-dtype sum
        is theirs: ``|error| <= (num_ranks - 1) * eps * sum(|contribution|)`` per element.
    """

    def all_gather(self, out: Tensor, shard: Tensor, *, group: dist.ProcessGroup) -> Pending:
        """See `Wire.all_gather`."""
        out, shard = out.view(torch.uint8), shard.view(torch.uint8)
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        rows = out.view(num_ranks, -1)
        if rows[rank].data_ptr() != shard.data_ptr():
            rows[rank].copy_(shard)
        if not is_gloo(group, out.device):
            work = _native_all_gather(out, rows[rank].clone(), group=group, async_op=True)
            return _Works([work])
        peers = [(rank + step) % num_ranks for step in range(1, num_ranks)]
        works: list[dist.Work | None] = [
            dist.irecv(rows[peer], group=group, group_src=peer) for peer in peers
        ]
        works += [dist.isend(rows[rank], group=group, group_dst=peer) for peer in reversed(peers)]
        return _Works(works)

    def reduce_scatter(
        self,
        out: Tensor,
        contributions: Tensor,
        *,
        group: dist.ProcessGroup,
        key: Hashable = None,  # noqa: ARG002  nothing is kept
    ) -> Pending:
        """See `Wire.reduce_scatter`."""
        num_ranks = dist.get_world_size(group)
        if not is_gloo(group, out.device) and out.dtype == contributions.dtype:
            work = _native_reduce_scatter(out, contributions, group=group, async_op=True)
            return _Works([work])
        if num_ranks == 2:
            return _exchange_halves(out, contributions, group)
        arrived = torch.empty_like(contributions)
        work = dist.all_to_all_single(arrived, contributions, group=group, async_op=True)
        rows = arrived.view(num_ranks, -1)
        return _Works([work], lambda: sum_rows(out, rows))


def _exchange_halves(out: Tensor, contributions: Tensor, group: dist.ProcessGroup) -> _Works:
    """Reduce over two ranks: only what the other one needs travels, and nothing is copied."""
    rank = dist.get_rank(group)
    halves = contributions.view(2, -1)
    arrived = torch.empty_like(halves[rank])
    splits = [0, 0]
    splits[1 - rank] = arrived.numel()
    work = dist.all_to_all_single(
        arrived, halves[1 - rank], splits, splits, group=group, async_op=True
    )
    rows = [halves[0], arrived] if rank == 0 else [arrived, halves[1]]
    return _Works([work], lambda: sum_rows(out, rows))


def sum_rows(out: Tensor, rows: Sequence[Tensor] | Tensor) -> None:
    """``out = rows[0] + rows[1] + ...`` from left to right, in the dtype of `out`.

    `out` may be one of the first two rows where the dtypes are the same.
    """
    if len(rows) > 1 and rows[0].dtype == out.dtype:
        torch.add(rows[0], rows[1], out=out)
        rest = rows[2:]
    else:
        out.copy_(rows[0])
        rest = rows[1:]
    for row in rest:
        out.add_(row)


class _Works:
    """Some works and what to do once they are over."""

    def __init__(
        self, works: list[dist.Work | None], after: Callable[[], None] | None = None
    ) -> None:
        self._works: list[dist.Work] | None = [work for work in works if work is not None]
        self._after = after

    def done(self) -> bool:
        return self._works is None or all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        if self._works is None:
            return
        for work in self._works:
            work.wait()
        self._works = None
        if self._after is not None:
            self._after()
            self._after = None


# torch 2.13 renames the two collectives and warns about the old names.
_NAMES = vars(dist)
_native_all_gather: Callable[..., dist.Work] = (
    _NAMES["all_gather_single"]
    if "all_gather_single" in _NAMES
    else _NAMES["all_gather_into_tensor"]
)
_native_reduce_scatter: Callable[..., dist.Work] = (
    _NAMES["reduce_scatter_single"]
    if "reduce_scatter_single" in _NAMES
    else _NAMES["reduce_scatter_tensor"]
)
