"""`SharedMemoryWire`: the wire between ranks of one host."""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_partition._channel import NUM_SLOTS, Channel, Transfer, channel_bytes
from zero_partition._groups import time_limit
from zero_partition._host_memory import PAGE_BYTES, NoRegion, Region, map_region
from zero_partition._transfers import Gather, GatherInPlace, Reduction, ReductionInPlace
from zero_partition._wire import Pending, TorchWire

SLOT_BYTES = 512 * 1024
_CPU = torch.device("cpu")
_FEWEST, _MOST = 32 * 1024, 512 * 1024
_PARAMETERS_A_RING = 320


def plan_slot_bytes(parameter_bytes: int) -> int:
    """A slot size whose ring is small beside a model of so many bytes: a 320th, within bounds."""
    wanted = parameter_bytes // _PARAMETERS_A_RING // NUM_SLOTS
    return min(max(wanted // 4096 * 4096, _FEWEST), _MOST)


class SharedMemoryWire:
    """A wire for ranks of one host, several times as fast as gloo; same bits as `TorchWire`.

    Messages stream through a small ring a rank in memory that all have mapped (2 x `slot_bytes` a
    rank and group). What lies in an `exposed_buffer` is read where it is. At stage 3 the parameters
    themselves lie in a `shared_buffer`, once for all ranks: a gather then moves nothing.
    `partition` chooses this wire by itself where it fits.

    It needs Linux, x86-64, gloo, and tensors on the CPU; what lies elsewhere goes over `TorchWire`,
    and so does everything, with a warning, where `/dev/shm` is too small.

    Args:
        slot_bytes: Most bytes a rank passes on at once; a multiple of 64.

    Raises:
        ValueError: `slot_bytes` is not a positive multiple of 64.

    Error bound:
        None: sums are taken in rank order, in the dtype of the result.
    """

    def __init__(self, *, slot_bytes: int = SLOT_BYTES) -> None:
        if slot_bytes < 64 or slot_bytes % 64:
            raise ValueError(f"slot_bytes must be a positive multiple of 64, got {slot_bytes}")
        self._slot_bytes = slot_bytes
        self._channels: dict[dist.ProcessGroup, Channel | None] = {}
        self._exposed: dict[int, _Exposed] = {}  # by the address of this rank's part
        self._has_room = True
        self._elsewhere = TorchWire()

    def open(self, group: dist.ProcessGroup) -> None:
        """Map the rings of `group` (collective); the first transfer would do it otherwise."""
        if group in self._channels:
            return
        ranks = range(dist.get_world_size(group))
        try:
            channel = open_channel(group, ranks, slot_bytes=self._slot_bytes)
        except NoRegion as error:
            warn_of_gloo(group, error)
            channel = None
        self._channels[group] = channel

    def shared_buffer(
        self, numel: int, dtype: torch.dtype, *, group: dist.ProcessGroup
    ) -> Tensor | None:
        """Memory that all ranks of `group` have mapped, 1-D and zero (collective).

        Returns:
            None where there is not enough of it, with a warning on the first rank.
        """
        region = self._region(numel * dtype.itemsize, group)
        return None if region is None else region.content.view(dtype)

    def exposed_buffer(
        self, numel: int, dtype: torch.dtype, *, group: dist.ProcessGroup
    ) -> Tensor | None:
        """Memory of this rank that the others can read, 1-D and zero (collective).

        Transfers of it, or of a part of it, read it in place; all ranks must then pass the same
        part of buffers that were made in the same call.

        Returns:
            None where there is not enough of it, with a warning on the first rank.
        """
        num_bytes, rank = numel * dtype.itemsize, dist.get_rank(group)
        stride = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        region = self._region(stride * dist.get_world_size(group), group)
        if region is None:
            return None
        own = torch.frombuffer(region.memory, dtype=dtype, count=numel, offset=rank * stride)
        address = own.data_ptr()
        self._exposed[address] = _Exposed(weakref.ref(region.memory), stride)
        weakref.finalize(region.memory, self._exposed.pop, address, None)
        return own

    def _region(self, num_bytes: int, group: dist.ProcessGroup) -> Region | None:
        self.open(group)
        if not num_bytes or self._channels[group] is None or not self._has_room:
            return None
        try:
            region = map_region(num_bytes, group)
        except NoRegion as error:
            self._has_room = False  # on every rank
            _warn(group, f"buffers are copied between ranks instead of shared: {error}")
            return None
        os.close(region.file)
        return region

    def all_gather(self, out: Tensor, shard: Tensor, *, group: dist.ProcessGroup) -> Pending:
        """See `Wire.all_gather`."""
        channel = self._channel(out, group)
        if channel is None:
            return self._elsewhere.all_gather(out, shard, group=group)
        rows = out.view(torch.uint8).view(channel.num_ranks, -1)
        own = shard.view(torch.uint8)
        if rows[channel.rank].data_ptr() != own.data_ptr():
            rows[channel.rank].copy_(own)
        if (everyones := self._everyones(out.view(torch.uint8), channel)) is not None:
            theirs = [each.view_as(rows)[rank] for rank, each in enumerate(everyones)]
            return _Streamed(channel, GatherInPlace(channel, rows.unbind(), theirs))
        return _Streamed(channel, Gather(channel, rows.unbind()))

    def reduce_scatter(
        self,
        out: Tensor,
        contributions: Tensor,
        *,
        group: dist.ProcessGroup,
        key: Hashable = None,  # noqa: ARG002  nothing is kept
    ) -> Pending:
        """See `Wire.reduce_scatter`."""
        channel = self._channel(out, group)
        if channel is None:
            return self._elsewhere.reduce_scatter(out, contributions, group=group)
        rows = contributions.view(channel.num_ranks, -1)
        if (everyones := self._everyones(contributions, channel)) is not None:
            theirs = [each.view_as(rows)[channel.rank] for each in everyones]
            return _Streamed(channel, ReductionInPlace(channel, out, theirs))
        return _Streamed(channel, Reduction(channel, out, rows.unbind()))

    def _everyones(self, tensor: Tensor, channel: Channel) -> list[Tensor] | None:
        """The same part of every rank's buffer, in rank order; None if it is not exposed."""
        found = self._exposed.get(tensor.untyped_storage().data_ptr())
        memory = None if found is None else found.memory()
        if found is None or memory is None or not tensor.numel():
            return None
        begin = int(tensor.storage_offset()) * tensor.element_size()
        return [
            torch.frombuffer(
                memory,
                dtype=tensor.dtype,
                count=tensor.numel(),
                offset=rank * found.stride + begin,
            )
            for rank in range(channel.num_ranks)
        ]

    def _channel(self, tensor: Tensor, group: dist.ProcessGroup) -> Channel | None:
        if tensor.device != _CPU:
            return None
        self.open(group)
        return self._channels[group]


@dataclass(frozen=True, slots=True)
class _Exposed:
    """Where the ranks' parts of a region lie."""

    memory: weakref.ref[mmap.mmap]
    stride: int


class _Streamed:
    """A transfer in a channel."""

    def __init__(self, channel: Channel, transfer: Transfer) -> None:
        self._channel, self._transfer = channel, channel.start(transfer)

    def done(self) -> bool:
        if not self._channel.finished(self._transfer):
            self._channel.move()
        return self._channel.finished(self._transfer)

    def wait(self) -> None:
        self._channel.wait(self._transfer)


def open_channel(
    group: dist.ProcessGroup, sharing: Sequence[int], *, slot_bytes: int
) -> Channel | None:
    """A channel between some ranks of `group`, this one among them (collective over the group).

    Returns:
        None where this rank is alone.

    Raises:
        NoRegion: On every rank of the group, if any has too little memory to share.
    """
    num_ranks = len(sharing)
    slot_bytes = max(slot_bytes, 64 * (num_ranks - 1))
    region = map_region(channel_bytes(num_ranks, slot_bytes), group, sharing=sharing)
    if num_ranks == 1:
        os.close(region.file)
        return None
    return Channel(
        region,
        rank=sharing.index(dist.get_rank(group)),
        num_ranks=num_ranks,
        slot_bytes=slot_bytes,
        time_limit=time_limit(group, _CPU),
    )


def warn_of_gloo(group: dist.ProcessGroup, error: NoRegion) -> None:
    """Say on the first rank that there are no rings."""
    _warn(group, f"messages go through gloo instead of shared memory: {error}")


def _warn(group: dist.ProcessGroup, message: str) -> None:
    if dist.get_rank(group) == 0:
        warnings.warn(
            f"{message}; make /dev/shm larger (in a container: --shm-size or --ipc=host)",
            RuntimeWarning,
            stacklevel=2,
        )
