"""The emulator runs kernels as a GPU would, and notices what a GPU would not forgive."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cudahost import EmulationError, Emulator, Order

BLOCK_SUMS = r"""
// The sum of each block of 64 numbers, in shared memory.
extern "C" __global__ void __launch_bounds__(64) block_sums(const int* x, int* sums) {
    __shared__ int kept[64];
    kept[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
#ifndef WITHOUT_BARRIER
    __syncthreads();
#endif
    if (threadIdx.x != 0) return;
    int sum = 0;
    for (int i = 0; i < 64; i++) sum += kept[i];
    sums[blockIdx.x] = sum;
}
"""
COLLECTIVES = r"""
extern "C" __global__ void collect(const int* x, int* found) {
    extern __shared__ int kept[];
    const int lane = threadIdx.x % 32, value = x[threadIdx.x];
    found[threadIdx.x] = __shfl_sync(0xffffffffu, value, 5);
    found[64 + threadIdx.x] = __shfl_xor_sync(0xffffffffu, value, 1);
    found[128 + threadIdx.x] = __shfl_down_sync(0xffffffffu, value, 3);
    found[192 + threadIdx.x] = __shfl_up_sync(0xffffffffu, value, 3, 8);
    found[256 + threadIdx.x] = int(__ballot_sync(0xffffffffu, value % 2));
    kept[threadIdx.x] = value;
    found[320 + threadIdx.x] = __syncthreads_count(value > 40);
    found[384 + threadIdx.x] = kept[63 - threadIdx.x];
    if (lane < 16) return;  // an exited lane is not waited for
    found[448 + threadIdx.x] = __all_sync(0xffffffffu, value >= 16);
}
"""
DIVERGES = r"""
extern "C" __global__ void diverge(int* x) {
    if (threadIdx.x < 16)
        __syncthreads();
    else
        x[0] = __shfl_sync(0xffffffffu, x[0], 0);
}
"""
TOO_FAR = r"""
extern "C" __global__ void too_far(int* x, int n) {
    x[threadIdx.x + n] = 1;
}
"""
OVERFLOW = """
import ctypes, sys
from pathlib import Path
from cudahost import Emulator
emulator = Emulator(Path(sys.argv[1]).read_text(), options=["-fsanitize=address", "-g"])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
room = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(32 * 4)))
emulator.launch("too_far", grid=[1], block=[32], arguments=[room, ctypes.c_int32(int(sys.argv[2]))])
"""
ORDERS: tuple[Order, ...] = ("forward", "shuffled")


def sums_of(emulator: Emulator, order: Order) -> list[int]:
    x, sums = (ctypes.c_int32 * 640)(*range(640)), (ctypes.c_int32 * 10)()
    arguments = [ctypes.c_void_p(ctypes.addressof(each)) for each in (x, sums)]
    emulator.launch("block_sums", grid=[10], block=[64], arguments=arguments, order=order)
    return list(sums)


@pytest.mark.parametrize("order", ORDERS)
def test_threads_share_memory_across_a_barrier(order: Order) -> None:
    expected = [sum(range(64 * block, 64 * block + 64)) for block in range(10)]
    assert sums_of(Emulator(BLOCK_SUMS), order) == expected


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_changes_the_result(order: Order) -> None:
    expected = [sum(range(64 * block, 64 * block + 64)) for block in range(10)]
    assert sums_of(Emulator(BLOCK_SUMS, options=["-DWITHOUT_BARRIER"]), order) != expected


@pytest.mark.parametrize("order", ORDERS)
def test_warp_collectives_and_counts(order: Order) -> None:
    x, found = (ctypes.c_int32 * 64)(*range(64)), (ctypes.c_int32 * 512)(*[-1] * 512)
    arguments = [ctypes.c_void_p(ctypes.addressof(each)) for each in (x, found)]
    Emulator(COLLECTIVES).launch(
        "collect", grid=[1], block=[64], arguments=arguments, dynamic_bytes=256, order=order
    )
    rows = [list(found[start : start + 64]) for start in range(0, 512, 64)]
    places = range(64)
    assert rows[0] == [i // 32 * 32 + 5 for i in places]
    assert rows[1] == [i ^ 1 for i in places]
    assert rows[2] == [i + 3 if i % 32 + 3 < 32 else i for i in places]
    assert rows[3] == [i - 3 if i % 8 >= 3 else i for i in places]
    assert rows[4] == [ctypes.c_int32(0xAAAAAAAA).value] * 64
    assert rows[5] == [23] * 64
    assert rows[6] == [63 - i for i in places]
    assert rows[7] == [1 if i % 32 >= 16 else -1 for i in places]


def test_a_barrier_that_not_all_reach_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    x = (ctypes.c_int32 * 1)()
    with pytest.raises(EmulationError, match="diverge: deadlock"):
        Emulator(DIVERGES).launch(
            "diverge", grid=[2], block=[32], arguments=[ctypes.c_void_p(ctypes.addressof(x))]
        )
    assert "thread block (0, 0, 0): of 32 threads 16 wait at a barrier" in capfd.readouterr().err


def test_a_source_with_mistakes_is_refused_in_the_compilers_words() -> None:
    with pytest.raises(EmulationError, match=r"kernel\.cu:2:.*error"):
        Emulator('extern "C" __global__ void broken(int* x) {\n    x = nonsense; }')


def test_the_address_sanitizer_names_the_line(tmp_path: Path) -> None:
    """Also that it finds nothing where nothing is wrong."""
    source = tmp_path / "too_far.cu"
    source.write_text(TOO_FAR)
    compiler = ["g++", "-print-file-name=libasan.so"]
    library = subprocess.run(compiler, capture_output=True, text=True, check=True).stdout.strip()
    environment = {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0"}
    outcomes = [
        subprocess.run(
            [sys.executable, "-c", OVERFLOW, str(source), str(offset)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        for offset in (0, 1)
    ]
    assert outcomes[0].returncode == 0, outcomes[0].stderr
    assert outcomes[1].returncode != 0
    assert "heap-buffer-overflow" in outcomes[1].stderr
    assert "kernel.cu:3" in outcomes[1].stderr
