"""Test kit: run CUDA kernels on a CPU, and compile them for GPUs that are not there."""

from cudahost._compiler import ARCHITECTURES, Compiled, CompileError, compile_cubin
from cudahost._emulator import EmulationError, Emulator, Order

__all__ = [
    "ARCHITECTURES",
    "CompileError",
    "Compiled",
    "EmulationError",
    "Emulator",
    "Order",
    "compile_cubin",
]
