"""``plait doctor``: what is said of machines that are well and of machines that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines import (
    CORES,
    DISK,
    GIB,
    GPU,
    GPUS,
    HEALTHY,
    MEMORY,
    NO_DEVICE,
    NOT_MET,
    SHARED,
    SYSTEM,
    TORCH,
    found,
    levels,
)
from plait._doctor import Level
from plait._doctor_command import report
from plait._doctor_facts import (
    Backends,
    Device,
    Facts,
    Files,
    Kernels,
    Step,
    Unreadable,
)
from plait._doctor_parts import judge


def test_a_healthy_machine_has_nothing_to_look_at() -> None:
    assert levels(HEALTHY) == {Level.OK, Level.NOTE}


@pytest.mark.parametrize(
    ("facts", "what", "level", "value", "remedy"),
    [
        pytest.param(
            replace(HEALTHY, shared_memory=replace(SHARED, total_bytes=64 * 2**20, free_bytes=60)),
            "/dev/shm",
            Level.WARN,
            "of 64 MiB, as Docker gives",
            "--shm-size",
            id="Docker's 64 MB",
        ),
        pytest.param(
            replace(HEALTHY, shared_memory=replace(SHARED, free_bytes=2**20)),
            "/dev/shm",
            Level.WARN,
            "1 MiB free of 16.0 GiB",
            "remove what lies in /dev/shm",
            id="shared memory is full",
        ),
        pytest.param(
            replace(HEALTHY, shared_memory=replace(SHARED, exists=False)),
            "/dev/shm",
            Level.WARN,
            "does not exist",
            "mount -t tmpfs",
            id="no shared memory",
        ),
        pytest.param(
            replace(HEALTHY, shared_memory=replace(SHARED, error="Permission denied")),
            "/dev/shm",
            Level.WARN,
            "cannot be written: Permission denied",
            "chmod 1777",
            id="shared memory of somebody else",
        ),
        pytest.param(
            replace(HEALTHY, system=replace(SYSTEM, python="3.10.4")),
            "Python",
            Level.FAIL,
            "3.10.4",
            "install Python 3.11",
            id="old Python",
        ),
        pytest.param(
            replace(HEALTHY, system=replace(SYSTEM, system="Windows")),
            "system",
            Level.WARN,
            "Windows",
            "WSL",
            id="Windows",
        ),
        pytest.param(
            replace(HEALTHY, libraries=(replace(TORCH, version="2.9.1"),)),
            "torch",
            Level.FAIL,
            "2.9.1 is older than 2.11",
            "pip install --upgrade 'torch>=2.11'",
            id="old torch",
        ),
        pytest.param(
            replace(HEALTHY, libraries=(replace(TORCH, version=None),)),
            "torch",
            Level.FAIL,
            "not installed; for everything",
            "pip install 'torch>=2.11'",
            id="a needed library is missing",
        ),
        pytest.param(
            replace(HEALTHY, libraries=(replace(TORCH, version=None, is_needed=False),)),
            "torch",
            Level.NOTE,
            "not installed",
            "pip install",
            id="an optional library is missing",
        ),
        pytest.param(
            replace(HEALTHY, cores=replace(CORES, num_usable=2)),
            "cores",
            Level.WARN,
            "2 of 8",
            "taskset",
            id="affinity",
        ),
        pytest.param(
            replace(HEALTHY, cores=replace(CORES, quota=4.0)),
            "time limit",
            Level.WARN,
            "allows 4 cores' worth",
            "OMP_NUM_THREADS=2",
            id="a share of the cores' time",
        ),
        pytest.param(
            replace(HEALTHY, cores=replace(CORES, omp_num_threads="64")),
            "OMP_NUM_THREADS",
            Level.WARN,
            "64 threads a rank on 8 cores",
            "unset",
            id="more threads than cores",
        ),
        pytest.param(
            replace(HEALTHY, cores=replace(CORES, omp_num_threads="many")),
            "OMP_NUM_THREADS",
            Level.WARN,
            "'many' is not a number",
            "unset",
            id="threads that are no number",
        ),
        pytest.param(
            replace(HEALTHY, memory=replace(MEMORY, available_bytes=GIB)),
            "host memory",
            Level.WARN,
            "1.0 GiB available of 32.0 GiB",
            "end other programs",
            id="little memory",
        ),
        pytest.param(
            replace(HEALTHY, memory=replace(MEMORY, limit_bytes=4 * GIB, limit_free_bytes=GIB)),
            "memory limit",
            Level.WARN,
            "allows 4.0 GiB; 1.0 GiB are left",
            "docker run --memory",
            id="a memory limit",
        ),
        pytest.param(
            replace(HEALTHY, disk=replace(DISK, error="Read-only file system")),
            "/runs",
            Level.FAIL,
            "cannot be written: Read-only file system",
            "run.folder",
            id="a folder that is read-only",
        ),
        pytest.param(
            replace(HEALTHY, disk=replace(DISK, free_bytes=2**20)),
            "/runs",
            Level.WARN,
            "1 MiB free of 100.0 GiB",
            "make room",
            id="a full disk",
        ),
        pytest.param(
            replace(HEALTHY, disk=replace(DISK, direct_error="Invalid argument")),
            "direct I/O",
            Level.NOTE,
            "not here: Invalid argument",
            "",
            id="no direct I/O",
        ),
        pytest.param(
            replace(HEALTHY, files=Files(soft_limit=256, hard_limit=4096)),
            "open files",
            Level.WARN,
            "at most 256 (hard: 4096)",
            "ulimit -n 1024",
            id="few open files",
        ),
        pytest.param(
            replace(HEALTHY, files=Files(soft_limit=256, hard_limit=256)),
            "open files",
            Level.WARN,
            "at most 256",
            "hard limit",
            id="few open files, and no more to be had",
        ),
        pytest.param(
            replace(HEALTHY, devices=replace(NO_DEVICE, has_nvidia_driver=True)),
            "accelerators",
            Level.WARN,
            "this torch is built for CPU",
            "pytorch.org",
            id="a GPU, and torch for CPUs",
        ),
        pytest.param(
            replace(HEALTHY, devices=replace(NO_DEVICE, built_for="CUDA 12.8")),
            "accelerators",
            Level.WARN,
            "built for CUDA 12.8 and finds no device",
            "--gpus all",
            id="torch for GPUs, and none",
        ),
        pytest.param(
            replace(HEALTHY, devices=GPUS),
            "training on GPUs",
            Level.WARN,
            "no collective backend for cuda",
            "install torch",
            id="GPUs without NCCL",
        ),
        pytest.param(
            replace(
                HEALTHY, devices=replace(GPUS, devices=(GPU, replace(GPU, computes_bf16=False)))
            ),
            "bf16",
            Level.WARN,
            "no bf16 arithmetic",
            "capability 8.0",
            id="an old GPU",
        ),
        pytest.param(
            replace(HEALTHY, cores=replace(CORES, flags=frozenset())),
            "bf16",
            Level.NOTE,
            "no bf16 instructions",
            "",
            id="an old processor",
        ),
        pytest.param(
            replace(HEALTHY, system=replace(SYSTEM, machine="aarch64")),
            "shared memory between ranks",
            Level.NOTE,
            "needs an x86-64 processor, this is aarch64; ranks use gloo",
            "",
            id="ARM",
        ),
        pytest.param(
            replace(HEALTHY, system=replace(SYSTEM, system="Darwin")),
            "shared memory between ranks",
            Level.NOTE,
            "needs Linux, this is Darwin",
            "",
            id="a Mac",
        ),
        pytest.param(
            replace(
                HEALTHY,
                self_test=None,
                backends=Backends(is_distributed=False, available=frozenset()),
            ),
            "torch.distributed",
            Level.FAIL,
            "built without it",
            "install torch",
            id="no torch.distributed",
        ),
        pytest.param(
            replace(
                HEALTHY,
                self_test=None,
                backends=Backends(is_distributed=True, available=frozenset({"nccl"})),
            ),
            "gloo",
            Level.FAIL,
            "built without it",
            "install torch",
            id="no gloo",
        ),
        pytest.param(
            replace(HEALTHY, self_test=replace(NOT_MET, works_with="lo")),
            "two ranks, gloo",
            Level.FAIL,
            "connectFullMesh failed (the last that worked: the ranks met at localhost)",
            "export GLOO_SOCKET_IFNAME=lo (tried: it works",
            id="the host's name does not resolve",
        ),
        pytest.param(
            replace(HEALTHY, self_test=replace(NOT_MET, interface="eth7")),
            "two ranks, gloo",
            Level.FAIL,
            "connectFullMesh failed",
            "GLOO_SOCKET_IFNAME is eth7: unset it",
            id="a wrong interface",
        ),
        pytest.param(
            replace(HEALTHY, self_test=NOT_MET),
            "two ranks, gloo",
            Level.FAIL,
            "connectFullMesh failed",
            "export GLOO_SOCKET_IFNAME=lo, or",
            id="gloo does not connect",
        ),
        pytest.param(
            replace(HEALTHY, self_test=replace(NOT_MET, reached=Step.IMPORTED)),
            "two ranks, gloo",
            Level.FAIL,
            "torch is imported",
            "localhost must resolve",
            id="no localhost",
        ),
        pytest.param(
            replace(HEALTHY, self_test=replace(NOT_MET, reached=None)),
            "two ranks, gloo",
            Level.FAIL,
            "nothing worked",
            "import torch",
            id="torch does not start",
        ),
        pytest.param(
            replace(HEALTHY, kernels=Kernels(are_compiled=False, has_cupy=False)),
            "8- and 4-bit messages",
            Level.WARN,
            "slower than with compiled kernels",
            "install a C++ compiler",
            id="no compiled kernels",
        ),
        pytest.param(
            replace(HEALTHY, devices=GPUS, kernels=Kernels(are_compiled=True, has_cupy=False)),
            "8- and 4-bit messages",
            Level.WARN,
            "need CuPy between GPUs",
            "pip install 'comm-quant[cuda12]'",
            id="a GPU without CuPy",
        ),
        pytest.param(
            replace(HEALTHY, devices=replace(GPUS, built_for="ROCm 6.4")),
            "8- and 4-bit messages",
            Level.WARN,
            "no kernels for ROCm yet",
            "",
            id="an AMD GPU",
        ),
        pytest.param(
            replace(HEALTHY, shared_memory=Unreadable("OSError: Stale file handle")),
            "shared memory",
            Level.FAIL,
            "could not be looked at: OSError: Stale file handle",
            "",
            id="a look that raises",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_remedy(
    facts: Facts, what: str, level: Level, value: str, remedy: str
) -> None:
    finding = found(facts, what)
    assert finding.level is level
    assert value in finding.value
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    "facts",
    [
        replace(HEALTHY, self_test=NOT_MET),
        replace(HEALTHY, libraries=(replace(TORCH, version="2.10"),)),
        replace(HEALTHY, backends=Backends(is_distributed=False, available=frozenset())),
    ],
)
def test_stages_do_not_work_where_something_they_need_fails(facts: Facts) -> None:
    assert found(facts, "ZeRO stages 0 to 3").level is Level.FAIL


def test_gpus_are_listed_and_work_over_their_backend() -> None:
    backends = Backends(is_distributed=True, available=frozenset({"gloo", "nccl", "mpi"}))
    facts = replace(HEALTHY, devices=GPUS, backends=backends)
    assert levels(facts) == {Level.OK, Level.NOTE}
    assert found(facts, "cuda:1").value == "H200, 139.0 GiB free of 140.0 GiB"
    assert found(facts, "training on GPUs").value == "works, up to 2 ranks over nccl"
    assert found(facts, "bf16").value == "works on the GPUs"
    assert found(facts, "mpi").level is Level.NOTE


def test_a_device_that_does_not_tell_its_memory_is_listed_by_name() -> None:
    device = Device(name="mps", total_bytes=None, free_bytes=None, computes_bf16=None)
    devices = replace(NO_DEVICE, kind="mps", backend="gloo", devices=(device,))
    facts = replace(HEALTHY, devices=devices)
    assert found(facts, "mps:0").value == "mps"
    assert found(facts, "training on GPUs").level is Level.WARN
    assert Level.FAIL not in levels(facts)


def test_nothing_that_can_be_gathered_is_needed() -> None:
    nothing = Unreadable("RuntimeError: broken")
    facts = Facts(
        system=nothing,
        cores=nothing,
        memory=nothing,
        shared_memory=nothing,
        disk=nothing,
        files=nothing,
        libraries=nothing,
        devices=nothing,
        backends=nothing,
        kernels=nothing,
        self_test=nothing,
    )
    assert Level.FAIL in levels(facts)
    assert "RuntimeError: broken" in report(judge(facts))


def test_no_limit_at_all_is_well() -> None:
    assert found(replace(HEALTHY, files=Files(soft_limit=None, hard_limit=None)), "open files")
