"""Runs the `plait` command the way a person does, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TINY = {
    "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "context_length": 16},
    "run": {
        "steps": 8,
        "save_every": 4,
        "eval_every": 4,
        "eval_windows": 10,
        "sample_bytes": 5,
        "device": "cpu",
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "train_batch_size": 12,
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "plait", *arguments]


def environment() -> dict[str, str]:
    """Without what a launcher around the tests may have set."""
    launcher = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return kept | {"OMP_NUM_THREADS": "1"}


def plait(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``plait`` in `folder` and wait."""
    return subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def write_text_and_config(folder: Path) -> None:
    """``book.txt`` and ``tiny.json`` that trains on it."""
    words = [f"{number} times {number} is {number * number}.\n" for number in range(400)]
    (folder / "book.txt").write_text("".join(words))
    config = TINY | {"data": {"path": str(folder / "book.txt")}}
    (folder / "tiny.json").write_text(json.dumps(config))


def metrics_in(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
