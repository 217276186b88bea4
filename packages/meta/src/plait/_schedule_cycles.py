"""Learning rates that go up and down: DeepSpeed's OneCycle and LRRangeTest.

Pure functions of the update's number, as those of `_schedule_warmups`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait._schedule_warmups import GroupNumber, Rate, of_group

__all__ = ["LRRangeTest", "OneCycle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LRRangeTest(Rate):
    """Rises without end, to find the rate at which a training diverges.

    Update k runs with ``lr_range_test_min_lr * (1 + lr_range_test_step_rate * k / size)``, where
    ``k / size`` is rounded down in a staircase.

    Args:
        lr_range_test_min_lr: Learning rate of update 0.
        lr_range_test_step_size: Updates in which the rate grows by its share.
        lr_range_test_step_rate: That share of the first rate.
        lr_range_test_staircase: Rise at once after each of these many updates.

    Source:
        DeepSpeed 0.19, ``runtime/lr_schedules.py``: what its engine runs update k with.
    """

    lr_range_test_min_lr: GroupNumber = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def __call__(self, step: int, lr: float, group: int = 0, /) -> float:
        del lr  # DeepSpeed's rule sets it
        intervals = step / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        start = of_group(self.lr_range_test_min_lr, group)
        return start * (1 + self.lr_range_test_step_rate * intervals)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneCycle(Rate):
    """Up from `cycle_min_lr` to `cycle_max_lr`, down again, then slowly further down.

    The momentum (the first of an optimizer's ``betas``) goes the other way. n updates after the
    cycle the rate is divided by ``1 + decay_lr_rate * n / decay_step_size``, and the momentum
    multiplied by ``1 + decay_mom_rate * n / decay_step_size``. It reaches 1, with which no
    optimizer works, at ``n = decay_step_size * (1 / cycle_max_mom - 1) / decay_mom_rate``.

    Args:
        cycle_min_lr: Learning rate of update 0 and at the end of the cycle.
        cycle_max_lr: Learning rate at the top.
        decay_lr_rate: How fast the rate falls after the cycle.
        cycle_first_step_size: Updates of the way up.
        cycle_second_step_size: Updates of the way down; None is as many.
        cycle_first_stair_count: Stairs of the way up; 0 is a straight line.
        cycle_second_stair_count: Stairs of the way down; None is as many.
        decay_step_size: Updates of one decay; 0 is none.
        cycle_momentum: Whether the momentum moves too.
        cycle_min_mom: Momentum at the top, and of update 0.
        cycle_max_mom: Momentum at both ends of the cycle.
        decay_mom_rate: How fast the momentum rises after the cycle.

    Source:
        DeepSpeed 0.19, ``runtime/lr_schedules.py``: what its engine runs update k with. Its second
        beta becomes 0.99; here it stays the optimizer's own.
    """

    cycle_min_lr: GroupNumber
    cycle_max_lr: GroupNumber
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: GroupNumber = 0.8
    cycle_max_mom: GroupNumber = 0.9
    decay_mom_rate: float = 0.0

    def __call__(self, step: int, lr: float, group: int = 0, /) -> float:
        del lr  # DeepSpeed's rule sets it
        bottom, top = of_group(self.cycle_min_lr, group), of_group(self.cycle_max_lr, group)
        if step <= self._num_steps:
            return bottom + (top - bottom) * self._height(step)
        return bottom / (1 + self.decay_lr_rate * self._decays(step))

    def momentum(self, step: int, group: int = 0, /) -> float | None:
        if not self.cycle_momentum:
            return None
        bottom, top = of_group(self.cycle_min_mom, group), of_group(self.cycle_max_mom, group)
        if step == 0:
            return bottom
        if step <= self._num_steps:
            return top - (top - bottom) * self._height(step)
        return top * (1 + self.decay_mom_rate * self._decays(step))

    def last_step(self) -> int | None:
        """The last update before the momentum reaches 1; None where it never does."""
        if not (self.cycle_momentum and self.decay_mom_rate and self.decay_step_size):
            return None
        tops = self.cycle_max_mom
        top = max(tops) if isinstance(tops, tuple) else tops
        if not top:
            return None
        num_more = math.ceil(self.decay_step_size * (1 / top - 1) / self.decay_mom_rate) - 1
        return self._num_steps + max(0, num_more)

    @property
    def _second_size(self) -> int:
        second = self.cycle_second_step_size
        return self.cycle_first_step_size if second is None else second

    @property
    def _num_steps(self) -> int:
        return self.cycle_first_step_size + self._second_size

    def _height(self, step: int) -> float:
        """0 at both ends of the cycle, 1 at its top."""
        second = self.cycle_second_stair_count
        if step <= self.cycle_first_step_size and (self._second_size or step < self._num_steps):
            done, size = step, self.cycle_first_step_size
            num_stairs = self.cycle_first_stair_count
        else:
            done, size = self._num_steps - step, max(1, self._second_size)
            num_stairs = self.cycle_first_stair_count if second is None else second
        return (done * num_stairs // size) / num_stairs if num_stairs else done / size

    def _decays(self, step: int) -> float:
        if not self.decay_step_size:
            return 0.0
        return (step - self._num_steps) / self.decay_step_size
