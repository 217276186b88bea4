"""Joins the ranks a launcher has started, or makes a group of this process alone."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from plait._devices import num_accelerators, rank_device

__all__ = ["init_distributed", "local_rank", "own_device"]

_DEFAULT_PORT = 29500
_FROM_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def init_distributed(
    dist_backend: str | None = None,
    *,
    distributed_port: int | None = None,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise torch.distributed unless that has been done (collective).

    The ranks are those of the launcher (``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``, as torchrun
    and DeepSpeed's launcher set them); without one, this process alone.

    Args:
        dist_backend: torch's name of a backend; default: NCCL (or what else the accelerator has)
            on accelerators, gloo on CPUs.
        distributed_port: Port of the first rank, where the launcher has not set ``MASTER_PORT``.
        timeout: Longest wait for the other ranks; default: torch's.
        init_method: A URL that torch understands, in place of the launcher's variables.
        rank: This rank, with `init_method`.
        world_size: Number of ranks, with `init_method`.

    Raises:
        ValueError: The launcher's variables are not numbers, or torch refuses the arguments.
    """
    if dist.is_initialized():
        return
    device = rank_device("auto", local_rank())
    backend = dist_backend or dist.get_default_backend_for_device(device)
    if init_method is not None:
        dist.init_process_group(
            backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
        )
    elif all(name in os.environ for name in _FROM_LAUNCHER):
        port = int(os.environ.get("MASTER_PORT", distributed_port or _DEFAULT_PORT))
        first, ranks = os.environ["MASTER_ADDR"], int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            backend,
            init_method=f"tcp://{first}:{port}" if "MASTER_PORT" not in os.environ else "env://",
            timeout=timeout,
            rank=int(os.environ["RANK"]),
            world_size=ranks,
        )
    else:
        dist.init_process_group(backend, store=HashStore(), timeout=timeout, rank=0, world_size=1)


def local_rank(given: int | None = None) -> int:
    """This process's number on its machine: the launcher's, or `given`, or counted by devices."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if given is not None and given >= 0:
        return given
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    return rank % max(1, num_accelerators("auto"))


def own_device(number: int) -> torch.device:
    """Where this rank computes: on the CPU where the ranks talk over gloo alone."""
    return rank_device("cpu" if dist.get_backend() == "gloo" else "auto", number)
