"""What a process holds: bytes of tensors that Python can reach, and the kernel's own counts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_MAPS = Path("/proc/self/maps")


def storages(*, num_ranks: int) -> dict[int, int]:
    """Bytes of every storage that a living tensor lies in, by address, each once.

    Memory that the ranks share counts whole, mapping by mapping, but for one part in as many as
    there are ranks: the other ranks count the rest.

    Args:
        num_ranks: Processes on this host that map what is shared.
    """
    gc.collect()
    shared = shared_ranges(_MAPS.read_text()) if _MAPS.exists() else []
    found = {}
    for tensor in _tensors():
        storage = tensor.untyped_storage()
        if storage.nbytes():
            address = storage.data_ptr()
            mapping = next((each for each in shared if address in each), None)
            if mapping is None:
                found[address] = storage.nbytes()
            else:
                found[mapping.start] = len(mapping) // num_ranks
    return found


def shared_ranges(maps: str) -> list[range]:
    r"""Addresses of the writable mappings that a process shares with others.

    Args:
        maps: What `/proc/self/maps` says.

    Example:
        >>> text = "1000-3000 rw-s 00000000 00:1b 7 /dev/shm/a\n3000-4000 rw-p 00000000 00:00 0"
        >>> shared_ranges(text)
        [range(4096, 12288)]
    """
    found = []
    for line in maps.splitlines():
        addresses, permissions, *_ = line.split()
        if permissions.startswith("rw") and permissions.endswith("s"):
            start, _, end = addresses.partition("-")
            found.append(range(int(start, 16), int(end, 16)))
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
