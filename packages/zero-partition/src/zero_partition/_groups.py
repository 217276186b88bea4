"""What torch does not say of a process group in public."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `group` serves tensors on `device` through gloo."""
    for pair in str(dist.get_backend_config(group)).split(","):
        served, _, backend = pair.rpartition(":")
        if served in ("", device.type):
            return backend == "gloo"
    return False


def time_limit(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The group's time-out."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit
