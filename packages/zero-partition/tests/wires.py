"""Every kind of wire, by name."""

from __future__ import annotations

import torch.distributed as dist

from zero_partition import HierarchicalWire, Hosts, HostsWire, SharedMemoryWire, TorchWire, Wire

WIRES = ("torch", "shared", "small", "hosts", "uneven hosts", "nodes")


def wire(kind: str) -> Wire:
    """A wire for the default group."""
    ranks = range(dist.get_world_size())
    match kind:
        case "torch":
            return TorchWire()
        case "shared":
            return SharedMemoryWire()
        case "small":  # every message takes many rounds
            return SharedMemoryWire(slot_bytes=192)
        case "nodes":  # of two ranks where that fits
            return HierarchicalWire(num_local=1 if len(ranks) % 2 else 2)
        case "hosts":  # their ranks alternate
            hosts = (tuple(ranks[::2]), tuple(ranks[1::2]))
        case _:
            hosts = (tuple(ranks[:1]), tuple(ranks[1:]))
    return HostsWire(Hosts(tuple(host for host in hosts if host)), slot_bytes=256)
