"""Facts about torch and what runs on it: accelerators, collective backends, kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from comm_quant import has_kernels
from plait._doctor_facts import Backends, Device, Devices, Kernels

__all__ = ["backends", "devices", "kernels"]

_NVIDIA_DEVICE = Path("/dev/nvidiactl")


def devices() -> Devices:
    """The accelerators that torch can use, one by one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    known = found is not None and dist.is_available()
    return Devices(
        kind=None if found is None else found.type,
        backend=dist.get_default_backend_for_device(found) if found is not None and known else "",
        devices=()
        if found is None
        else tuple(_device(found.type, index) for index in range(torch.accelerator.device_count())),
        built_for=_built_for(),
        has_nvidia_driver=_NVIDIA_DEVICE.exists(),
    )


def backends() -> Backends:
    """The collective backends that this torch was built with."""
    if not dist.is_available():
        return Backends(is_distributed=False, available=frozenset())
    asked: Mapping[str, Callable[[], bool]] = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
        "xccl": dist.is_xccl_available,
    }
    return Backends(
        is_distributed=True,
        available=frozenset(name for name, is_available in asked.items() if is_available()),
    )


def kernels() -> Kernels:
    """What the codecs of messages run on."""
    return Kernels(are_compiled=has_kernels(), has_cupy=find_spec("cupy") is not None)


def _device(kind: str, index: int) -> Device:
    free, total = _memory(index)
    is_cuda = kind == "cuda"
    capability = torch.cuda.get_device_capability(index) if is_cuda else None
    return Device(
        name=torch.cuda.get_device_name(index) if is_cuda else kind,
        total_bytes=total,
        free_bytes=free,
        computes_bf16=None
        if capability is None
        else torch.version.hip is not None or capability >= (8, 0),
    )


def _memory(index: int) -> tuple[int | None, int | None]:
    try:
        return torch.accelerator.get_memory_info(index)
    except RuntimeError:  # not every kind tells, Apple's does not
        return None, None


def _built_for() -> str:
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return "CPU"
