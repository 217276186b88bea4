"""CUDA kernels: their sources, what is built of them, and how one is launched.

A `Launch` is plain values, so that the same launch runs through CuPy here and on the CPU in the
tests (`integration/cudahost`). CuPy is imported at the first launch, never before.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

Argument: TypeAlias = (
    ctypes.c_void_p | ctypes.c_int64 | ctypes.c_int32 | ctypes.c_uint32  # what the kernels take
)

KINDS = {8: "INT8", 4: "INT4", 2: "INT2", 1: "SIGN", 43: "E4M3", 52: "E5M2"}
NUMBERS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
OPTIONS = ("-std=c++17", "--fmad=false")  # no contraction: the bits are the reference's
WARPS = 4  # of a thread block; codec.cuh has the same
NUM_THREADS = 32 * WARPS
MAX_BLOCK_NUMEL = 2**30  # the kernels count within a block in 32 bits

_FOLDER = Path(__file__).parent / "_kernels"
_INCLUDE = re.compile(r'#include "(\w+\.(?:cuh|hpp))"$')


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """One kernel of a source: the source's name, the kernel's, and the macros that choose it."""

    source: str
    kernel: str
    macros: tuple[tuple[str, str], ...]

    @property
    def options(self) -> tuple[str, ...]:
        """What the compiler is told."""
        return (*OPTIONS, *(f"-D{name}={value}" for name, value in self.macros))


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A build with its arguments, each of the size that the kernel declares."""

    build: Build
    num_thread_blocks: int
    arguments: tuple[Argument, ...]


def quantize_build(to: int, dtype: torch.dtype) -> Build:
    """Of numbers of `dtype` to codes of the kind `to`."""
    macros = (("TO", KINDS[to]), ("NUMBER", NUMBERS[dtype]))
    return Build(source="quantize", kernel="quantize", macros=macros)


def dequantize_build(kind: int, dtype: torch.dtype) -> Build:
    """Of codes to numbers of `dtype`."""
    macros = (("FROM", KINDS[kind]), ("NUMBER", NUMBERS[dtype]))
    return Build(source="dequantize", kernel="dequantize", macros=macros)


def sum_build(kind: int, to: int | None = None) -> Build:
    """Of rows of codes to their sum, or to its codes of the kind `to`."""
    source = "dequantize_sum_requantize"
    if to is None:
        return Build(source=source, kernel="dequantize_sum", macros=(("FROM", KINDS[kind]),))
    return Build(source=source, kernel=source, macros=(("FROM", KINDS[kind]), ("TO", KINDS[to])))


def all_builds() -> Iterator[Build]:
    """Everything that a launch can ask for."""
    for kind in KINDS:
        for dtype in NUMBERS:
            yield quantize_build(kind, dtype)
            yield dequantize_build(kind, dtype)
        yield sum_build(kind)
        for to in KINDS:
            yield sum_build(kind, to)


@functools.cache
def source_of(name: str) -> str:
    """A kernel's source with its headers in place: CuPy's cache does not look into headers."""
    seen: set[str] = set()

    def expand(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        lines = [f'#line 1 "{file}"']
        for number, line in enumerate((_FOLDER / file).read_text().splitlines(), start=1):
            if match := _INCLUDE.match(line):
                lines += [expand(match[1]), f'#line {number + 1} "{file}"']
            else:
                lines.append("" if line == "#pragma once" else line)
        return "\n".join(lines)

    return expand(f"{name}.cu") + "\n"


def check_block(block_numel: int) -> int:
    """A block's length, which must fit the kernels."""
    if block_numel > MAX_BLOCK_NUMEL:
        raise ValueError(
            f"comm_quant: CUDA kernels take blocks of at most {MAX_BLOCK_NUMEL} elements, got "
            f"{block_numel}"
        )
    return block_numel


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Where a tensor's numbers lie; null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def num_thread_blocks(num_warps: int) -> int:
    """Thread blocks for as many warps."""
    return -(-num_warps // WARPS)


def run(launch: Launch, device: torch.device) -> None:
    """Launch on torch's current stream of a device; returns at once."""
    cupy, numpy = _import_cupy()
    sizes: dict[type[Argument], Any] = {
        ctypes.c_void_p: numpy.uint64,
        ctypes.c_int64: numpy.int64,
        ctypes.c_int32: numpy.int32,
        ctypes.c_uint32: numpy.uint32,
    }
    arguments = tuple(sizes[type(each)](each.value or 0) for each in launch.arguments)
    stream = torch.cuda.current_stream(device)
    with cupy.cuda.Device(stream.device_index), cupy.cuda.ExternalStream(stream.cuda_stream):
        _kernel(launch.build)((launch.num_thread_blocks,), (NUM_THREADS,), arguments)


@functools.cache
def _kernel(build: Build) -> Any:
    """CuPy's kernel, which it compiles for each device that asks, and keeps on disk."""
    cupy, _ = _import_cupy()
    module = cupy.RawModule(code=source_of(build.source), options=build.options, backend="nvrtc")
    return module.get_function(build.kernel)


@functools.cache
def _import_cupy() -> tuple[Any, Any]:
    try:
        import cupy  # noqa: PLC0415  an extra, and slow to import
        import numpy as np  # noqa: PLC0415  CuPy brings it
    except ImportError as error:
        version = (torch.version.cuda or "13").partition(".")[0]
        raise ImportError(
            f"comm_quant: tensors on CUDA need CuPy; pip install 'comm-quant[cuda{version}]'"
        ) from error
    return cupy, np
