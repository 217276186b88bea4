"""A training step of ZeRO stages 0 to 3 beside DDP, FSDP2, ZeroRedundancyOptimizer and DeepSpeed.

Every variant trains the same GPT on the same data with the same AdamW, on 2 ranks of one thread.
Times: all variants in one pair of processes, one step of each in turn in random order; a figure is
the median over the rounds of the ratio within a round. Memory: a pair of processes a variant.

    python benchmarks/zero_partition/bench_step.py [--quick] [--json FILE]

docs/benchmarks.md says how to install DeepSpeed beside it; without, its rows are named as missing.
"""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from _plan import NUM_RANKS, SIZES, VARIANTS, Size, Variant
from _ranks import RanksFailed, Task, run_ranks

import _report

SEED = 0
QUICK_ROUNDS = 12
RECIPES = "docs/benchmarks.md has the recipe"
ROUNDING = 1e-5
"""Parameters that differ from DDP's by more than this are not the result of the same training."""

RATIOS = {
    **{f"stage{stage}_over_ddp": (f"stage{stage}", "ddp") for stage in range(4)},
    "stage3_over_fsdp2": ("stage3", "fsdp2"),
    "fsdp2_over_ddp": ("fsdp2", "ddp"),
    "zero_redundancy_over_ddp": ("zero_redundancy", "ddp"),
    **{f"stage{n}_over_deepspeed{n}": (f"stage{n}", f"deepspeed{n}") for n in (1, 2, 3)},
    "stage3_over_deepspeed3_linear": ("stage3", "deepspeed3_linear"),
    "deepspeed3_over_ddp": ("deepspeed3", "ddp"),
    "stage3_over_torch_wire": ("stage3", "stage3_torch_wire"),
}
"""The figures of time, and what they divide by what."""

PSS_RATIOS = {"pss_over_deepspeed3": ("stage3", "deepspeed3")}
"""The same of proportional set sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Everything about one size of model; ranks' values side by side, by variant."""

    size: Size
    missing: dict[str, str] = field(default_factory=dict)
    memory: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    times: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def step_s(self, key: str) -> list[float]:
        """Seconds of each round: those of the slowest rank."""
        return [max(each) for each in zip(*(r["step_s"] for r in self.times[key]), strict=True)]

    def ratios(self, key: str, other: str) -> list[float]:
        """Seconds of one variant over those of another, round by round."""
        pairs = zip(self.step_s(key), self.step_s(other), strict=True)
        return [seconds / others for seconds, others in pairs]

    def mean_bytes(self, key: str, what: str) -> float | None:
        """Mean over the ranks; None where the kernel does not say."""
        counts = [rank[what] for rank in self.memory[key]]
        return None if None in counts else statistics.fmean(counts)

    def loss_difference(self, key: str) -> float:
        """Greatest distance of a loss from DDP's at the same step, on any rank, in any process."""
        distances: list[float] = [
            abs(mine - expected)
            for measured in (self.times, self.memory)
            for ours, ddp in zip(measured[key], measured["ddp"], strict=True)
            for mine, expected in zip(ours["losses"], ddp["losses"], strict=True)
        ]
        return worst(distances)


def measure(size: Size, *, num_rounds: int) -> Measured:
    """Measure memory variant by variant, then time all that could run."""
    measured = Measured(size=size)
    for variant in VARIANTS:
        if variant.needs and find_spec(variant.needs) is None:
            measured.missing[variant.key] = f"{variant.needs} is not installed; {RECIPES}"
            continue
        say(f"{size.name}: memory of {variant.label}, stage {variant.stage}")
        try:
            ranks = run_ranks(task("memory", size, [variant.key], num_rounds=0))
        except RanksFailed as error:
            measured.missing[variant.key] = str(error)
            say(f"missing: {error}")
        else:
            measured.memory[variant.key] = [rank[variant.key] for rank in ranks]
    if "ddp" in measured.missing:
        sys.exit(f"DDP, to which everything is compared, could not run: {measured.missing['ddp']}")
    say(f"{size.name}: times of all variants, side by side")
    keys = list(measured.memory)
    try:
        ranks = run_ranks(task("time", size, keys, num_rounds=num_rounds))
    except RanksFailed as error:
        sys.exit(f"every variant ran alone, but not all side by side: {error}")
    measured.times.update({key: [rank[key] for rank in ranks] for key in keys})
    return measured


def task(kind: str, size: Size, keys: list[str], *, num_rounds: int) -> Task:
    """A task for the ranks."""
    return Task(
        kind=kind,
        variants=tuple(keys),
        size=size.name,
        num_rounds=num_rounds,
        num_ranks=NUM_RANKS,
        seed=SEED,
    )


def figures_of(measured: Measured) -> dict[str, float]:
    """The numbers that the issues name; those of a variant that is missing are left out."""
    ran = measured.times.keys()
    found = {
        name: statistics.median(measured.ratios(*pair))
        for name, pair in RATIOS.items()
        if ran >= set(pair)
    }
    for name, (key, other) in PSS_RATIOS.items():
        if ran >= {key, other}:
            mine, theirs = (measured.mean_bytes(each, "pss_bytes") for each in (key, other))
            if mine and theirs:
                found[name] = mine / theirs
    ours = [variant for variant in VARIANTS if variant.is_ours and variant.key in ran]
    held = [ratio for variant in ours if (ratio := held_over_best_peer(measured, variant))]
    if held:
        found["held_bytes_over_best_peer"] = max(held)
    if ours:
        found["loss_difference"] = worst([measured.loss_difference(each.key) for each in ours])
    return {f"{name}{measured.size.suffix}": value for name, value in found.items()}


