"""Devices, collectives, and what of plait works here: the findings above those of the machine."""

from __future__ import annotations

from plait._doctor import (
    Finding,
    Judged,
    Level,
    gigabytes,
    judge_machine,
    judged,
    shared_memory_obstacle,
)
from plait._doctor_facts import (
    Backends,
    Cores,
    Devices,
    Facts,
    Kernels,
    SelfTest,
    SharedMemory,
    Step,
    System,
    Unreadable,
)

__all__ = ["judge"]

_INSTALL_TORCH = "install torch from a wheel of pytorch.org, whose builds have it"
_NOT_BUILT = (
    "offload to host memory and disk",
    "mixture of experts",
    "sparse attention",
    "pipeline stages",
)
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"})


def judge(facts: Facts) -> tuple[Finding, ...]:
    """All findings, in the order of the report."""
    found = [
        *judge_machine(facts),
        *judged("devices", facts.devices, _devices),
        *judged("collectives", facts.backends, _backends),
    ]
    if facts.self_test is not None:
        found += judged("self-test", facts.self_test, _self_test)
    trains = not any(
        each.level is Level.FAIL
        and each.group in ("system", "libraries", "collectives", "self-test")
        for each in found
    )
    found += judged("what works here", facts, lambda all_facts: _works(all_facts, trains=trains))
    return tuple(found)


def _devices(facts: Devices) -> Judged:
    if facts.kind is None:
        yield _no_device(facts)
        return
    for index, device in enumerate(facts.devices):
        said = device.name
        if device.free_bytes is not None and device.total_bytes is not None:
            said += f", {gigabytes(device.free_bytes)} free of {gigabytes(device.total_bytes)}"
        yield Level.OK, f"{facts.kind}:{index}", said, ""


def _no_device(facts: Devices) -> tuple[Level, str, str, str]:
    if facts.has_nvidia_driver and not facts.built_for.startswith("CUDA"):
        return (
            Level.WARN,
            "accelerators",
            f"an NVIDIA driver is here, but this torch is built for {facts.built_for}",
            "install torch from pytorch.org's index for your CUDA version",
        )
    if facts.built_for != "CPU":
        return (
            Level.WARN,
            "accelerators",
            f"torch is built for {facts.built_for} and finds no device",
            "nvidia-smi or rocm-smi says more; in a container: docker run --gpus all",
        )
    return Level.NOTE, "accelerators", "none; plait trains on the CPU", ""


def _backends(facts: Backends) -> Judged:
    if not facts.is_distributed:
        yield Level.FAIL, "torch.distributed", "this torch is built without it", _INSTALL_TORCH
        return
    yield Level.OK, "torch.distributed", "available", ""
    if "gloo" in facts.available:
        yield Level.OK, "gloo", "available, for CPUs", ""
    else:
        yield Level.FAIL, "gloo", "this torch is built without it", _INSTALL_TORCH
    if "nccl" in facts.available:
        yield Level.OK, "nccl", "available, for NVIDIA GPUs", ""
    else:
        yield Level.NOTE, "nccl", "not in this torch; only NVIDIA GPUs need it", ""
    others = sorted(facts.available - {"gloo", "nccl"})
    if others:
        yield Level.NOTE, ", ".join(others), "available; plait does not use it", ""


def _self_test(facts: SelfTest) -> Judged:
    what = "two ranks, gloo"
    if not facts.error:
        yield Level.OK, what, f"met and added up in {facts.seconds:.1f} s", ""
        return
    reached = (
        "nothing worked" if facts.reached is None else f"the last that worked: {facts.reached}"
    )
    yield Level.FAIL, what, f"{facts.error} ({reached})", _self_test_remedy(facts)


