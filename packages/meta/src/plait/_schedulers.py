"""The schedule a configuration names: its parameters checked, its rule built."""

from __future__ import annotations

from dataclasses import dataclass

from plait._config import SchedulerConfig
from plait._kinds import Integer, Kind, Number, OneOf, UnfitValueError
from plait._problems import Problem, nearest_key, shown
from plait._schedule import Rate, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["SCHEDULERS", "check_scheduler", "scheduler_rate"]

_NOT_BUILT_TYPES = ("LRRangeTest", "OneCycle")
_LR = Number(at_least=0.0)
_RATIO = Number(at_least=0.0, at_most=1.0)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a schedule: what it takes, its default (DeepSpeed's), what it means."""

    kind: Kind
    default: object
    meaning: str


_WARMUP = {
    "warmup_num_steps": Parameter(Integer(1), 1000, "updates of warm-up; 1 counts as 2"),
    "warmup_type": Parameter(OneOf(("log", "linear")), "log", "shape of the warm-up"),
}
_LRS = {
    "warmup_min_lr": Parameter(_LR, 0.0, "learning rate of update 0"),
    "warmup_max_lr": Parameter(_LR, None, "learning rate after the warm-up; the optimizer's own"),
}
_TOTAL = {"total_num_steps": Parameter(Integer(1), None, "update at which it ends; `run.steps`")}
_RATIOS = {
    "warmup_min_ratio": Parameter(
        _RATIO, 0.0, "share of the optimizer's learning rate at update 0"
    ),
    "cos_min_ratio": Parameter(_RATIO, 0.0001, "share of it at the end"),
}
SCHEDULERS: dict[str, dict[str, Parameter]] = {
    "WarmupLR": _LRS | _WARMUP,
    "WarmupDecayLR": _LRS | _WARMUP | _TOTAL,
    "WarmupCosineLR": _RATIOS | _WARMUP | _TOTAL,
}


def _type_problem(name: str, origin: str) -> Problem | None:
    if name in SCHEDULERS:
        return None
    expected = " or ".join(SCHEDULERS)
    if name in _NOT_BUILT_TYPES:
        reason = "this schedule is not built yet"
        return Problem(
            path="scheduler.type", reason=reason, expected=expected, got=shown(name), origin=origin
        )
    near = nearest_key(name, SCHEDULERS)
    hint = f"did you mean {near}?" if near else ""
    return Problem(
        path="scheduler.type", expected=expected, got=shown(name), origin=origin, hint=hint
    )


def check_scheduler(
    name: str, given: dict[str, object], origins: dict[str, str]
) -> tuple[dict[str, object], list[Problem]]:
    """Check a schedule's type and parameters.

    Args:
        name: ``scheduler.type``.
        given: ``scheduler.params`` as read from JSON.
        origins: Where the type and each parameter came from, by name (``type`` for the type).

    Returns:
        Every parameter of the schedule, and everything that is wrong.
    """
    wrong_type = _type_problem(name, origins.get("type", ""))
    if wrong_type:
        return {}, [wrong_type]
    known = SCHEDULERS[name]
    checked = {key: parameter.default for key, parameter in known.items()}
    problems = []
    for key, value in given.items():
        path, origin = f"scheduler.params.{key}", origins.get(key, "")
        if key not in known:
            near = nearest_key(key, known)
            hint = (
                f"did you mean scheduler.params.{near}?" if near else f"known: {', '.join(known)}"
            )
            reason = f"unknown parameter of {name}"
            problems.append(
                Problem(path=path, reason=reason, got=shown(value), origin=origin, hint=hint)
            )
        elif value is not None or known[key].default is not None:
            try:
                checked[key] = known[key].kind.read(value)
            except UnfitValueError:
                expected = known[key].kind.expected
                problems.append(
                    Problem(path=path, expected=expected, got=shown(value), origin=origin)
                )
    return checked, problems


def scheduler_rate(config: SchedulerConfig | None, *, num_steps: int) -> Rate | None:
    """The rule of a schedule; None for a constant rate.

    A `total_num_steps` that is None means `num_steps`, the length of the run.
    """
    rates: dict[str, type[WarmupLR] | type[WarmupDecayLR] | type[WarmupCosineLR]] = {
        "WarmupLR": WarmupLR,
        "WarmupDecayLR": WarmupDecayLR,
        "WarmupCosineLR": WarmupCosineLR,
    }
    if config is None:
        return None
    params = config.params
    if "total_num_steps" in params and params["total_num_steps"] is None:
        params = params | {"total_num_steps": num_steps}
    return rates[config.type](**params)  # type: ignore[arg-type]  # kinds checked by SCHEDULERS
