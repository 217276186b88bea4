"""``metrics.jsonl`` has each step once, whatever happened before."""

from __future__ import annotations

import json
from pathlib import Path

from plait._metrics import MetricsLog, StepMetrics, read_metrics


def metrics(step: int, val_loss: float | None = None) -> StepMetrics:
    return StepMetrics(
        step=step, loss=5.5 - step, val_loss=val_loss, tokens_per_s=10.0, memory_bytes=7
    )


def test_a_line_has_exactly_the_promised_keys_and_null_where_not_evaluated(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", first_step=0)
    log.write(metrics(0))
    line = (tmp_path / "metrics.jsonl").read_text()  # flushed: the log is still open
    assert json.loads(line) == {
        "step": 0,
        "loss": 5.5,
        "val_loss": None,
        "tokens_per_s": 10.0,
        "memory_bytes": 7,
    }
    log.close()


def test_resuming_drops_the_lines_from_the_resumed_step_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsLog(path, first_step=0)
    for step in range(6):
        first.write(metrics(step))
    first.close()
    again = MetricsLog(path, first_step=4)
    assert [m.step for m in read_metrics(path)] == [0, 1, 2, 3]
    for step in range(4, 8):
        again.write(metrics(step, val_loss=1.0))
    again.close()
    assert [m.step for m in read_metrics(path)] == list(range(8))
    assert read_metrics(path)[4].val_loss == 1.0


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, first_step=0)
    log.write(metrics(0))
    log.close()
    with path.open("a") as file:
        file.write('{"step": 1, "lo')
    log = MetricsLog(path, first_step=1)
    log.write(metrics(1))
    log.close()
    assert [m.step for m in read_metrics(path)] == [0, 1]
