"""The compiled kernels, where the package was installed with a compiler at hand."""

from __future__ import annotations

import ctypes
import functools
import warnings
from pathlib import Path

import torch  # first: the library then shares torch's OpenMP runtime and thread count

NAME = "libcomm_quant.so"
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_P, _I, _L, _U = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint32
_ARGUMENTS = {
    "comm_quant_quantize": [_P, _I, _L, _I, _L, _I, _I, _U, _P, _P],
    "comm_quant_dequantize": [_P, _P, _I, _L, _I, _L, _I, _P],
    "comm_quant_dequantize_sum_requantize": [
        *(_P, _L, _P, _L, _L, _I, _L, _I, _L, _P, _I, _L, _P),
        *(_I, _L, _I, _I, _U, _P, _P),
    ],
}


def has_kernels() -> bool:
    """Whether the package was installed with its compiled CPU kernels; never warns."""
    return _path().exists()


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The library, or None where it was not built; then this says so, once."""
    if not has_kernels():
        warnings.warn(
            "comm_quant: installed without its compiled kernels; the reference in plain torch runs "
            "instead, same bits, 10 to 30 times slower; install a C++ compiler and reinstall",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    library = ctypes.CDLL(str(_path()))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return library


def _path() -> Path:
    return Path(__file__).parent / "_kernels" / NAME


def is_native(tensor: torch.Tensor) -> bool:
    """Whether the compiled kernels take a tensor; else the reference runs, on its own device."""
    return tensor.device.type == "cpu" and native_library() is not None


def call(name: str, *arguments: object) -> None:
    """Call a function of the library that is there."""
    library = native_library()
    assert library is not None  # the caller has asked
    if getattr(library, name)(*arguments) != 0:
        raise RuntimeError(f"internal: {name} does not know one of {arguments}")
