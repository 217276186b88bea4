"""Held-out loss with fewer bytes on the wire over that with exact messages.

ZeRO++, in `plait train` itself: four ranks as two nodes of two, 8-bit parameters, the
secondary shard, 4-bit gradients in two hops and their error feedback, beside stage 3 as it is.
1-bit Adam, in a loop of its own on the same text and model: four ranks, 15 % of the steps to warm
up, beside Adam, whose gradients travel in bfloat16 in both, each rank's clipped to the norm that is
the command's default; and the bytes of one over the other. Without clipping the first steps leave
a variance that is too large for good: the loss is then 2 to 3 % above Adam's.
A figure is the mean over the seeds of the ratio of the last held-out losses. Both halves warm up
linearly to half of the command's own learning rate: at that one so short a run is chaotic, and one
of three with exact messages ended 6 % above itself with codes.

    python benchmarks/comm_quant/bench_convergence.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _one_bit

import _report

SEEDS, NUM_STEPS = (0, 1, 2), 120
QUICK_SEEDS, QUICK_STEPS = (0,), 30
NUM_RANKS, NUM_LOCAL = 4, 2
OPTIMIZER = {"lr": 0.001, "betas": [0.9, 0.95], "weight_decay": 0.1}
EXACT: dict[str, object] = {"stage": 3}
CODED = {
    "stage": 3,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
    "zero_hpz_partition_size": NUM_LOCAL,
    "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024},
}
WARM_SHARE = 0.15


def train(zero: dict[str, object], *, seed: int, num_steps: int) -> float:
    """The last held-out loss of a run, in nats a byte."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": OPTIMIZER},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "total_num_steps": num_steps,
                    "warmup_num_steps": num_steps // 10,
                    "warmup_type": "linear",
                },
            },
            "run": {
                "ranks": NUM_RANKS,
                "steps": num_steps,
                "seed": seed,
                "folder": str(folder / "run"),
                "eval_every": num_steps,
                "sample_bytes": 0,
            },
        }
        (folder / "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-m", "plait", "train", str(folder / "config.json")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        (metrics,) = folder.rglob("metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses: list[float] = [row["val_loss"] for row in rows if row.get("val_loss") is not None]
    return losses[-1]


def measure(seeds: Sequence[int], num_steps: int) -> list[dict[str, Any]]:
    """Train with and without codes from every seed."""
    rows = []
    for seed in seeds:
        exact = train(EXACT, seed=seed, num_steps=num_steps)
        coded = train(CODED, seed=seed, num_steps=num_steps)
        rows.append({"seed": seed, "exact": exact, "zeropp": coded, "over": coded / exact})
        print(f"seed {seed}: {exact:.4f}, with codes {coded:.4f}", file=sys.stderr, flush=True)
    return rows


def measure_one_bit(seeds: Sequence[int], num_steps: int) -> list[dict[str, Any]]:
    """Train with Adam and with 1-bit Adam from every seed."""
    rows = []
    for seed in seeds:
        adam = _one_bit.train(OPTIMIZER, seed=seed, num_steps=num_steps, freeze_step=num_steps)
        warm = round(WARM_SHARE * num_steps)
        coded = _one_bit.train(OPTIMIZER, seed=seed, num_steps=num_steps, freeze_step=warm)
        exact, one_bit = adam["val_loss"], coded["val_loss"]
        rows.append(
            {
                "seed": seed,
                "exact": exact,
                "one_bit_adam": one_bit,
                "over": one_bit / exact,
                "volume_ratio": adam["sent_bytes"] / coded["sent_bytes"],
            }
        )
        print(f"seed {seed}: Adam {exact:.4f}, 1-bit {one_bit:.4f}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    """Run the benchmark."""
    options = _report.options_of(__doc__, quick="one seed, few steps")
    machine = _report.machine()
    num_steps = QUICK_STEPS if options.quick else NUM_STEPS
    seeds = QUICK_SEEDS if options.quick else SEEDS
    one_bit = measure_one_bit(seeds, num_steps)
    rows = measure(seeds, num_steps)
    lines = [
        [name, str(row["seed"]), f"{row['exact']:.4f}", f"{row[name]:.4f}", f"{row['over']:.4f}"]
        for name, group in (("zeropp", rows), ("one_bit_adam", one_bit))
        for row in group
    ]
    header = ["", "seed", "exact", "coded", "ratio"]
    print(f"\nheld-out loss after {num_steps} steps\n\n{_report.table(header, lines)}\n")
    figures = {
        "zeropp_loss_over_exact": statistics.mean(row["over"] for row in rows),
        "one_bit_adam_loss_over_adam": statistics.mean(row["over"] for row in one_bit),
        "one_bit_adam_volume_reduction": min(row["volume_ratio"] for row in one_bit),
    }
    _report.print_figures(figures)
    if options.json:
        _report.write_json(options.json, machine=machine, figures=figures, rows=[*rows, *one_bit])
    return 0


if __name__ == "__main__":
    sys.exit(main())
