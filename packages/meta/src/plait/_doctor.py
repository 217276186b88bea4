"""What is well on a machine and what is not: facts in, findings out, nothing else.

A finding is ``ok``, a ``note`` (neither good nor bad), a ``warn`` (plait works, but less than it
could) or a ``fail`` (something of plait's does not work); what is not ok has a remedy where there
is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from plait._doctor_facts import (
    Cores,
    Disk,
    Facts,
    Files,
    Library,
    Memory,
    SharedMemory,
    System,
    Unreadable,
)

__all__ = ["Finding", "Judged", "Level", "gigabytes", "judge_machine", "judged", "version_numbers"]

MIN_PYTHON = "3.11"
MIN_MEMORY_BYTES = 2 * 2**30
MIN_SHARED_BYTES = 256 * 2**20
DOCKER_SHARED_BYTES = 64 * 2**20
MIN_DISK_BYTES = 2**30
MIN_OPEN_FILES = 1024

_SHARED_MACHINES = frozenset({"x86_64", "AMD64"})
_T = TypeVar("_T")


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    group: str
    level: Level
    what: str
    value: str
    remedy: str = ""


Judged = Iterator[tuple[Level, str, str, str]]
"""Level, what, value, remedy of the findings of one group."""


def judged(
    group: str, facts: _T | Unreadable, judge: Callable[[_T], Judged]
) -> tuple[Finding, ...]:
    """The findings of one group; one that says so where its facts could not be gathered."""
    if isinstance(facts, Unreadable):
        value = f"could not be looked at: {facts.error}"
        return (Finding(group=group, level=Level.FAIL, what=group, value=value),)
    return tuple(
        Finding(group=group, level=level, what=what, value=value, remedy=remedy)
        for level, what, value, remedy in judge(facts)
    )


def judge_machine(facts: Facts) -> tuple[Finding, ...]:
    """Everything but torch's devices and collectives."""
    return (
        *judged("system", facts.system, _system),
        *judged("libraries", facts.libraries, _libraries),
        *judged("cores", facts.cores, _cores),
        *judged("memory", facts.memory, _memory),
        *judged("shared memory", facts.shared_memory, _shared_memory),
        *judged("disk", facts.disk, _disk),
        *judged("open files", facts.files, _files),
    )


