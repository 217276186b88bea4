"""Learning rates by update: DeepSpeed's warm-ups as pure functions of the update's number.

Update k (k = 0, 1, ...) runs with ``rate(k, lr)``, where lr is the optimizer's own learning rate.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Literal

__all__ = [
    "GroupNumber",
    "Rate",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "WarmupType",
    "of_group",
]

WarmupType = Literal["log", "linear"]
GroupNumber = float | tuple[float, ...]
"""A number for all parameter groups, or one for each."""


def of_group(value: GroupNumber, group: int) -> float:
    """The number that `value` has for a parameter group."""
    return value[group] if isinstance(value, tuple) else value


class Rate(ABC):
    """A rule for the learning rate, and maybe the momentum, of every update."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, step: int, lr: float, group: int = 0, /) -> float:
        """The learning rate of update `step` for a group whose own learning rate is `lr`."""

    def momentum(self, step: int, group: int = 0, /) -> float | None:
        """The momentum of update `step`; None leaves it alone."""
        del step, group
        return None

    def last_step(self) -> int | None:
        """The last update that the rule has values for; None where there is none."""
        return None

    def check_groups(self, num_groups: int) -> None:
        """Raise ValueError where a list has not one number for each parameter group."""
        for field in fields(self):  # type: ignore[arg-type]  # every rule is a dataclass
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) != num_groups:
                raise ValueError(
                    f"scheduler.params.{field.name}: expected {num_groups} "
                    f"number{'s' * (num_groups != 1)}, one for each parameter group, got "
                    f"{len(value)}"
                )


def _warmed_share(step: int, num_steps: int, kind: WarmupType) -> float:
    """Share of the warm-up done at `step` < `num_steps`, 0 at step 0."""
    if kind == "linear":
        return step / num_steps
    return (1.0 / math.log(num_steps)) * math.log(step + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupLR(Rate):
    """From `warmup_min_lr` up to `warmup_max_lr` over `warmup_num_steps` updates, then constant.

    Args:
        warmup_min_lr: Learning rate of update 0.
        warmup_max_lr: Learning rate after the warm-up; None means the optimizer's own.
        warmup_num_steps: Length of the warm-up; 0 and 1 count as 2.
        warmup_type: ``"log"`` rises with log(k + 1), ``"linear"`` with k.

    Source:
        DeepSpeed 0.19, ``runtime/lr_schedules.py``: its ``get_lr()`` at iteration k. Its engine
        runs update 0 before the schedule has begun, at `warmup_min_lr`, and update k at k - 1.
    """

    warmup_min_lr: GroupNumber = 0.0
    warmup_max_lr: GroupNumber | None = None
    warmup_num_steps: int = 1000
    warmup_type: WarmupType = "log"

    def __call__(self, step: int, lr: float, group: int = 0, /) -> float:
        bottom = of_group(self.warmup_min_lr, group)
        top = lr if self.warmup_max_lr is None else of_group(self.warmup_max_lr, group)
        return bottom + (top - bottom) * self._share(step)

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
class WarmupCosineLR(Rate):
    """From ``warmup_min_ratio * lr`` up to ``lr``, then along a cosine to ``cos_min_ratio * lr``.

    Args:
        total_num_steps: Update at which the cosine ends; the rate stays there afterwards.
        warmup_min_ratio: Share of the learning rate at update 0.
        warmup_num_steps: Length of the warm-up; 0 and 1 count as 2.
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

    def __call__(self, step: int, lr: float, group: int = 0, /) -> float:
        del group
        return lr * self._ratio(step)

    def _ratio(self, step: int) -> float:
        num_steps = max(2, self.warmup_num_steps)
        if step < num_steps:
            share = _warmed_share(step, num_steps, self.warmup_type)
            return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio)
        progress = min(1.0, (step - num_steps + 1) / max(1, self.total_num_steps - num_steps))
        cosine = (1 + math.cos(math.pi * progress)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)
