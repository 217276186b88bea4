"""The training loop of one rank, assembled from `zero_partition` and the example.

What a researcher writes by hand is in `_assemble` and `_update`; the rest is bookkeeping.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from plait._batches import Batches
from plait._config import Config
from plait._devices import memory_bytes
from plait._metrics import StepMetrics
from plait._model import ByteGPT, generate
from plait._optimizers import optimizer_class
from plait._partitioning import partition_as
from plait._report import Report
from plait._run_folder import RunPlan, keep_newest, start_folder
from plait._schedule import Schedule
from plait._schedulers import scheduler_rate
from plait._text import Text, load_text
from zero_partition import Zero

__all__ = ["TrainingError", "train"]

_PROMPT_BYTES = 64


class TrainingError(RuntimeError):
    """The training cannot go on; the message says at which step and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a step works on."""

    config: Config
    batches: Batches
    model: ByteGPT
    zero: Zero
    optimizer: Any  # of torch's class, with a step() that says whether it stepped
    schedule: Schedule
    device: torch.device


def train(config: Config, plan: RunPlan, *, device: torch.device) -> None:
    """Train as one of the ranks of the default process group.

    Args:
        config: The same on all ranks.
        plan: Where to write (rank 0 does) and what to continue.
        device: Where this rank computes.

    Raises:
        TextError: The text cannot be trained on.
        TrainingError: The optimizer cannot be sharded, the loss is no longer finite, or no step is
            left to train.
        zero_partition.CheckpointError: The checkpoint does not fit or is damaged.
    """
    text = load_text(config.data.path, context_length=config.model.context_length)
    training = _assemble(config, text, device)
    first_step, notes = _restore(training, plan, text)
    report = None
    if dist.get_rank() == 0:
        start_folder(plan, config)
        num_parameters = sum(parameter.numel() for parameter in training.model.parameters())
        report = Report(
            config,
            plan,
            text,
            num_parameters=num_parameters,
            first_step=first_step,
            notes=notes,
        )
    dist.barrier()
    for metrics in _steps(training, first_step):
        if report:
            report.step(metrics)
        if _save_is_due(config, num_updates=metrics.step + 1):
            _save(training, plan, text, num_updates=metrics.step + 1)
    sample = _sample(training, text)
    if report:
        report.finish(sample, training.zero.memory)


def _assemble(config: Config, text: Text, device: torch.device) -> Training:
    torch.manual_seed(config.run.seed)
    model = ByteGPT(config.model).to(device)
    wanted = config.training
    zero = partition_as(wanted, model)
    optimizer = _optimizer(zero, config)
    schedule = Schedule(optimizer, scheduler_rate(wanted.scheduler, num_steps=config.run.steps))
    batches = Batches(
        text,
        wanted.batch,
        context_length=config.model.context_length,
        seed=config.run.seed,
        rank=zero.rank,
        device=device,
    )
    return Training(
        config=config,
        batches=batches,
        model=model,
        zero=zero,
        optimizer=optimizer,
        schedule=schedule,
        device=device,
    )


def _optimizer(zero: Zero, config: Config) -> Any:
    wanted = config.training.optimizer
    assert wanted is not None  # absent means the recipe
    cls, options = optimizer_class(wanted.type, wanted.params)
    try:
        return zero.optimizer(cls, **options)
    except ValueError as error:
        raise TrainingError(f"optimizer.type {wanted.type}: {error}") from error


def _steps(training: Training, first_step: int) -> Iterator[StepMetrics]:
    """Train from `first_step` on; yields the same metrics on all ranks but for the memory."""
    run, batch = training.config.run, training.config.training.batch
    trained_bytes = batch.train_batch_size * training.config.model.context_length
    tokens_per_s = 0.0
    for step in range(first_step, run.steps + 1):
        last = step == run.steps
        val_loss = _evaluate(training) if last or step % run.eval_every == 0 else None
        start_s = time.perf_counter()
        if last:
            loss = _mean_over_ranks(_forward_only(training, step))
        else:
            loss = _mean_over_ranks(_update(training, step))
            tokens_per_s = trained_bytes / (time.perf_counter() - start_s)
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss is {loss} at step {step}; a lower optimizer.params.lr or "
                "gradient_clipping usually helps; the checkpoints written before stay as they are"
            )
        yield StepMetrics(
            step=step,
            loss=loss,
            val_loss=val_loss,
            tokens_per_s=tokens_per_s,
            memory_bytes=memory_bytes(training.device),
        )


def _update(training: Training, step: int) -> Tensor:
    """One update; returns this rank's mean loss before it."""
    wanted, zero = training.config.training, training.zero
    accumulation_steps = wanted.batch.accumulation_steps
    loss_sum = torch.zeros((), device=training.device)
    for tokens, targets in training.batches.micro_batches(step):
        loss = _loss(training.model, tokens, targets)
        loss.backward()
        loss_sum += loss.detach()
    zero.finish(denominator=zero.num_ranks * accumulation_steps)
    if wanted.gradient_clipping:
        zero.clip_grad_norm_(wanted.gradient_clipping)
    if training.optimizer.step():
        training.schedule.step()
    training.optimizer.zero_grad()
    return loss_sum / accumulation_steps


