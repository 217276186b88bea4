"""What ``plait doctor`` looks at, as plain values: gathered in one place, judged in another.

A group of facts that could not be gathered is `Unreadable`, which is a finding of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

__all__ = [
    "Backends",
    "Cores",
    "Device",
    "Devices",
    "Disk",
    "Facts",
    "Files",
    "Kernels",
    "Library",
    "Memory",
    "SelfTest",
    "SharedMemory",
    "Step",
    "System",
    "Unreadable",
    "gathered",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Facts that could not be gathered, and why."""

    error: str


def gathered(look: Callable[[], _T]) -> _T | Unreadable:
    """What `look` returns, or the error it raised: a broken machine is what a doctor expects."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001  # whatever it is, it becomes a finding
        return Unreadable(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """The interpreter and what it runs on; `python` and `machine` as `platform` names them."""

    python: str
    system: str
    release: str
    machine: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cores:
    """Cores this process may run on.

    Attributes:
        num_present: In the machine.
        num_usable: Those that the affinity of this process allows.
        quota: Cores' worth of time that a control group allows; None without a limit.
        omp_num_threads: The environment variable; None if it is not set.
        flags: What the processor can do, as Linux names it; empty elsewhere.
    """

    num_present: int
    num_usable: int
    quota: float | None
    omp_num_threads: str | None
    flags: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Host memory; `available_bytes` is None where the system does not say.

    `limit_bytes` is the smallest limit of a control group around this process, `limit_free_bytes`
    what is left of it; None without one.
    """

    total_bytes: int
    available_bytes: int | None
    limit_bytes: int | None
    limit_free_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemory:
    """The folder of shared memory; `error` says why a file in it cannot be written, or is empty."""

    path: str
    exists: bool
    total_bytes: int
    free_bytes: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """Where runs are written.

    Attributes:
        folder: The working folder.
        total_bytes: Of its file system.
        free_bytes: For this user.
        error: Why a file there cannot be written; empty if it can.
        direct_error: Why direct I/O does not work there; empty if it does.
    """

    folder: str
    total_bytes: int
    free_bytes: int
    error: str
    direct_error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """How many files a process may have open; None is no limit."""

    soft_limit: int | None
    hard_limit: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """One library that plait needs or can use.

    Attributes:
        name: Of the distribution.
        minimum: The oldest version that will do; empty for any.
        version: The installed one; empty if unknown, None if it is missing.
        is_needed: Whether plait does not run without it.
        gives: What it is for.
    """

    name: str
    minimum: str
    version: str | None
    is_needed: bool
    gives: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """An accelerator; None is what torch does not say of its kind."""

    name: str
    total_bytes: int | None
    free_bytes: int | None
    computes_bf16: bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """Accelerators that torch can use.

    Attributes:
        kind: torch's name for them, such as ``cuda``; None without any.
        backend: The collective backend that torch would take for them; empty without any.
        devices: One by one.
        built_for: What this torch was built for: ``CUDA 12.8``, ``ROCm 6.4`` or ``CPU``.
        has_nvidia_driver: Whether the system has NVIDIA's devices, whatever torch sees.
    """

    kind: str | None
    backend: str
    devices: tuple[Device, ...]
    built_for: str
    has_nvidia_driver: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Backends:
    """torch.distributed and what it was built with."""

    is_distributed: bool
    available: frozenset[str]


class Step(StrEnum):
    """What a rank of the self-test does, in this order."""

    IMPORTED = "torch is imported"
    MET = "the ranks met at localhost"
    CONNECTED = "gloo connected them"
    ADDED = "a sum over both was right"


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """Two ranks that meet over gloo on this machine and add up a tensor.

    Attributes:
        seconds: It took, from the first rank's start.
        reached: The last thing that both ranks had done; None if nothing.
        error: What went wrong; empty if nothing did.
        interface: ``GLOO_SOCKET_IFNAME`` as the ranks had it; empty if not set.
        works_with: An interface with which a second try went well; empty without such a try.
    """

    seconds: float
    reached: Step | None
    error: str
    interface: str
    works_with: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What the codecs of messages run on: compiled CPU kernels, and CuPy for NVIDIA GPUs."""

    are_compiled: bool
    has_cupy: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything that is judged; `self_test` is None where it was not run."""

    system: System | Unreadable
    cores: Cores | Unreadable
    memory: Memory | Unreadable
    shared_memory: SharedMemory | Unreadable
    disk: Disk | Unreadable
    files: Files | Unreadable
    libraries: tuple[Library, ...] | Unreadable
    devices: Devices | Unreadable
    backends: Backends | Unreadable
    kernels: Kernels | Unreadable
    self_test: SelfTest | Unreadable | None