def gigabytes(num_bytes: int) -> str:
    """Bytes as a person reads them, in powers of 1024."""
    mib = num_bytes / 2**20
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    Example:
        >>> version_numbers("2.13.0+cpu") >= version_numbers("2.11")
        True
        >>> version_numbers("2.9rc1")
        (2, 9)
    """
    numbers = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if digits:
            numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _system(facts: System) -> Judged:
    enough = version_numbers(facts.python) >= version_numbers(MIN_PYTHON)
    yield (
        Level.OK if enough else Level.FAIL,
        "Python",
        f"{facts.python} (plait needs {MIN_PYTHON} or later)",
        "" if enough else f"install Python {MIN_PYTHON} or later, and plait in it",
    )
    known = facts.system in ("Linux", "Darwin")
    yield (
        Level.OK if known else Level.WARN,
        "system",
        f"{facts.system} {facts.release}, {facts.machine}",
        "" if known else "plait is tried on Linux; on Windows use WSL 2",
    )


def _libraries(found: tuple[Library, ...]) -> Judged:
    for each in found:
        wanted = f"{each.name}>={each.minimum}" if each.minimum else each.name
        if each.version is None:
            value = f"not installed; for {each.gives}"
            level = Level.FAIL if each.is_needed else Level.NOTE
            yield level, each.name, value, f"pip install '{wanted}'"
        elif not each.version:
            yield Level.OK, each.name, "importable, of unknown version: a checkout", ""
        elif version_numbers(each.version) < version_numbers(each.minimum):
            value = f"{each.version} is older than {each.minimum}"
            yield Level.FAIL, each.name, value, f"pip install --upgrade '{wanted}'"
        else:
            said = f" ({each.minimum} or later)" if each.minimum else ""
            yield Level.OK, each.name, f"{each.version}{said}", ""


def _cores(facts: Cores) -> Judged:
    value = f"{facts.num_usable} of {facts.num_present}"
    if facts.num_usable < facts.num_present:
        yield (
            Level.WARN,
            "cores",
            f"{value}: the affinity of this process leaves out the others",
            "start without taskset or a --cpuset-cpus, unless it is meant",
        )
    else:
        yield Level.OK, "cores", value, ""
    if facts.quota is not None:
        limits = facts.quota < facts.num_usable
        threads = max(1, int(facts.quota / 2))
        yield (
            Level.WARN if limits else Level.OK,
            "time limit",
            f"a control group allows {facts.quota:g} cores' worth of time",
            f"export OMP_NUM_THREADS={threads} for two ranks, or raise --cpus" if limits else "",
        )
    yield _threads(facts)


def _threads(facts: Cores) -> tuple[Level, str, str, str]:
    name, value = "OMP_NUM_THREADS", facts.omp_num_threads
    if value is None:
        return Level.OK, name, "not set: each rank of plait's takes its share of the cores", ""
    if not value.isdigit() or int(value) < 1:
        return Level.WARN, name, f"{value!r} is not a number of threads", f"unset {name}"
    if int(value) > facts.num_usable:
        said = f"{value} threads a rank on {facts.num_usable} cores"
        return Level.WARN, name, said, f"unset {name}, or set it to cores / ranks"
    return Level.OK, name, f"{value} thread{'s' * (int(value) != 1)} a rank", ""


def _memory(facts: Memory) -> Judged:
    free = facts.total_bytes if facts.available_bytes is None else facts.available_bytes
    low = free < MIN_MEMORY_BYTES
    yield (
        Level.WARN if low else Level.OK,
        "host memory",
        f"{gigabytes(free)} available of {gigabytes(facts.total_bytes)}",
        "end other programs, or train fewer ranks or a smaller model" if low else "",
    )
    if facts.limit_bytes is not None:
        left = facts.limit_bytes if facts.limit_free_bytes is None else facts.limit_free_bytes
        low = left < MIN_MEMORY_BYTES
        yield (
            Level.WARN if low else Level.OK,
            "memory limit",
            f"a control group allows {gigabytes(facts.limit_bytes)}; {gigabytes(left)} are left",
            "raise it (docker run --memory, a Kubernetes limit, systemd MemoryMax)" if low else "",
        )


def _shared_memory(facts: SharedMemory) -> Judged:
    what = facts.path
    if not facts.exists:
        yield Level.WARN, what, "does not exist", "mount -t tmpfs tmpfs /dev/shm, if this is Linux"
    elif facts.error:
        yield Level.WARN, what, f"cannot be written: {facts.error}", f"chmod 1777 {what}"
    elif facts.total_bytes <= DOCKER_SHARED_BYTES:
        said = f"{gigabytes(facts.free_bytes)} free of {gigabytes(facts.total_bytes)}"
        remedy = "docker run --shm-size=8g (or --ipc=host)"
        yield Level.WARN, what, f"{said}, as Docker gives without being asked", remedy
    elif facts.free_bytes < MIN_SHARED_BYTES:
        said = f"{gigabytes(facts.free_bytes)} free of {gigabytes(facts.total_bytes)}"
        remedy = f"remove what lies in {what}, or mount -o remount,size=8g {what}"
        yield Level.WARN, what, said, remedy
    else:
        said = f"{gigabytes(facts.free_bytes)} free of {gigabytes(facts.total_bytes)}"
        yield Level.OK, what, said, ""


def shared_memory_obstacle(system: System, shared: SharedMemory) -> str:
    """Why ranks of this machine cannot move data through shared memory; empty if they can."""
    if system.system != "Linux":
        return f"needs Linux, this is {system.system}"
    if system.machine not in _SHARED_MACHINES:
        return f"needs an x86-64 processor, this is {system.machine}"
    if not shared.exists:
        return f"there is no {shared.path}"
    if shared.error:
        return f"{shared.path} cannot be written"
    return ""


def _disk(facts: Disk) -> Judged:
    if facts.error:
        remedy = "change to a folder of yours, or say run.folder"
        yield Level.FAIL, facts.folder, f"cannot be written: {facts.error}", remedy
        return
    low = facts.free_bytes < MIN_DISK_BYTES
    yield (
        Level.WARN if low else Level.OK,
        facts.folder,
        f"{gigabytes(facts.free_bytes)} free of {gigabytes(facts.total_bytes)}",
        "make room: a checkpoint is three times the fp32 parameters with AdamW, two are kept"
        if low
        else "",
    )
    if facts.direct_error:
        yield Level.NOTE, "direct I/O", f"not here: {facts.direct_error}", ""
    else:
        yield Level.OK, "direct I/O", "works", ""


def _files(facts: Files) -> Judged:
    if facts.soft_limit is None:
        yield Level.OK, "open files", "no limit", ""
    elif facts.soft_limit < MIN_OPEN_FILES:
        highest = "unlimited" if facts.hard_limit is None else str(facts.hard_limit)
        can = facts.hard_limit is None or facts.hard_limit >= MIN_OPEN_FILES
        remedy = f"ulimit -n {MIN_OPEN_FILES}" if can else "raise the hard limit (limits.conf)"
        yield Level.WARN, "open files", f"at most {facts.soft_limit} (hard: {highest})", remedy
    else:
        yield Level.OK, "open files", f"at most {facts.soft_limit}", ""