def _loss(model: ByteGPT, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean over all bytes, in nats."""
    return F.cross_entropy(model(tokens_BT).flatten(0, 1), targets_BT.flatten())


@torch.no_grad()
def _forward_only(training: Training, step: int) -> Tensor:
    losses = [_loss(training.model, *batch) for batch in training.batches.micro_batches(step)]
    return torch.stack(losses).mean()


@torch.no_grad()
def _evaluate(training: Training) -> float:
    """Mean loss over the held-out windows, the same for any number of ranks but for rounding."""
    sums = torch.zeros(2, dtype=torch.float64, device=training.device)
    training.model.eval()
    for tokens_BT, targets_BT, count in training.batches.held_out(training.config.run.eval_windows):
        logits_BTV = training.model(tokens_BT)
        losses_BT = F.cross_entropy(logits_BTV.transpose(1, 2), targets_BT, reduction="none")
        losses_BT = losses_BT[:count].double()
        sums[0] += losses_BT.sum()
        sums[1] += losses_BT.numel()
    training.model.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def _mean_over_ranks(value: Tensor) -> float:
    total = value.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _save_is_due(config: Config, *, num_updates: int) -> bool:
    if num_updates > config.run.steps:
        return False
    return num_updates == config.run.steps or num_updates % config.run.save_every == 0


def _save(training: Training, plan: RunPlan, text: Text, *, num_updates: int) -> None:
    seed = training.config.run.seed
    state = {
        "step": num_updates,
        "data": {
            "seed": seed,
            "next_batch": num_updates,
            "sha256": text.sha256,
        },
        "train_batch_size": training.config.training.batch.train_batch_size,
    }
    path = plan.checkpoints / f"step-{num_updates}"
    training.zero.save(path, training.optimizer, state=state)
    if training.zero.rank == 0:
        keep_newest(plan)


def _restore(training: Training, plan: RunPlan, text: Text) -> tuple[int, list[str]]:
    """Load the checkpoint of the plan; returns its step and what differs from the run before."""
    if plan.resumed is None:
        return 0, []
    state = training.zero.load(plan.resumed.checkpoint, training.optimizer)
    if not isinstance(state, dict) or not {"step", "data", "train_batch_size"} <= state.keys():
        raise TrainingError(
            f"{plan.resumed.checkpoint} is not a checkpoint of plait train: its state is {state!r}"
        )
    step: int = state["step"]
    if step >= training.config.run.steps:
        raise TrainingError(
            f"{plan.resumed.checkpoint} is at step {step} of {training.config.run.steps}"
        )
    training.schedule.seek(step)
    train_batch_size = training.config.training.batch.train_batch_size
    now = {
        "train_batch_size": (state["train_batch_size"], train_batch_size),
        "run.seed": (state["data"]["seed"], training.config.run.seed),
        "the text": (state["data"]["sha256"][:12], text.sha256[:12]),
    }
    notes = [
        f"{name} was {before} and is {after}: the curve will not be that of an undisturbed run"
        for name, (before, after) in now.items()
        if before != after
    ]
    return step, notes


def _sample(training: Training, text: Text) -> tuple[bytes, bytes]:
    """A piece of held-out text and how the model continues it."""
    prompt = bytes(text.held_out[:_PROMPT_BYTES].tolist())
    run = training.config.run
    training.model.eval()
    added = generate(
        training.model, prompt, num_bytes=run.sample_bytes, seed=run.seed, device=training.device
    )
    return prompt, added
