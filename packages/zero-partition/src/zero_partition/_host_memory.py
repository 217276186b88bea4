"""Memory that the ranks of one host share: whether there is any, and how a piece of it is mapped.

A region is a file in `/dev/shm` that all ranks of a group have mapped. It is reserved before it is
used (an overcommitted page would end the process with SIGBUS). It never has a name, so that nothing
is left behind, however the ranks end: the others open it through the process that made it.
"""

from __future__ import annotations

import mmap
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zero_partition._exchange import exchange

FOLDER = Path("/dev/shm")
PAGE_BYTES = mmap.PAGESIZE
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")
_STRONG_STORES = frozenset({"x86_64", "AMD64", "i686"})


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The shared memory that a process sees.

    Attributes:
        identity: Equal for processes that see the same; None where there is none to use.
        reason: Why there is none.
    """

    identity: tuple[str, int, int] | None
    reason: str = ""


def this_host_memory(*, machine: str | None = None, folder: Path = FOLDER) -> HostMemory:
    """What this process could share with others.

    Args:
        machine: The processor's name; default: this one's.
        folder: Where regions would lie.
    """
    machine = platform.machine() if machine is None else machine
    if machine not in _STRONG_STORES:
        # One rank's plain stores must be seen in their order by the others.
        return HostMemory(None, f"its protocol needs the memory order of x86, this is {machine}")
    if not (folder.is_dir() and _BOOT_ID.exists()):
        return HostMemory(None, f"there is no {folder} here")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return HostMemory(None, f"{folder} is not writable")
    boot = _BOOT_ID.read_text().strip()
    return HostMemory((boot, folder.stat().st_dev, _PROCESSES.stat().st_ino))


class NoRegion(Exception):
    """A region could not be had; the message says why, the same on every rank."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Bytes that all ranks of a group have mapped; zero at first.

    Attributes:
        memory: The mapping; it lives as long as anything refers to it.
        file: The open file behind it; whoever takes the region closes it.
    """

    memory: mmap.mmap
    file: int

    @property
    def content(self) -> Tensor:
        """All of it, uint8."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)


def map_region(
    num_bytes: int,
    group: dist.ProcessGroup,
    *,
    sharing: Sequence[int] | None = None,
    folder: Path = FOLDER,
) -> Region:
    """Map a new region of `num_bytes` > 0 on every rank of `group` (collective).

    Args:
        num_bytes: Its size; may differ between hosts.
        group: The ranks.
        sharing: Those among them that map the same region as this one; default: all.
        folder: The file system that gives the memory.

    Raises:
        NoRegion: On all ranks, if any of them could not map it.
    """
    first = 0 if sharing is None else sharing[0]
    is_first = dist.get_rank(group) == first
    file, error, memory = -1, "", None
    if is_first:
        file, error = _reserved(folder, num_bytes)
    path = f"/proc/{os.getpid()}/fd/{file}"
    path, error = exchange((path, error), group)[first]
    if not error:
        file, memory, error = _mapped(path, file, folder, num_bytes)
    failed = [each for each in exchange(error, group) if each]
    if memory is None or failed:
        if file >= 0:
            os.close(file)
        raise NoRegion(failed[0])
    return Region(memory, file)


def _reserved(folder: Path, num_bytes: int) -> tuple[int, str]:
    """A new file with all its pages; or why there is none."""
    file = -1
    try:
        if num_bytes > _free_bytes(folder) // 2:  # others need some of it too
            return -1, f"{_wanted(folder, num_bytes)} is more than half of what is free there"
        file = os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR, 0o600)
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        with suppress(OSError):
            os.close(file)
        return -1, _why(error, folder, num_bytes)
    return file, ""


def _mapped(
    path: str, file: int, folder: Path, num_bytes: int
) -> tuple[int, mmap.mmap | None, str]:
    try:
        file = os.open(path, os.O_RDWR) if file < 0 else file
        return file, mmap.mmap(file, num_bytes), ""
    except (OSError, ValueError) as error:
        return file, None, _why(error, folder, num_bytes)


def _why(error: Exception, folder: Path, num_bytes: int) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{_wanted(folder, num_bytes)} could not be had: {reason}"


def _wanted(folder: Path, num_bytes: int) -> str:
    free_mib = _free_bytes(folder) / 2**20
    return f"{num_bytes / 2**20:.1f} MiB in {folder}, of which {free_mib:.1f} MiB are free,"


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
