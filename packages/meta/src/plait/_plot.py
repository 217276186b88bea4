"""The loss curves as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait._metrics import StepMetrics

__all__ = ["plot_losses"]


def plot_losses(metrics: Sequence[StepMetrics], bigram_loss: float, path: Path) -> None:
    """Write a PNG of training loss, held-out loss and the bigram baseline over the steps.

    Args:
        metrics: Every step of the run.
        bigram_loss: Nats a byte.
        path: The file to write.
    """
    # Only here, at the end of a run: it takes half a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415  # as said above
    from matplotlib.figure import Figure  # noqa: PLC0415  # as said above

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([m.step for m in metrics], [m.loss for m in metrics], label="training", linewidth=1)
    evaluated = [(m.step, m.val_loss) for m in metrics if m.val_loss is not None]
    axes.plot(*zip(*evaluated, strict=True), label="held out", marker="o", markersize=4)
    axes.axhline(bigram_loss, label="bigram counts, held out", color="gray", linestyle="--")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
