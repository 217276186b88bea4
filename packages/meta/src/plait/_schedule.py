"""Learning rates by update: DeepSpeed's schedules as pure functions of the update's number.

Update k (k = 0, 1, ...) runs with ``rate(k, lr)``, where lr is the optimizer's own learning rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

__all__ = ["Rate", "Schedule", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "WarmupType"]

WarmupType = Literal["log", "linear"]


class Rate(Protocol):
    """The learning rate of update `step` for a group whose own learning rate is `lr`."""

    def __call__(self, step: int, lr: float, /) -> float: ...


def _warmed_share(step: int, num_steps: int, kind: WarmupType) -> float:
    """Share of the warm-up done at `step` < `num_steps`, 0 at step 0."""
    if kind == "linear":
        return step / num_steps
    return (1.0 / math.log(num_steps)) * math.log(step + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupLR:
    """From `warmup_min_lr` up to `warmup_max_lr` over `warmup_num_steps` updates, then constant.

    Args:
        warmup_min_lr: Learning rate of update 0.
        warmup_max_lr: Learning rate after the warm-up; None means the optimizer's own.
        warmup_num_steps: Length of the warm-up; 1 counts as 2.
        warmup_type: ``"log"`` rises with log(k + 1), ``"linear"`` with k.

    Source:
        DeepSpeed 0.19, ``runtime/lr_schedules.py``: the values of its ``get_lr()`` at iteration k.
    """

    warmup_min_lr: float = 0.0
    warmup_max_lr: float | None = None
    warmup_num_steps: int = 1000
    warmup_type: WarmupType = "log"

    def __call__(self, step: int, lr: float, /) -> float:
        top = lr if self.warmup_max_lr is None else self.warmup_max_lr
        return self.warmup_min_lr + (top - self.warmup_min_lr) * self._share(step)

    def _share(self, step: int) -> float:
        num_steps = max(2, self.warmup_num_steps)
        return _warmed_share(step, num_steps, self.warmup_type) if step < num_steps else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linearly down to `warmup_min_lr` at update `total_num_steps`."""

    total_num_steps: int

    def _share(self, step: int) -> float:
        num_steps = max(2, self.warmup_num_steps)
        if step < num_steps:
            return _warmed_share(step, num_steps, self.warmup_type)
        decay_steps = max(1.0, self.total_num_steps - num_steps)
        return max(0.0, (self.total_num_steps - step) / decay_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupCosineLR:
    """From ``warmup_min_ratio * lr`` up to ``lr``, then along a cosine to ``cos_min_ratio * lr``.

    Args:
        total_num_steps: Update at which the cosine ends; the rate stays there afterwards.
        warmup_min_ratio: Share of the learning rate at update 0.
        warmup_num_steps: Length of the warm-up; 1 counts as 2.
        cos_min_ratio: Share of the learning rate at the end.
        warmup_type: As in `WarmupLR`.

    Source:
        DeepSpeed 0.19, ``runtime/lr_schedules.py``.
    """

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: WarmupType = "log"

    def __call__(self, step: int, lr: float, /) -> float:
        return lr * self._ratio(step)

    def _ratio(self, step: int) -> float:
        num_steps = max(2, self.warmup_num_steps)
        if step < num_steps:
            share = _warmed_share(step, num_steps, self.warmup_type)
            return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)
        progress = min(1.0, (step - num_steps + 1) / max(1, self.total_num_steps - num_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


class Schedule:
    """Sets the learning rate of every group of an optimizer, update by update.

    Construction sets the rate of update 0; each `step()` that of the next one. Groups keep the
    learning rate they were built with as the base; None as `rate` leaves it constant.

    Args:
        optimizer: Its groups' ``lr`` is written.
        rate: The rule.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> schedule = Schedule(optimizer, WarmupLR(warmup_num_steps=4, warmup_type="linear"))
        >>> schedule.step()
        >>> schedule.get_last_lr()
        [0.125]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Rate | None) -> None:
        self.optimizer = optimizer
        self.rate = rate
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.seek(0)

    def step(self) -> None:
        """Go on to the next update."""
        self.seek(self.num_steps + 1)

    def seek(self, num_steps: int) -> None:
        """Set the rates of update `num_steps`, as after that many calls of `step()`."""
        self.num_steps = num_steps
        for group, base_lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base_lr if self.rate is None else self.rate(num_steps, base_lr)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group, as torch's schedulers name it."""
        return [group["lr"] for group in self.optimizer.param_groups]
