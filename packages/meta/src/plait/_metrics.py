"""``metrics.jsonl``: one JSON object a step, complete up to the last line whatever happens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["MetricsLog", "StepMetrics", "read_metrics"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The model after `step` updates.

    Args:
        step: Number of updates made.
        loss: On the global batch of update `step`, before that update; nats a byte.
        val_loss: On the held-out text; None where it was not evaluated.
        tokens_per_s: Bytes trained on a second, over all ranks, in the latest update.
        memory_bytes: Held by rank 0: its GPU's peak, or its process's resident memory on a CPU.
    """

    step: int
    loss: float
    val_loss: float | None
    tokens_per_s: float
    memory_bytes: int


def read_metrics(path: Path) -> list[StepMetrics]:
    """The lines of a file; a line cut off by a kill is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(StepMetrics(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


class MetricsLog:
    """Appends to ``metrics.jsonl``, each line flushed.

    Opening it drops the lines from `first_step` on: a resumed run writes those again.

    Args:
        path: The file; made where it does not exist.
        first_step: Step of the first line to come.
    """

    def __init__(self, path: Path, *, first_step: int) -> None:
        kept = [m for m in read_metrics(path) if m.step < first_step] if path.exists() else []
        replacement = path.with_suffix(".jsonl.tmp")
        text = "".join(json.dumps(asdict(metrics)) + "\n" for metrics in kept)
        replacement.write_text(text, encoding="utf-8")
        replacement.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        """Add a line."""
        self._file.write(json.dumps(asdict(metrics)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """No line comes after."""
        self._file.close()
