"""Gather and reduce-scatter through shared memory beside gloo's own and beside a plain copy.

All ranks run on this host, with one thread each. Every round times each transport once, in random
order, after a barrier; a round's time is that of the slowest rank, and a figure is the median over
the rounds of the ratio within a round. "In place" is shared memory where the buffers lie in it
(`exposed_buffer`), as gradients and parameters of stages 0 to 2 do; the figures are of buffers of
the ranks' own.

    python benchmarks/zero_partition/bench_wire.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import _report
from zero_partition import SharedMemoryWire, TorchWire

KB, MB = 2**10, 2**20
SIZES = (64 * KB, 256 * KB, MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
QUICK_SIZES = (64 * KB, MB, 64 * MB)
RANKS = (2, 4)
NAMED = (64 * MB, 2)  # what the figures without a suffix are of
MOST_ROUNDS, FEWEST_ROUNDS, BYTES_A_CASE = 101, 7, 512 * MB
NUM_WARMUP_ROUNDS = 2
OPERATIONS = ("gather", "reduce_scatter")
TRANSPORTS = ("gloo", "torch_wire", "shared_memory", "in_place", "memcpy")
OTHERS = ("gloo", "torch_wire", "in_place", "memcpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operation on one size.

    Attributes:
        operation: "gather" or "reduce_scatter".
        num_ranks: Processes.
        num_bytes: Of the whole buffer, float32.
        num_rounds: Rounds to time.
    """

    operation: str
    num_ranks: int
    num_bytes: int
    num_rounds: int