def _self_test_remedy(facts: SelfTest) -> str:
    if facts.works_with:
        return (
            f"export GLOO_SOCKET_IFNAME={facts.works_with} (tried: it works, on this machine "
            "alone); lasting: the host's own name must resolve, add it to /etc/hosts"
        )
    if facts.reached is None:
        return "python -c 'import torch' says more"
    if facts.reached is Step.IMPORTED:
        return "localhost must resolve (/etc/hosts), and no firewall may stand before it"
    if facts.interface:
        return f"GLOO_SOCKET_IFNAME is {facts.interface}: unset it, or name one that `ip a` lists"
    return "export GLOO_SOCKET_IFNAME=lo, or a network interface that `ip a` lists"


def _works(facts: Facts, *, trains: bool) -> Judged:
    if trains:
        yield Level.OK, "ZeRO stages 0 to 3", "work, on the CPU over gloo", ""
    else:
        yield Level.FAIL, "ZeRO stages 0 to 3", "do not work", "mend what failed above"
    if not isinstance(facts.devices, Unreadable):
        yield from _gpus(facts.devices, facts.backends)
    yield _bf16(facts.devices, facts.cores)
    if not isinstance(facts.system, Unreadable) and not isinstance(facts.shared_memory, Unreadable):
        yield _shared(facts.system, facts.shared_memory)
    if not isinstance(facts.kernels, Unreadable):
        yield _messages(facts.kernels, facts.devices)
    for name in _NOT_BUILT:
        yield Level.NOTE, name, "not built yet", ""


def _gpus(devices: Devices, backends: Backends | Unreadable) -> Judged:
    num, what = len(devices.devices), "training on GPUs"
    if devices.kind is None:
        yield Level.NOTE, what, "no GPU", ""
        return
    has_backend = isinstance(backends, Backends) and devices.backend in backends.available
    if devices.backend in ("", "gloo") or not has_backend:
        said = f"no collective backend for {devices.kind} in this torch: ranks compute on the CPU"
        yield Level.WARN, what, said, _INSTALL_TORCH if devices.kind == "cuda" else ""
    else:
        ranks = "1 rank" if num == 1 else f"up to {num} ranks"
        yield Level.OK, what, f"works, {ranks} over {devices.backend}", ""


def _bf16(devices: Devices | Unreadable, cores: Cores | Unreadable) -> tuple[Level, str, str, str]:
    what = "bf16"
    if isinstance(devices, Devices) and devices.devices:
        if all(device.computes_bf16 is not False for device in devices.devices):
            return Level.OK, what, "works on the GPUs", ""
        said = "works, but a GPU here has no bf16 arithmetic of its own and is slow at it"
        return Level.WARN, what, said, "leave bf16 off, or use a GPU of compute capability 8.0 on"
    if isinstance(cores, Cores) and cores.flags & _BF16_FLAGS:
        return Level.OK, what, "works; this processor has bf16 instructions", ""
    said = "works, but this processor has no bf16 instructions: halves memory, not time"
    return Level.NOTE, what, said, ""


def _shared(system: System, shared: SharedMemory) -> tuple[Level, str, str, str]:
    what = "shared memory between ranks"
    obstacle = shared_memory_obstacle(system, shared)
    if obstacle:
        return Level.NOTE, what, f"{obstacle}; ranks use gloo instead", ""
    return Level.OK, what, f"works, as far as {gigabytes(shared.free_bytes)} reach", ""


def _messages(kernels: Kernels, devices: Devices | Unreadable) -> tuple[Level, str, str, str]:
    what = "8- and 4-bit messages"
    if isinstance(devices, Devices) and devices.kind == "cuda" and devices.devices:
        kind, _, version = devices.built_for.partition(" ")
        if kind != "CUDA":
            return Level.WARN, what, f"no kernels for {kind} yet: leave them off", ""
        if not kernels.has_cupy:
            remedy = f"pip install 'comm-quant[cuda{version.partition('.')[0]}]'"
            return Level.WARN, what, "need CuPy between GPUs, and it is not installed", remedy
        return Level.OK, what, "work between GPUs, with CuPy", ""
    if not kernels.are_compiled:
        said = "work, 10 to 30 times slower than with compiled kernels"
        return Level.WARN, what, said, "install a C++ compiler, then comm-quant again"
    return Level.OK, what, "work, with compiled kernels", ""
