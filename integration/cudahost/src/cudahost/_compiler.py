"""NVRTC, the compiler that CuPy uses, from its wheel: needs neither a GPU nor a driver."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STACK = re.compile(r"(\d+) bytes stack frame")


class CompileError(Exception):
    """NVRTC refuses a source; its words follow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """A kernel for one architecture, as the assembler reports it."""

    cubin: bytes
    num_registers: int
    stack_bytes: int
    spill_bytes: int


def compile_cubin(source: str, *, architecture: str, options: Sequence[str] = ()) -> Compiled:
    """Compile one source to machine code.

    Args:
        source: CUDA C++ with all its headers in place.
        architecture: As "sm_90".
        options: What CuPy is told, too.

    Returns:
        The code, and the registers, stack and spills of its greediest kernel.

    Raises:
        CompileError: The source has mistakes.
    """
    library = _nvrtc()
    program = ctypes.c_void_p()
    _check(
        library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
        ),
        "nvrtcCreateProgram",
    )
    try:
        words = [f"--gpu-architecture={architecture}", "--ptxas-options=-v", *options]
        given = (ctypes.c_char_p * len(words))(*(each.encode() for each in words))
        failed = library.nvrtcCompileProgram(program, len(words), given)
        log = _read(library, program, "ProgramLog").rstrip(b"\0").decode()
        if failed:
            raise CompileError(f"{architecture} {' '.join(options)}:\n{log}")
        cubin = _read(library, program, "CUBIN")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    spills = [sum(map(int, pair)) for pair in _SPILLS.findall(log)]
    if not spills:
        raise CompileError(f"{architecture}: the assembler reports no kernel:\n{log}")
    return Compiled(
        cubin=cubin,
        num_registers=max(map(int, _REGISTERS.findall(log))),
        stack_bytes=max(map(int, _STACK.findall(log))),
        spill_bytes=max(spills),
    )


def _read(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    room = ctypes.create_string_buffer(size.value)
    _check(getattr(library, f"nvrtcGet{what}")(program, room), what)
    return room.raw


def _check(failed: int, what: str) -> None:
    if failed:
        raise CompileError(f"{what} gives error {failed}")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    files = importlib.metadata.files("nvidia-cuda-nvrtc") or []
    paths = {each.name: Path(str(each.locate())) for each in files}
    for name in sorted(paths):
        if re.fullmatch(r"libnvrtc-builtins\.so\.[\d.]+", name):
            ctypes.CDLL(str(paths[name]), mode=ctypes.RTLD_GLOBAL)  # which it looks for by name
    (name,) = (each for each in paths if re.fullmatch(r"libnvrtc\.so\.\d+", each))
    return ctypes.CDLL(str(paths[name]))
