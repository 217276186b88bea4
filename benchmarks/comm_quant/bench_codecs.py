"""Codecs beside a plain copy and beside the same arithmetic in torch.

One thread, outputs reused. GB/s are bytes read and written; a share is that of `copy_` between
two float32 tensors of the same elements (8 bytes an element) within a round. Every round times each
operation once, in random order; a figure is the median over the rounds of the ratio within a round.

    python benchmarks/comm_quant/bench_codecs.py [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import _report
from comm_quant import (
    BlockQuant,
    Codec,
    Float8Quant,
    dequantize,
    dequantize_sum_requantize,
    quantize,
)
from comm_quant._kernels.dequantize_ref import dequantize_ref
from comm_quant._kernels.dequantize_sum_requantize_ref import dequantize_sum_ref
from comm_quant._kernels.quantize_ref import quantize_ref

NUMEL, QUICK_NUMEL = 32 * 2**20, 8 * 2**20
NUM_ROUNDS, QUICK_ROUNDS = 11, 5
NUM_EAGER_ROUNDS = 1  # torch's are 10 to 30 times slower
NUM_PEERS = 4  # rows that are summed
CODECS: dict[str, Codec] = {
    "int8": BlockQuant(bits=8, block_numel=256),
    "int4": BlockQuant(bits=4, block_numel=128),
    "int2": BlockQuant(bits=2, block_numel=128),
    "sign": BlockQuant(bits=1, block_numel=256),
    "e4m3": Float8Quant(format="e4m3", block_numel=256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing to time.

    Attributes:
        name: Codec and verb.
        run: Does it once, by the package.
        eager: Does it once, in torch.
        num_bytes: Read and written.
    """

    name: str
    run: Callable[[], object]
    eager: Callable[[], object]
    num_bytes: int


def operations(name: str, spec: Codec, x: Tensor) -> list[Operation]:
    """Quantize, dequantize, and the step between two hops."""
    numel = x.numel()
    codes, scales = quantize(x, spec)
    y = torch.empty_like(x)
    coded_bytes = codes.nbytes + scales.nbytes
    part = numel // NUM_PEERS
    rows, row_scales = codes.view(NUM_PEERS, -1, spec.block_bytes), scales.view(NUM_PEERS, -1)
    out = torch.empty_like(rows[0]), torch.empty_like(row_scales[0])

    def between_hops() -> object:
        return dequantize_sum_requantize(rows, row_scales, spec, numel=part, to=spec, out=out)

    def between_hops_eager() -> object:
        total = dequantize_sum_ref(rows, row_scales, spec, numel=part, own_N=None, own_index=0)
        return quantize_ref(total, spec, seed=0)

    return [
        Operation(
            name=f"{name}_quantize",
            run=lambda: quantize(x, spec, out=(codes, scales)),
            eager=lambda: quantize_ref(x, spec, seed=0),
            num_bytes=x.nbytes + coded_bytes,
        ),
        Operation(
            name=f"{name}_dequantize",
            run=lambda: dequantize(codes, scales, spec, numel=numel, out=y),
            eager=lambda: dequantize_ref(codes, scales, spec, numel=numel),
            num_bytes=x.nbytes + coded_bytes,
        ),
        Operation(
            name=f"{name}_dequantize_sum_requantize",
            run=between_hops,
            eager=between_hops_eager,
            num_bytes=coded_bytes + coded_bytes // NUM_PEERS,
        ),
    ]


def measure(numel: int, num_rounds: int) -> list[dict[str, Any]]:
    """Time everything, interleaved."""
    torch.set_num_threads(1)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    copied = torch.empty_like(x)
    listed = [each for name, spec in CODECS.items() for each in operations(name, spec, x)]
    runs = {each.name: each.run for each in listed} | {"copy": lambda: copied.copy_(x)}
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(0)
    for number in range(num_rounds):
        for name in shuffle.sample(list(runs), len(runs)):
            seconds[name].append(_seconds(runs[name]))
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr, flush=True)
    return [_row(each, seconds, copy_bytes=2 * x.nbytes) for each in listed]


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _row(
    operation: Operation, seconds: dict[str, list[float]], *, copy_bytes: int
) -> dict[str, Any]:
    ours, copies = seconds[operation.name], seconds["copy"]
    eager_s = min(_seconds(operation.eager) for _ in range(NUM_EAGER_ROUNDS))
    shares = [
        (operation.num_bytes / mine) / (copy_bytes / copy)
        for mine, copy in zip(ours, copies, strict=True)
    ]
    return {
        "operation": operation.name,
        "gb_per_s": operation.num_bytes / statistics.median(ours) / 1e9,
        "copy_gb_per_s": copy_bytes / statistics.median(copies) / 1e9,
        "share_of_copy": statistics.median(shares),
        "eager_speedup": eager_s / statistics.median(ours),
    }


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Shares of a copy by operation; the step between hops without a prefix is that of int8."""
    found = {row["operation"]: row["share_of_copy"] for row in rows}
    return {"dequantize_sum_requantize": found["int8_dequantize_sum_requantize"], **found}


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a person reads them."""
    header = ["operation", "GB/s", "copy GB/s", "share of copy", "times faster than torch eager"]
    lines = [
        [
            row["operation"],
            f"{row['gb_per_s']:.1f}",
            f"{row['copy_gb_per_s']:.1f}",
            f"{row['share_of_copy']:.2f}",
            f"{row['eager_speedup']:.0f}",
        ]
        for row in rows
    ]
    return _report.table(header, lines)


def main() -> int:
    """Run the benchmark."""
    options = _report.options_of(__doc__, quick="fewer elements and rounds")
    machine = _report.machine()
    numel = QUICK_NUMEL if options.quick else NUMEL
    rows = measure(numel, QUICK_ROUNDS if options.quick else NUM_ROUNDS)
    figures = figures_of(rows)
    print(f"\n{numel:,} elements, one thread, {NUM_PEERS} rows in a sum\n\n{table_of(rows)}\n")
    _report.print_figures(figures)
    if options.json:
        _report.write_json(options.json, machine=machine, figures=figures, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
