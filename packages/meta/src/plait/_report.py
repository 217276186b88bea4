"""What rank 0 shows and writes: header, progress bar, metrics, plot, closing report."""

from __future__ import annotations

import sys
import threading
import time

import torch.distributed as dist
from tqdm import tqdm  # type: ignore[import-untyped]  # tqdm ships no types

import plait
from plait._bigram import bigram_loss
from plait._config import Config
from plait._metrics import MetricsLog, StepMetrics, read_metrics
from plait._plot import plot_losses
from plait._run_folder import RunPlan, checkpoints_in
from plait._text import Text, held_out_starts, windows
from zero_partition import Memory

__all__ = ["Report"]

_MIB = 1 << 20


class Report:
    """The account of a run, on one rank.

    Args:
        config: The run's configuration.
        plan: Where it writes.
        text: For the baseline and the header.
        num_parameters: Of the model.
        first_step: Where it begins.
        notes: What differs from the run that is continued.
    """

    def __init__(
        self,
        config: Config,
        plan: RunPlan,
        text: Text,
        *,
        num_parameters: int,
        first_step: int,
        notes: list[str],
    ) -> None:
        self.config = config
        self.plan = plan
        self.first_step = first_step
        self.bigram_loss = _baseline(config, text)
        self.last: StepMetrics | None = None
        self.val_loss = float("nan")
        lines = _header(config, text, num_parameters)
        lines.append(f"folder   {plan.folder}")
        if plan.resumed:
            lines.append(f"resumed  {plan.resumed.checkpoint}, at step {first_step}")
        lines += [f"note     {note}" for note in [text.note, *notes] if note]
        print("\n".join(lines), flush=True)
        self.log = MetricsLog(plan.metrics, first_step=first_step)
        self.start_s = time.perf_counter()
        tqdm.set_lock(threading.RLock())  # its own is a semaphore that a killed rank leaves behind
        self.bar = tqdm(
            total=config.run.steps,
            initial=first_step,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
            dynamic_ncols=True,
        )

    def step(self, metrics: StepMetrics) -> None:
        """Take a step's metrics."""
        self.log.write(metrics)
        self.last = metrics
        if metrics.val_loss is not None:
            self.val_loss = metrics.val_loss
            where = (
                f"step {metrics.step:>6}  loss {metrics.loss:.3f}  held-out {metrics.val_loss:.3f}"
            )
            self.bar.write(f"{where}  (bigram {self.bigram_loss:.3f})", file=sys.stdout)
        self.bar.set_postfix_str(
            f"loss {metrics.loss:.3f}, {metrics.tokens_per_s:,.0f} tokens/s, "
            f"{metrics.memory_bytes / _MIB:,.0f} MiB",
            refresh=False,
        )
        if metrics.step < self.config.run.steps:
            self.bar.update()

    def finish(self, sample: tuple[bytes, bytes], memory: Memory) -> None:
        """Draw the plot, write the sample, print the closing report."""
        self.bar.close()
        self.log.close()
        assert self.last is not None  # a run has at least one step
        took_s = time.perf_counter() - self.start_s
        plot_losses(
            read_metrics(self.plan.metrics), self.bigram_loss, self.plan.folder / "loss.png"
        )
        prompt, added = (part.decode(errors="replace") for part in sample)
        mark = "\N{BLACK RIGHT-POINTING TRIANGLE}"
        (self.plan.folder / "sample.txt").write_text(prompt + added, encoding="utf-8")
        trained = self.config.run.steps - self.first_step
        sequences = trained * self.config.training.batch.train_batch_size
        num_tokens = sequences * self.config.model.context_length
        speed = num_tokens / took_s
        checkpoints = checkpoints_in(self.plan.folder)
        lines = [
            "",
            f"trained        {trained} steps in {took_s:.0f} s, {speed:,.0f} tokens/s",
            f"training loss  {self.last.loss:.3f} nats a byte",
            f"held-out loss  {self.val_loss:.3f} nats a byte",
            f"bigram counts  {self.bigram_loss:.3f} nats a byte on the same held-out text",
            "",
            f"memory of rank 0 at stage {self.config.training.stage}:",
            str(memory),
            "",
            f"metrics        {self.plan.metrics}",
            f"plot           {self.plan.folder / 'loss.png'}",
            f"checkpoint     {checkpoints[-1][1]}",
        ]
        if added:
            lines += [
                "",
                "sample (held-out text up to the mark, the model from there):",
                _printable(f"{prompt}{mark}{added}"),
            ]
        print("\n".join(lines), flush=True)


def _baseline(config: Config, text: Text) -> float:
    context_length = config.model.context_length
    starts = held_out_starts(
        held_out_numel=text.held_out.numel(),
        context_length=context_length,
        num_windows=config.run.eval_windows,
    )
    tokens, targets = windows(text.held_out, starts, context_length=context_length)
    return bigram_loss(text.train, tokens, targets)


def _header(config: Config, text: Text, num_parameters: int) -> list[str]:
    """What is about to be trained, and how."""
    training, context_length = config.training, config.model.context_length
    batch, optimizer, scheduler = training.batch, training.optimizer, training.scheduler
    assert optimizer is not None  # absent means the recipe
    backend = f"{dist.get_world_size()} ranks over {dist.get_backend()}"
    numel = text.train.numel() + text.held_out.numel()
    schedule = f"schedule {scheduler.type}" if scheduler else "a constant rate"
    clipping = (
        f"clipped to norm {training.gradient_clipping:g}" if training.gradient_clipping else "whole"
    )
    rate = optimizer.params["lr"]
    sequences = f"{batch.train_batch_size} sequences of {context_length} bytes"
    shares = f"{batch.num_ranks} ranks x {batch.accumulation_steps} x {batch.micro_batch_size}"
    precision = "bf16" if training.bf16 else "fp32"
    return [
        f"plait {plait.__version__}",
        f"model    byte-level GPT, {num_parameters:,} parameters",
        f"data     {text.name}, {numel:,} bytes, {text.held_out.numel():,} of them held out",
        f"ranks    {backend}, ZeRO stage {training.stage}, {precision}",
        f"batch    {sequences} = {shares} (ranks x accumulation x micro-batch)",
        f"update   {optimizer.type}, lr {rate}, {schedule}, gradients {clipping}",
    ]


def _printable(text: str) -> str:
    """`text` without what would steer a terminal or what its encoding does not have."""
    shown = "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
    encoding = sys.stdout.encoding or "ascii"
    return shown.encode(encoding, errors="replace").decode(encoding)