def held_over_best_peer(measured: Measured, variant: Variant) -> float | None:
    """Bytes held after backward over those of the most frugal peer of the same stage."""
    peers = [
        measured.mean_bytes(peer.key, "held_bytes")
        for peer in VARIANTS
        if not peer.is_ours and peer.stage == variant.stage and peer.key in measured.memory
    ]
    mine = measured.mean_bytes(variant.key, "held_bytes")
    known = [count for count in peers if count]
    return mine / min(known) if mine and known else None


def row_of(measured: Measured, variant: Variant) -> dict[str, Any]:
    """Everything that was measured of one variant."""
    row = {"size": measured.size.name, "variant": variant.key, "stage": variant.stage}
    if variant.key in measured.missing:
        return row | {"missing": measured.missing[variant.key]}
    key, times = variant.key, measured.times[variant.key]
    ratios = measured.ratios(key, "ddp")
    difference = worst([rank["parameters_difference"] for rank in times])
    return row | {
        "step_ms": statistics.median(measured.step_s(key)) * 1e3,
        "over_ddp": statistics.median(ratios),
        "over_ddp_quartiles": quartiles(ratios),
        "held_bytes": measured.mean_bytes(key, "held_bytes"),
        "held_bytes_by_rank": [rank["held_bytes"] for rank in measured.memory[key]],
        "pss_bytes": measured.mean_bytes(key, "pss_bytes"),
        "peak_rss_bytes": measured.mean_bytes(key, "peak_rss_bytes"),
        "loss": statistics.fmean(rank["losses"][-1] for rank in times),
        "loss_difference": measured.loss_difference(key),
        "parameters_difference": difference,
        "parameters_agree": difference <= ROUNDING,
        "losses_by_rank": [rank["losses"] for rank in times],
        "step_ms_by_round": [seconds * 1e3 for seconds in measured.step_s(key)],
    }


def worst(values: list[float]) -> float:
    """The greatest; NaN is greater than anything."""
    return max(values, key=lambda value: (math.isnan(value), value))


def quartiles(values: list[float]) -> list[float]:
    """The first and the third."""
    if len(values) < 2:
        return values * 2
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows of one size as a person reads them."""
    labels = {variant.key: variant.label for variant in VARIANTS}
    header = ["variant", "stage", "step ms", "over DDP [quartiles]", "held MB", "PSS MB"]
    header += ["peak RSS MB", "loss", "parameters"]
    lines, notes = [], []
    for row in rows:
        label = labels[row["variant"]]
        if "missing" in row:
            notes.append(f"missing: {label}, stage {row['stage']}: {row['missing']}")
            continue
        first, third = row["over_ddp_quartiles"]
        cells = [label, str(row["stage"]), f"{row['step_ms']:.0f}"]
        cells += [f"{row['over_ddp']:.3f} [{first:.2f} {third:.2f}]"]
        cells += [megabytes(row[what]) for what in ("held_bytes", "pss_bytes", "peak_rss_bytes")]
        agree = "as DDP's" if row["parameters_agree"] else "DIFFER"
        difference = row["parameters_difference"]
        cells += [f"{row['loss']:.6f}", f"{agree} +- {difference:.0e}" if difference else agree]
        lines.append(cells)
    return "\n".join([_report.table(header, lines), *notes])


def megabytes(count: float | None) -> str:
    """Millions of bytes."""
    return "?" if count is None else f"{count / 1e6:.1f}"


def say(line: str) -> None:
    """Tell how far it is."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Run the benchmark; not 0 if a stage of ours could not run."""
    parser = _report.parser_of(__doc__, quick="10M parameters only, fewer rounds")
    parser.add_argument("--size", action="append", choices=SIZES, help="default: 10M and 50M")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds to time, for each size")
    options = parser.parse_args()
    _report.check_folder(parser, options)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    machine = _report.machine()
    figures: dict[str, float] = {}
    rows, missing = [], False
    for name in options.size or (["10M"] if options.quick else ["10M", "50M"]):
        size = SIZES[name]
        num_rounds = options.rounds or (QUICK_ROUNDS if options.quick else size.num_rounds)
        measured = measure(size, num_rounds=num_rounds)
        of_size = [row_of(measured, variant) for variant in VARIANTS]
        tokens = f"{size.batch} x {size.length} tokens a rank"
        print(f"\n{name} parameters, {NUM_RANKS} ranks, {tokens}, {num_rounds} rounds, AdamW\n")
        print(f"{table_of(of_size)}\n", flush=True)
        rows += of_size
        figures |= figures_of(measured)
        missing |= any(variant.is_ours and variant.key in measured.missing for variant in VARIANTS)
    _report.print_figures(figures)
    if options.json:
        _report.write_json(options.json, machine=machine, figures=figures, rows=rows)
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())