def cases(sizes: Sequence[int], num_ranks: int) -> list[Case]:
    """Both operations on all sizes, fewer rounds on the large ones."""
    return [
        Case(
            operation=operation,
            num_ranks=num_ranks,
            num_bytes=num_bytes,
            num_rounds=min(MOST_ROUNDS, max(FEWEST_ROUNDS, BYTES_A_CASE // num_bytes)),
        )
        for num_bytes in sizes
        for operation in OPERATIONS
    ]


# A rank.


def measure_as_rank(rank: int, listed: list[Case], folder: str) -> None:
    """Time all cases as one rank; rank 0 writes the seconds of the slowest rank."""
    torch.set_num_threads(1)
    num_ranks = listed[0].num_ranks
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    shared, plain = SharedMemoryWire(), TorchWire()
    shared.open(_world())
    found = []
    for case in listed:
        seconds = _time_case(case, rank, shared, plain)
        everyone: list[Any] = [None] * num_ranks
        dist.all_gather_object(everyone, seconds)
        slowest = {
            key: [max(each) for each in zip(*(mine[key] for mine in everyone), strict=True)]
            for key in TRANSPORTS
        }
        found.append({**asdict(case), "seconds": slowest})
        if rank == 0:
            _say(case, slowest)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _time_case(
    case: Case, rank: int, shared: SharedMemoryWire, plain: TorchWire
) -> dict[str, list[float]]:
    numel = case.num_bytes // 4
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randn(numel, generator=generator)
    slice_numel = numel // case.num_ranks
    out = torch.zeros(numel if case.operation == "gather" else slice_numel)
    copied = torch.zeros(numel)
    runs = _runs(case.operation, out, whole, slice_numel, shared=shared, plain=plain)
    exposed = shared.exposed_buffer(numel, torch.float32, group=_world())
    if exposed is None:
        raise RuntimeError(f"no room in /dev/shm for {case.num_ranks} x {case.num_bytes} bytes")
    exposed.copy_(whole)
    own = exposed[rank * slice_numel :][:slice_numel]
    runs["in_place"] = (
        (lambda: shared.all_gather(exposed, own, group=_world()).wait())
        if case.operation == "gather"
        else (lambda: shared.reduce_scatter(out, exposed, group=_world()).wait())
    )
    runs["memcpy"] = lambda: copied.copy_(whole)
    _check_same(runs, out)
    shuffle = random.Random(case.num_bytes)  # all ranks draw the same order
    seconds: dict[str, list[float]] = {key: [] for key in TRANSPORTS}
    for round_number in range(NUM_WARMUP_ROUNDS + case.num_rounds):
        for key in shuffle.sample(TRANSPORTS, len(TRANSPORTS)):
            dist.barrier()
            start = time.perf_counter()
            runs[key]()
            taken = time.perf_counter() - start
            if round_number >= NUM_WARMUP_ROUNDS:
                seconds[key].append(taken)
    return seconds


def _runs(
    operation: str,
    out: Tensor,
    whole: Tensor,
    slice_numel: int,
    *,
    shared: SharedMemoryWire,
    plain: TorchWire,
) -> dict[str, Callable[[], object]]:
    shard = whole[:slice_numel]
    names = vars(dist)  # torch 2.13 renames the two
    gather = names.get("all_gather_single", names["all_gather_into_tensor"])
    scatter = names.get("reduce_scatter_single", names["reduce_scatter_tensor"])
    group = _world()
    if operation == "gather":
        return {
            "gloo": lambda: gather(out, shard),
            "torch_wire": lambda: plain.all_gather(out, shard, group=group).wait(),
            "shared_memory": lambda: shared.all_gather(out, shard, group=group).wait(),
        }
    return {
        "gloo": lambda: scatter(out, whole),
        "torch_wire": lambda: plain.reduce_scatter(out, whole, group=group).wait(),
        "shared_memory": lambda: shared.reduce_scatter(out, whole, group=group).wait(),
    }


def _check_same(runs: dict[str, Callable[[], object]], out: Tensor) -> None:
    results = []
    for key in TRANSPORTS[:3]:
        out.fill_(float("nan"))
        runs[key]()
        results.append(out.clone())
    torch.testing.assert_close(results[2], results[0], rtol=1e-5, atol=1e-5)
    if not torch.equal(results[2], results[1]):
        raise RuntimeError("the two wires differ in bits")


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None  # after init_process_group
    return world


def _say(case: Case, seconds: dict[str, list[float]]) -> None:
    medians = {key: statistics.median(times) * 1e3 for key, times in seconds.items()}
    told = "  ".join(f"{key} {median_ms:.2f}" for key, median_ms in medians.items())
    said = f"{case.num_ranks} ranks, {_size(case.num_bytes)}, {case.operation}: {told} ms"
    print(said, file=sys.stderr, flush=True)


# The report.


def measure(num_ranks: int, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Time all cases on `num_ranks` ranks."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name need not resolve
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure_as_rank, args=(cases(sizes, num_ranks), folder), nprocs=num_ranks)
        found: list[dict[str, Any]] = json.loads(Path(folder, "found.json").read_text())
    return [row_of(each) for each in found]


def row_of(found: dict[str, Any]) -> dict[str, Any]:
    """Medians, and the ratios within a round."""
    seconds = found["seconds"]
    over = {
        f"{key}_over_shared_memory": statistics.median(
            theirs / ours
            for theirs, ours in zip(seconds[key], seconds["shared_memory"], strict=True)
        )
        for key in OTHERS
    }
    medians = {f"{key}_ms": statistics.median(seconds[key]) * 1e3 for key in TRANSPORTS}
    kept = {key: found[key] for key in ("operation", "num_ranks", "num_bytes", "num_rounds")}
    return {**kept, **medians, **over}


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The numbers that the issues name, and the worst ratio of all."""
    found = {}
    for row in rows:
        size, num_ranks = row["num_bytes"], row["num_ranks"]
        if size == NAMED[0]:
            suffix = "" if num_ranks == NAMED[1] else f"_{num_ranks}_ranks"
            found[f"{row['operation']}_speedup{suffix}"] = row["gloo_over_shared_memory"]
    found["least_speedup"] = min(row["gloo_over_shared_memory"] for row in rows)
    return found


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a person reads them."""
    header = ["operation", "ranks", "size", "gloo ms", "TorchWire ms", "shared ms", "in place ms"]
    header += ["memcpy ms", "gloo / shared", "TorchWire / shared", "in place / shared"]
    header += ["memcpy / shared"]
    lines = []
    for row in rows:
        cells = [row["operation"], str(row["num_ranks"]), _size(row["num_bytes"])]
        cells += [f"{row[f'{key}_ms']:.2f}" for key in TRANSPORTS]
        cells += [f"{row[f'{key}_over_shared_memory']:.2f}" for key in OTHERS]
        lines.append(cells)
    return _report.table(header, lines)


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MB} MB" if num_bytes >= MB else f"{num_bytes // KB} KB"


def main() -> int:
    """Run the benchmark."""
    options = _report.options_of(__doc__, quick="three sizes only")
    machine = _report.machine()
    sizes = QUICK_SIZES if options.quick else SIZES
    rows = [row for num_ranks in RANKS for row in measure(num_ranks, sizes)]
    print(f"\n{table_of(rows)}\n")
    figures = figures_of(rows)
    _report.print_figures(figures)
    if options.json:
        _report.write_json(options.json, machine=machine, figures=figures, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
