"""Drives an optimizer's learning rates, and momenta, by a rule."""

from __future__ import annotations

import torch

from plait._schedule_warmups import Rate

__all__ = ["Schedule"]


class Schedule:
    """Sets the learning rate of every group of an optimizer, update by update.

    Construction sets the rate of update 0; each `step()` that of the next one. Groups keep the
    learning rate they were built with as the base; None as `rate` leaves it constant. A rule that
    has a momentum sets the first of a group's ``betas``, where the group has some.

    Args:
        optimizer: Its groups' ``lr`` is written.
        rate: The rule.

    Raises:
        ValueError: The rule has numbers for another count of parameter groups; by `step()`: the
            momentum has risen to 1.

    Example:
        >>> from plait._schedule_warmups import WarmupLR
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> schedule = Schedule(optimizer, WarmupLR(warmup_num_steps=4, warmup_type="linear"))
        >>> schedule.step()
        >>> schedule.get_last_lr()
        [0.125]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Rate | None) -> None:
        if rate is not None:
            rate.check_groups(len(optimizer.param_groups))
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
        groups = zip(self.optimizer.param_groups, self.base_lrs, strict=True)
        for index, (group, base_lr) in enumerate(groups):
            if self.rate is None:
                group["lr"] = base_lr
                continue
            group["lr"] = self.rate(num_steps, base_lr, index)
            momentum = self.rate.momentum(num_steps, index)
            if momentum is not None and "betas" in group:
                _check_below_one(momentum, num_steps)
                group["betas"] = (momentum, group["betas"][1])

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group, as torch's schedulers name it."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, object]:
        """The updates counted so far and the learning rates it began with."""
        return {"num_steps": self.num_steps, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on where another schedule was."""
        num_steps, base_lrs = self.check_state_dict(state)
        self.base_lrs = base_lrs
        self.seek(num_steps)

    def check_state_dict(self, state: dict[str, object]) -> tuple[int, list[float]]:
        """The updates and learning rates of a state.

        Raises:
            TypeError: It is not the state of a schedule.
            ValueError: It is that of another count of parameter groups.
        """
        num_steps, base_lrs = state.get("num_steps"), state.get("base_lrs")
        if not (
            type(num_steps) is int
            and isinstance(base_lrs, list)
            and all(type(base_lr) in (int, float) for base_lr in base_lrs)
        ):
            raise TypeError(f"this is not the state of a schedule: {state}")
        if len(base_lrs) != len(self.base_lrs):
            raise ValueError(
                f"the schedule had {len(base_lrs)} parameter groups, this one has "
                f"{len(self.base_lrs)}"
            )
        return num_steps, [float(base_lr) for base_lr in base_lrs]


def _check_below_one(momentum: float, num_steps: int) -> None:
    if momentum >= 1:
        raise ValueError(
            f"scheduler.params.decay_mom_rate: at update {num_steps} the momentum would be "
            f"{momentum:g}, and must be below 1; write a smaller rate, or end the training before"
        )
