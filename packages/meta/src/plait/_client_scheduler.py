"""The schedule of an engine: the caller's, moved to the sharded optimizer, or the file's."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from plait._config import SchedulerConfig
from plait._schedule import Schedule
from plait._schedulers import scheduler_rate

__all__ = ["Scheduler", "check_client_scheduler", "make_scheduler", "scheduler_name"]


@runtime_checkable
class Scheduler(Protocol):
    """What an engine steps after each update."""

    def step(self) -> None:
        """Go on to the next update."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """The inverse of `state_dict`."""
        ...


class _Unchanging(LRScheduler):
    """Leaves every rate as it is; torch's constructor begins to follow the optimizer's steps."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]


def check_client_scheduler(given: object, optimizer: object) -> None:
    """Refuse a schedule that cannot be moved, before anything is changed.

    Args:
        given: ``lr_scheduler``.
        optimizer: ``optimizer``, as the caller passed it.

    Raises:
        TypeError: Neither torch's LRScheduler nor a callable.
        ValueError: Bound to an optimizer that was not passed, or stepped by a metric.
    """
    if given is None:
        return
    if not isinstance(given, LRScheduler):
        if not callable(given):
            raise TypeError(
                "lr_scheduler: expected a torch LRScheduler or a callable that makes a schedule of "
                f"the optimizer, got {type(given).__name__}"
            )
        return
    for part in _parts(given):
        if isinstance(part, ReduceLROnPlateau):
            raise ValueError(
                "lr_scheduler: ReduceLROnPlateau steps by a metric that the engine does not know; "
                "make it of the optimizer that initialize() returns, and step it yourself"
            )
        if part.optimizer is not optimizer:
            raise ValueError(
                f"lr_scheduler: this {type(part).__name__} belongs to an optimizer that was not "
                "passed as optimizer; pass that one too, or a callable that makes the schedule"
            )


def _parts(scheduler: LRScheduler) -> list[LRScheduler]:
    """The schedule and those it is composed of."""
    found = [scheduler]
    if isinstance(scheduler, SequentialLR | ChainedScheduler):
        for inner in scheduler._schedulers:
            found += _parts(inner)
    return found


def scheduler_name(scheduler: Scheduler) -> str:
    """Its kind: the name of its class, or of the rule that the file names."""
    ours = scheduler.rate if isinstance(scheduler, Schedule) else None
    return type(scheduler if ours is None else ours).__name__


def make_scheduler(
    given: Any, config: SchedulerConfig | None, optimizer: torch.optim.Optimizer
) -> Scheduler | None:
    """The schedule of `optimizer`: the one passed before the file's; None for constant rates.

    Raises:
        TypeError: The callable returned something without `step` and `state_dict`.
    """
    if isinstance(given, LRScheduler):
        _Unchanging(optimizer)
        for part in _parts(given):
            part.optimizer = optimizer
        return given
    if given is not None:
        made = given(optimizer)
        if not isinstance(made, Scheduler):
            raise TypeError(
                "lr_scheduler: the callable was expected to return a schedule with step(), "
                f"state_dict() and load_state_dict(), it returned {type(made).__name__}"
            )
        return made
    rate = scheduler_rate(config, num_steps=None)
    return None if rate is None else Schedule(optimizer, rate)
