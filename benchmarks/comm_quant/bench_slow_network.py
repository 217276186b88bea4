"""ZeRO++ on a slow network: a step's time over that of plain messages, at several rates.

Two network namespaces of this machine are two nodes of two ranks, joined by a link that `tc` holds
to a rate. Stage 3 of a transformer in 16 bits, with: plain messages between the nodes (every slice
crosses once, gradients are summed within a node first), hpZ (backward gathers within the node), and
ZeRO++ (hpZ, 8-bit parameters, 4-bit gradients); DeepSpeed's ZeRO-3 where it is installed. All of
them overlap messages with computing. Beside each time is a prediction: the longer of computing and
crossing, and one layer's crossing that nothing can hide.

Needs root, `ip` and `tc`; without them it says why and measures nothing.

    python benchmarks/comm_quant/bench_slow_network.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _link
from _slow_rank import LAYERS, NUM_LOCAL, NUM_RANKS

import _report

RATES = (133, 533, 1067, None)  # million bits a second; None: as the kernel passes them on
PLAN = {"width": 512, "rounds": {"128": 5, "512": 3}, "rates": RATES, "feedback": False}
QUICK_PLAN = {"width": 128, "rounds": {"128": 2}, "rates": (133, None), "feedback": False}
SCRIPT = Path(__file__).with_name("_slow_rank.py")
LIMIT_S = 1800


def measure(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the ranks, two in each namespace, and serve them."""
    with _link.link():
        store = f"tcp://{_link.ADDRESSES[0]}:29617"
        ranks = []
        for rank in range(NUM_RANKS):
            node = rank // NUM_LOCAL
            environment = {
                **os.environ,
                "GLOO_SOCKET_IFNAME": _link.DEVICES[node],
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
                "LOCAL_RANK": str(rank % NUM_LOCAL),
                "LOCAL_SIZE": str(NUM_LOCAL),
                "RANK": str(rank),
                "WORLD_SIZE": str(NUM_RANKS),
                "MASTER_ADDR": _link.ADDRESSES[0],
                "MASTER_PORT": "29618",
            }
            arguments = [sys.executable, str(SCRIPT), str(rank), store, json.dumps(plan)]
            ranks.append(
                subprocess.Popen(
                    _link.command_inside(node, arguments),
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
            )
        timer = threading.Timer(LIMIT_S, _stop, [ranks])
        timer.start()
        try:
            return _serve(ranks[0])
        finally:
            timer.cancel()
            _stop(ranks)


def _serve(rank: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """Answer rank 0 until it hands over its rows."""
    assert rank.stdin is not None
    assert rank.stdout is not None
    for line in rank.stdout:
        if not line.startswith("{"):
            continue  # what a peer prints
        wanted = json.loads(line)
        if "mbit_s" in wanted:
            _link.set_rate(wanted["mbit_s"])
        rank.stdin.write(json.dumps({"sent_bytes": _link.sent_bytes(0)}) + "\n")
        rank.stdin.flush()
        if "rows" in wanted:
            rank.wait(timeout=60)
            rows: list[dict[str, Any]] = wanted["rows"]
            return rows
    raise RuntimeError("the ranks ended before they were done; their last words are above")


def _stop(ranks: list[subprocess.Popen[str]]) -> None:
    for each in ranks:
        if each.poll() is None:
            each.kill()
    for each in ranks:
        each.wait()


def with_predictions(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the median, the time of crossing and the model's prediction to each row."""
    computing = {
        (row["tokens"], row["mbit_s"]): statistics.median(row["seconds"])
        for row in rows
        if row["variant"] == "compute alone"
    }
    plain = {(row["tokens"], row["mbit_s"]): row for row in rows if row["variant"] == "plain"}
    found = []
    for row in rows:
        place = row["tokens"], row["mbit_s"]
        crossing = None
        if row["mbit_s"] is not None:
            crossing = row["interface_bytes"] * 8 / (row["mbit_s"] * 1e6)
        pairs = zip(plain[place]["seconds"], row["seconds"], strict=True)
        predicted = computing[place]
        if crossing is not None:
            predicted = max(computing[place], crossing) + crossing / LAYERS
        found.append(
            {
                **row,
                "median_s": statistics.median(row["seconds"]),
                "crossing_s": crossing,
                "predicted_s": predicted,
                "speedup": statistics.median(one / other for one, other in pairs),
            }
        )
    return found


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Speed-ups over plain messages, by rate; with many tokens a rank under their own name."""
    figures: dict[str, float] = {}
    for row in rows:
        rate = "loopback" if row["mbit_s"] is None else str(row["mbit_s"])
        more = "" if row["tokens"] == 128 else f"_{row['tokens']}_tokens"
        if row["variant"] in {"hpz", "zeropp", "deepspeed3"}:
            figures[f"{row['variant']}_{rate}{more}_speedup"] = row["speedup"]
    for name in ("plain", "zeropp"):
        shares = [
            row["interface_bytes"] / row["payload_bytes"] for row in rows if row["variant"] == name
        ]
        figures[f"{name}_interface_over_payload"] = statistics.median(shares)
    return figures


def main() -> int:
    """Run the benchmark."""
    options = _report.options_of(__doc__, quick="a small model, two rates, few rounds")
    machine = _report.machine()
    if reason := _link.why_not():
        print(f"not measured: {reason}", file=sys.stderr)
        return 0
    rows = with_predictions(measure(QUICK_PLAN if options.quick else PLAN))
    lines = [
        [
            f"{row['tokens']} tokens, {row['mbit_s'] or 'any'} Mbit/s",
            row["variant"],
            f"{row['median_s']:.2f}",
            "" if row["crossing_s"] is None else f"{row['crossing_s']:.2f}",
            f"{row['predicted_s']:.2f}",
            f"{row['speedup']:.2f}",
        ]
        for row in rows
    ]
    header = ["at", "variant", "step s", "crossing s", "predicted s", "speed-up"]
    print(f"\n{_report.table(header, lines)}\n")
    if not any(row["variant"] == "deepspeed3" for row in rows):
        print("deepspeed3: not installed\n")
    figures = figures_of(rows)
    _report.print_figures(figures)
    if options.json:
        _report.write_json(options.json, machine=machine, figures=figures, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
