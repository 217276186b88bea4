"""Which wire a partition uses where the caller names none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from zero_partition._exchange import exchange
from zero_partition._groups import is_gloo
from zero_partition._host_memory import HostMemory, this_host_memory
from zero_partition._hosts_wire import Hosts, HostsWire
from zero_partition._shared_wire import SharedMemoryWire, plan_slot_bytes
from zero_partition._wire import TorchWire, Wire


def choose_wire(group: dist.ProcessGroup, device: torch.device, *, parameter_bytes: int) -> Wire:
    """The fastest wire for `group` (collective).

    Args:
        group: The ranks.
        device: Where the tensors lie; other devices' backends know their own shared memory.
        parameter_bytes: Bytes of the model's parameters; buffers are small beside it.
    """
    if device.type != "cpu" or not is_gloo(group, device):
        return TorchWire()
    hosts = plan_hosts(exchange(this_host_memory(), group))
    slot_bytes = plan_slot_bytes(parameter_bytes)
    if len(hosts.members) == 1:
        return SharedMemoryWire(slot_bytes=slot_bytes)
    if all(len(members) == 1 for members in hosts.members):
        return TorchWire()
    return HostsWire(hosts, slot_bytes=slot_bytes)


def plan_hosts(found: Sequence[HostMemory]) -> Hosts:
    """Put the ranks together that see the same shared memory; who sees none is alone."""
    members: dict[object, list[int]] = {}
    for rank, memory in enumerate(found):
        key = ("alone", rank) if memory.identity is None else memory.identity
        members.setdefault(key, []).append(rank)
    return Hosts(tuple(map(tuple, members.values())))
