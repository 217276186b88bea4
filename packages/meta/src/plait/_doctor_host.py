"""Facts about the machine and the installation, without torch."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from plait._doctor_facts import Cores, Disk, Files, Library, Memory, SharedMemory, System

__all__ = [
    "DIRECT_BLOCK_BYTES",
    "LIBRARIES",
    "cores",
    "disk",
    "files",
    "libraries",
    "memory",
    "shared_memory",
    "system",
]

DIRECT_BLOCK_BYTES = 4096
_SHARED_MEMORY = Path("/dev/shm")
_GROUPS = Path("/sys/fs/cgroup")

LIBRARIES = (
    Library(name="torch", minimum="2.11", version=None, is_needed=True, gives="everything"),
    Library(name="zero-partition", minimum="", version=None, is_needed=True, gives="stages 0 to 3"),
    Library(
        name="comm-quant", minimum="", version=None, is_needed=True, gives="8- and 4-bit messages"
    ),
    Library(name="numpy", minimum="", version=None, is_needed=True, gives="plots"),
    Library(name="matplotlib", minimum="", version=None, is_needed=True, gives="loss.png"),
    Library(name="tqdm", minimum="", version=None, is_needed=True, gives="the progress bar"),
    Library(
        name="cupy-cuda12x",
        minimum="13.6",
        version=None,
        is_needed=False,
        gives="8- and 4-bit messages between NVIDIA GPUs, with a torch for CUDA 12",
    ),
    Library(
        name="cupy-cuda13x",
        minimum="14",
        version=None,
        is_needed=False,
        gives="8- and 4-bit messages between NVIDIA GPUs, with a torch for CUDA 13",
    ),
    Library(
        name="safetensors",
        minimum="",
        version=None,
        is_needed=False,
        gives="reading checkpoints outside plait, which needs it neither to write nor to read them",
    ),
)
"""What the packages declare, and what else is of use; `version` is filled in by `libraries`."""


def system() -> System:
    """The interpreter and the operating system."""
    return System(
        python=platform.python_version(),
        system=platform.system(),
        release=platform.release(),
        machine=platform.machine(),
    )


def cores() -> Cores:
    """Cores, what limits them, and what they can do."""
    present = os.cpu_count() or 1
    return Cores(
        num_present=present,
        num_usable=len(os.sched_getaffinity(0)) if sys.platform == "linux" else present,
        quota=_cpu_quota(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        flags=_processor_flags(),
    )


def memory() -> Memory:
    """Host memory and the limit of the control groups around this process."""
    told = _sizes(Path("/proc/meminfo"))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, free = _memory_limit(total)
    return Memory(
        total_bytes=told.get("MemTotal", total),
        available_bytes=told.get("MemAvailable"),
        limit_bytes=limit,
        limit_free_bytes=free,
    )


def shared_memory(path: Path = _SHARED_MEMORY) -> SharedMemory:
    """The folder of shared memory, and whether a file in it can be written."""
    if not path.is_dir():
        return SharedMemory(path=str(path), exists=False, total_bytes=0, free_bytes=0, error="")
    usage = shutil.disk_usage(path)
    return SharedMemory(
        path=str(path),
        exists=True,
        total_bytes=usage.total,
        free_bytes=usage.free,
        error=_write_error(path),
    )


def disk(folder: Path) -> Disk:
    """Where runs are written: room, and whether direct I/O works."""
    usage = shutil.disk_usage(folder)
    error = _write_error(folder)
    return Disk(
        folder=str(folder),
        total_bytes=usage.total,
        free_bytes=usage.free,
        error=error,
        direct_error=error or _direct_error(folder),
    )


def files() -> Files:
    """Limits on open files."""
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return Files(soft_limit=soft, hard_limit=hard)


def libraries() -> tuple[Library, ...]:
    """`LIBRARIES` with the versions that are installed."""
    return tuple(replace(each, version=_version(each.name)) for each in LIBRARIES)


def _version(name: str) -> str | None:
    """The installed version; empty for what can be imported but was never installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None if find_spec(name.replace("-", "_")) is None else ""


def _write_error(folder: Path) -> str:
    """Why no file can be written in `folder`; empty if one can."""
    try:
        with tempfile.TemporaryFile(prefix="plait-doctor-", dir=folder) as file:
            file.write(bytes(DIRECT_BLOCK_BYTES))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _direct_error(folder: Path) -> str:
    """Why a block cannot bypass the page cache; empty if it can."""
    if sys.platform != "linux":
        return "only Linux has O_DIRECT"
    handle, name = tempfile.mkstemp(prefix="plait-doctor-", dir=folder)
    os.close(handle)
    try:
        handle = os.open(name, os.O_RDWR | os.O_DIRECT)
        try:
            with mmap.mmap(-1, DIRECT_BLOCK_BYTES) as block:  # aligned to a page
                os.pwritev(handle, [block], 0)
        finally:
            os.close(handle)
    except OSError as error:
        return error.strerror or str(error)
    finally:
        Path(name).unlink(missing_ok=True)
    return ""


def _processor_flags() -> frozenset[str]:
    told = Path("/proc/cpuinfo")
    if not told.exists():
        return frozenset()
    for line in told.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def _sizes(path: Path) -> dict[str, int]:
    """Sizes that Linux tells in kB, in bytes; nothing where there is no such file."""
    if not path.exists():
        return {}
    pairs = [line.partition(":") for line in path.read_text().splitlines()]
    return {name: int(value.split()[0]) * 1024 for name, _, value in pairs if value.strip()}


def _memory_limit(total_bytes: int) -> tuple[int | None, int | None]:
    """The smallest limit of a control group, and what is left of the tightest."""
    limits = []
    for folder in _groups_of("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and limit < total_bytes:
                limits.append((limit, max(0, limit - (used or 0))))
    return (min(limits)[0], min(free for _, free in limits)) if limits else (None, None)


def _cpu_quota() -> float | None:
    """The smallest number of cores' worth of time that a control group allows."""
    quotas = []
    for folder in _groups_of("cpu"):
        if (folder / "cpu.max").exists():
            allowed, _, period = (folder / "cpu.max").read_text().strip().partition(" ")
            if allowed != "max":
                quotas.append(int(allowed) / int(period))
        microseconds = _number(folder / "cpu.cfs_quota_us")
        period_us = _number(folder / "cpu.cfs_period_us")
        if microseconds and period_us and microseconds > 0:
            quotas.append(microseconds / period_us)
    return min(quotas, default=None)


def _groups_of(controller: str) -> Iterator[Path]:
    """Folders of the control groups around this process, of both versions, innermost first."""
    told = Path("/proc/self/cgroup")
    if not told.exists():
        return
    for line in told.read_text().splitlines():
        _, controllers, inside = line.split(":", 2)
        if not controllers:
            root = _GROUPS
        elif controller in controllers.split(","):
            root = _GROUPS / controller
        else:
            continue
        place = root / inside.lstrip("/")
        yield from (each for each in (place, *place.parents) if each.is_relative_to(root))


def _number(path: Path) -> int | None:
    if not path.exists():
        return None
    text = path.read_text().strip()
    return int(text) if text.lstrip("-").isdigit() else None
