"""A machine that is well, and parts of others, for the tests of ``plait doctor``."""

from __future__ import annotations

from plait._doctor import Finding, Level
from plait._doctor_facts import (
    Backends,
    Cores,
    Device,
    Devices,
    Disk,
    Facts,
    Files,
    Kernels,
    Library,
    Memory,
    SelfTest,
    SharedMemory,
    Step,
    System,
)
from plait._doctor_parts import judge

GIB = 2**30

TORCH = Library(
    name="torch", minimum="2.11", version="2.13.0+cpu", is_needed=True, gives="everything"
)
SYSTEM = System(python="3.12.1", system="Linux", release="6.1", machine="x86_64")
CORES = Cores(
    num_present=8, num_usable=8, quota=None, omp_num_threads=None, flags=frozenset({"avx512_bf16"})
)
MEMORY = Memory(
    total_bytes=32 * GIB, available_bytes=30 * GIB, limit_bytes=None, limit_free_bytes=None
)
SHARED = SharedMemory(
    path="/dev/shm", exists=True, total_bytes=16 * GIB, free_bytes=16 * GIB, error=""
)
DISK = Disk(folder="/runs", total_bytes=100 * GIB, free_bytes=50 * GIB, error="", direct_error="")
NO_DEVICE = Devices(kind=None, backend="", devices=(), built_for="CPU", has_nvidia_driver=False)
GPU = Device(name="H200", total_bytes=140 * GIB, free_bytes=139 * GIB, computes_bf16=True)
GPUS = Devices(
    kind="cuda",
    backend="nccl",
    devices=(GPU, GPU),
    built_for="CUDA 12.8",
    has_nvidia_driver=True,
)
MET = SelfTest(seconds=1.2, reached=Step.ADDED, error="", interface="", works_with="")
NOT_MET = SelfTest(
    seconds=15.0,
    reached=Step.MET,
    error="RuntimeError: Gloo connectFullMesh failed",
    interface="",
    works_with="",
)
HEALTHY = Facts(
    system=SYSTEM,
    cores=CORES,
    memory=MEMORY,
    shared_memory=SHARED,
    disk=DISK,
    files=Files(soft_limit=1024, hard_limit=None),
    libraries=(TORCH,),
    devices=NO_DEVICE,
    backends=Backends(is_distributed=True, available=frozenset({"gloo"})),
    kernels=Kernels(are_compiled=True, has_cupy=True),
    self_test=MET,
)


def found(facts: Facts, what: str) -> Finding:
    (finding,) = [each for each in judge(facts) if each.what == what]
    return finding


def levels(facts: Facts) -> set[Level]:
    return {each.level for each in judge(facts)}
