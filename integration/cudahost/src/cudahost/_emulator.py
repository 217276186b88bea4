"""A CUDA source as a library for the CPU: rewritten a little, compiled with g++, loaded."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

Order: TypeAlias = Literal["forward", "shuffled"]
ORDERS: dict[Order, int] = {"forward": 0, "shuffled": 1}

HEADER = Path(__file__).parent / "cuda_host.h"
# Several such libraries may be in one process: -fno-gnu-unique keeps their state apart.
OPTIONS = (
    *("-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-ffp-contract=off"),
    *("-fno-strict-aliasing", "-fno-gnu-unique", "-fvisibility=hidden"),
)
_DYNAMIC = re.compile(r"extern\s+__shared__\s+([\w ]+?)\s+(\w+)\s*\[\s*\]\s*;")
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(([^)]*)\)'
)


class EmulationError(Exception):
    """A source that does not compile, or a launch that does not end."""


class Emulator:
    """The kernels of one source, callable on memory of this process.

    Args:
        source: CUDA C++ whose kernels are ``extern "C" __global__ void``.
        options: Further options of the compiler: ``-DNAME=VALUE``, ``-fsanitize=address``.
        folder: Where libraries are kept; they are found again by what they were made of.

    Raises:
        EmulationError: The compiler refuses the source; its words follow.
    """

    def __init__(
        self, source: str, *, options: Sequence[str] = (), folder: Path | None = None
    ) -> None:
        text = _for_host(source)
        options = [each for each in options if not each.startswith(("--fmad", "-std"))]
        made_of = "\0".join([HEADER.read_text(), text, *OPTIONS, *options])
        name = f"cudahost-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
        target = (folder or Path(tempfile.gettempdir())) / f"{name}.so"
        if not target.exists():
            _compile(text, options, target)
        self._library = ctypes.CDLL(str(target))

    def launch(
        self,
        kernel: str,
        *,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        dynamic_bytes: int = 0,
        order: Order = "forward",
    ) -> None:
        """Run all threads of a launch.

        Args:
            kernel: Its name in the source.
            grid: Thread blocks, one to three numbers.
            block: Threads of a thread block, one to three numbers.
            arguments: ctypes values of the sizes that the kernel declares.
            dynamic_bytes: Size of the ``extern __shared__`` array.
            order: In which the threads of a block take turns.

        Raises:
            EmulationError: Some threads wait for others that never come.
        """
        kept = [ctypes.pointer(each) for each in arguments]
        addresses = (ctypes.c_void_p * len(kept))(*(ctypes.cast(p, ctypes.c_void_p) for p in kept))
        done = getattr(self._library, f"launch_{kernel}")(
            _three(grid), _three(block), ctypes.c_size_t(dynamic_bytes), addresses, ORDERS[order]
        )
        if done != 0:
            raise EmulationError(f"{kernel}: deadlock, see the lines above")


def cuda_includes() -> Path:
    """The toolkit's headers, from the wheel nvidia-cuda-runtime."""
    files = importlib.metadata.files("nvidia-cuda-runtime") or []
    (header,) = (each for each in files if each.name == "vector_types.h")
    return Path(str(header.locate())).parent


def _three(sizes: Sequence[int]) -> ctypes.Array[ctypes.c_uint]:
    return (ctypes.c_uint * 3)(*sizes, *(1,) * (3 - len(sizes)))


def _for_host(source: str) -> str:
    """Add the launchers; turn dynamic shared memory into a pointer."""
    source = _DYNAMIC.sub(r"\1* \2 = reinterpret_cast<\1*>(cuda_host::dynamic_memory);", source)
    parts = [f'#include "{HEADER}"', '#line 1 "kernel.cu"', source]
    for condition, name, declared in _kernels(source):
        types = [re.sub(r"\b\w+\s*$", "", each).strip() for each in declared if each.strip()]
        passed = ", ".join(f"*static_cast<{t}*>(a[{i}])" for i, t in enumerate(types))
        parts += [
            *condition,
            f'extern "C" __attribute__((visibility("default"))) int launch_{name}(',
            "    const unsigned* grid, const unsigned* block, size_t bytes, void** args, int order",
            ") {",
            f"    const auto kernel = [](void** a) {{ {name}({passed}); }};",
            "    return cuda_host::run(grid, block, bytes, kernel, args, order);",
            "}",
            *["#endif"] * len(condition),
        ]
    return "\n".join(parts) + "\n"


def _kernels(source: str) -> list[tuple[list[str], str, list[str]]]:
    """Each kernel's surrounding #if, its name and its arguments."""
    found = []
    for match in _KERNEL.finditer(source):
        declared = match[2].replace("__restrict__", "").split(",")
        found.append((_conditions(source[: match.start()]), match[1], declared))
    return found


def _conditions(before: str) -> list[str]:
    open_ones: list[str] = []
    for line in before.splitlines():
        word = line.split()[0] if line.startswith("#") and line.split() else ""
        if word in {"#if", "#ifdef", "#ifndef"}:
            open_ones.append(line)
        elif word == "#else":
            open_ones[-1] = _negated(open_ones[-1])
        elif word == "#endif":
            open_ones.pop()
    return open_ones


def _negated(condition: str) -> str:
    word, _, rest = condition.partition(" ")
    return {
        "#ifdef": f"#ifndef {rest}",
        "#ifndef": f"#ifdef {rest}",
        "#if": f"#if !({rest})",
    }[word]


def _compile(text: str, options: Sequence[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        path, made = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        path.write_text(text)
        command = ["g++", *OPTIONS, *options, f"-I{cuda_includes()}", str(path), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise EmulationError(f"g++ refuses the source:\n{done.stderr[-4000:]}")
        made.replace(target)  # at once: another process may want the same one
