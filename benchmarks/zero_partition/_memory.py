"""What a process holds: bytes of tensors that Python can reach, and the kernel's own counts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def storages() -> dict[int, int]:
    """Bytes of every storage that a living tensor lies in, by address, each once."""
    gc.collect()
    found = {}
    for tensor in _tensors():
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def process_bytes() -> dict[str, int | None]:
    """This process's proportional set size now, and its highest resident set size."""
    return {
        "pss_bytes": _kernel_bytes(Path("/proc/self/smaps_rollup"), "Pss"),
        "peak_rss_bytes": _kernel_bytes(Path("/proc/self/status"), "VmHWM"),
    }


def _tensors() -> Iterator[Tensor]:
    with torch._C.DisableTorchFunctionSubclass():  # also parameters that refuse to be read
        for each in gc.get_objects():
            if not issubclass(type(each), Tensor):
                continue
            if _has_memory(each):
                yield each
            if each.is_leaf and each.grad is not None and _has_memory(each.grad):
                yield each.grad  # Python may not have seen it so far


def _has_memory(tensor: Tensor) -> bool:
    """Whether it is no stand-in, such as a DTensor: what that wraps is a tensor of its own."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def _kernel_bytes(path: Path, key: str) -> int | None:
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None
