"""The process groups behind a partition, made once for a group of ranks and lent out again.

A partition needs three groups of its own: gathers and reductions may not wait for each other, and
the ranks' short reports go over a CPU backend. Groups are dear (threads, sockets, communicators),
so those of a partition that is gone are lent to the next one. Whether they are free is agreed
between the ranks: garbage is collected at different times on each.
"""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from zero_partition._groups import time_limit

_MANY = 4  # lanes from which on it is worth looking for garbage first


@dataclass(eq=False, slots=True)
class Lane:
    """The groups of one partition.

    Attributes:
        gathers: For gathers and broadcasts.
        reductions: For reductions, which overlap with gathers.
        control: For reports between the ranks, on a CPU backend.
        is_lent: Whether a partition uses it.
        is_broken: Whether messages may be left over in it; then it is never lent again.
        num_in_flight: Transfers that have been started and not waited for.
    """

    gathers: dist.ProcessGroup
    reductions: dist.ProcessGroup
    control: dist.ProcessGroup
    is_lent: bool = False
    is_broken: bool = False
    num_in_flight: int = 0

    @property
    def is_free(self) -> bool:
        """Whether this rank could lend it."""
        return not (self.is_lent or self.is_broken or self.num_in_flight)


@dataclass(eq=False, slots=True)
class _Lanes:
    meeting: dist.ProcessGroup  # where it is agreed which lane is free
    made: list[Lane] = field(default_factory=list)


def lend_lane(group: dist.ProcessGroup, device: torch.device) -> Lane:
    """Lend a lane over the ranks of `group`; all of them call this together."""
    lanes = _lanes_of(group, device)
    chosen = _free_lane(lanes)
    if chosen is None and len(lanes.made) >= _MANY:
        gc.collect()
        chosen = _free_lane(lanes)
    if chosen is None:
        chosen = Lane(
            gathers=_twin(group, device),
            reductions=_twin(group, device),
            control=_twin(group, device, backend="gloo"),
        )
        lanes.made.append(chosen)
    chosen.is_lent = True
    return chosen


def _free_lane(lanes: _Lanes) -> Lane | None:
    """The first lane that every rank has back."""
    if not lanes.made:
        return None
    free = torch.tensor([lane.is_free for lane in lanes.made], dtype=torch.uint8)
    dist.all_reduce(free, op=dist.ReduceOp.MIN, group=lanes.meeting)
    return next((lane for lane, is_free in zip(lanes.made, free, strict=True) if is_free), None)


@functools.cache
def _lanes_of(group: dist.ProcessGroup, device: torch.device) -> _Lanes:
    return _Lanes(_twin(group, device, backend="gloo"))


def _twin(
    group: dist.ProcessGroup, device: torch.device, *, backend: str | None = None
) -> dist.ProcessGroup:
    """A group of the same ranks; only they have to call this."""
    ranks = dist.get_process_group_ranks(group)
    is_world = len(ranks) == dist.get_world_size()
    if not is_world:
        _level_group_counts(group, device)
    made: dist.ProcessGroup = dist.new_group(
        ranks,
        timeout=time_limit(group, device),  # or it would be half an hour
        backend=str(dist.get_backend_config(group)) if backend is None else backend,
        use_local_synchronization=not is_world,
    )
    return made


def _level_group_counts(group: dist.ProcessGroup, device: torch.device) -> None:
    """Bring the members to the same number of groups, with groups of one where some have fewer.

    torch names a group that only its members make after their ranks and the number of groups the
    process is in already. Members that differ in it would wait for each other under two names.
    """
    names = dist.distributed_c10d._world.pg_names
    most = torch.tensor([len(names)], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    while len(names) < int(most):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        names = dist.distributed_c10d._world.pg_names
