"""Which device a rank computes on, and how much memory it takes."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = [
    "default_num_ranks",
    "memory_bytes",
    "num_accelerators",
    "rank_device",
]

DEFAULT_CPU_RANKS = 2


def num_accelerators(device: str) -> int:
    """Accelerators with a collective backend of their own; 0 when `device` is ``"cpu"``."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if device == "cpu" or found is None or dist.get_default_backend_for_device(found) == "gloo":
        return 0
    return torch.accelerator.device_count()


def default_num_ranks(device: str) -> int:
    """One rank an accelerator; two on CPUs."""
    return num_accelerators(device) or DEFAULT_CPU_RANKS


def rank_device(device: str, local_rank: int) -> torch.device:
    """The device of a rank, made current."""
    if not num_accelerators(device):
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    assert found is not None  # there are some
    torch.accelerator.set_device_index(local_rank)
    return torch.device(found.type, local_rank)


def memory_bytes(device: torch.device) -> int:
    """Peak memory allocated on an accelerator; resident memory of the process on a CPU."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    try:
        statm = Path("/proc/self/statm").read_text(encoding="ascii")
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # no /proc: the peak instead
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
