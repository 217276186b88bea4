"""The schedule a configuration names: its parameters checked, its rule built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait._config import SchedulerConfig
from plait._fates import Became, Checked, Fate
from plait._kinds import Flag, Integer, Kind, Number, OneOf, PerGroup, UnfitValueError
from plait._problems import Problem, nearest_key, shown, unfit_hint
from plait._schedule_cycles import LRRangeTest, OneCycle
from plait._schedule_warmups import Rate, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["SCHEDULERS", "check_scheduler", "scheduler_rate"]

_LR = PerGroup(Number(at_least=0.0))
_MOMENTUM = PerGroup(Number(at_least=0.0, below=1.0))
_RATIO = Number(at_least=0.0, at_most=1.0)
_GROWTH = Number(at_least=0.0)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a schedule: what it takes, its default (DeepSpeed's), what it means.

    Args:
        kind: What it takes; null too where the default is None and it is not `required`.
        default: Value when it is absent.
        meaning: One phrase for the reader.
        auto: What ``"auto"`` means; empty where nothing can be derived.
        required: Whether it has to be given.
    """

    kind: Kind
    default: object
    meaning: str
    auto: str = ""
    required: bool = False


_WARMUP = {
    "warmup_num_steps": Parameter(Integer(0), 1000, "updates of warm-up; 0 and 1 count as 2"),
    "warmup_type": Parameter(OneOf(("log", "linear")), "log", "shape of the warm-up"),
}
_LRS = {
    "warmup_min_lr": Parameter(_LR, 0.0, "learning rate of update 0", "0"),
    "warmup_max_lr": Parameter(
        _LR,
        None,
        "learning rate after the warm-up; the optimizer's own",
        "the optimizer's learning rate",
    ),
}
_TOTAL = {
    "total_num_steps": Parameter(
        Integer(1), None, "update at which it ends; `run.steps`", "the length of the run"
    )
}
_RATIOS = {
    "warmup_min_ratio": Parameter(
        _RATIO, 0.0, "share of the optimizer's learning rate at update 0"
    ),
    "cos_min_ratio": Parameter(_RATIO, 0.0001, "share of it at the end"),
}
_ONE_CYCLE = {
    "cycle_min_lr": Parameter(
        _LR, None, "learning rate at both ends of the cycle; needed", required=True
    ),
    "cycle_max_lr": Parameter(_LR, None, "learning rate at the top; needed", required=True),
    "decay_lr_rate": Parameter(_GROWTH, 0.0, "how fast the rate falls after the cycle"),
    "cycle_first_step_size": Parameter(Integer(1), 2000, "updates of the way up"),
    "cycle_second_step_size": Parameter(Integer(0), None, "updates of the way down; as many"),
    "cycle_first_stair_count": Parameter(Integer(0), 0, "stairs of the way up; 0 is a line"),
    "cycle_second_stair_count": Parameter(Integer(0), None, "stairs of the way down; as many"),
    "decay_step_size": Parameter(Integer(0), 0, "updates of one decay after the cycle; 0 is none"),
    "cycle_momentum": Parameter(Flag(), True, "move the first of `betas` the other way"),  # noqa: FBT003  its default
    "cycle_min_mom": Parameter(_MOMENTUM, 0.8, "momentum at the top, and of update 0"),
    "cycle_max_mom": Parameter(_MOMENTUM, 0.9, "momentum at both ends of the cycle"),
    "decay_mom_rate": Parameter(_GROWTH, 0.0, "how fast the momentum rises after the cycle"),
}
_RANGE_TEST = {
    "lr_range_test_min_lr": Parameter(_LR, 0.001, "learning rate of update 0"),
    "lr_range_test_step_size": Parameter(Integer(1), 2000, "updates of one rise"),
    "lr_range_test_step_rate": Parameter(_GROWTH, 1.0, "size of one rise, in first rates"),
    "lr_range_test_staircase": Parameter(Flag(), False, "rise at once after a step size"),  # noqa: FBT003  its default
}
SCHEDULERS: dict[str, dict[str, Parameter]] = {
    "WarmupLR": _LRS | _WARMUP,
    "WarmupDecayLR": _LRS | _WARMUP | _TOTAL,
    "WarmupCosineLR": _RATIOS | _WARMUP | _TOTAL,
    "OneCycle": _ONE_CYCLE,
    "LRRangeTest": _RANGE_TEST,
}
_TORCH = "LambdaLR StepLR MultiStepLR ConstantLR LinearLR ExponentialLR CosineAnnealingLR CyclicLR"
_TORCH_TYPES = (*_TORCH.split(), "OneCycleLR", "CosineAnnealingWarmRestarts", "PolynomialLR")


def _type_problem(name: str, origin: str) -> Problem | None:
    if name in SCHEDULERS:
        return None
    *some, last = SCHEDULERS
    expected = f"{', '.join(some)} or {last}"
    near = nearest_key(name, SCHEDULERS)
    hint = f"did you mean {near}?" if near else ""
    if name in _TORCH_TYPES:
        hint = "a schedule of torch.optim goes to plait.initialize as lr_scheduler"
    return Problem(
        path="scheduler.type", expected=expected, got=shown(name), origin=origin, hint=hint
    )


def check_scheduler(
    name: str,
    given: Mapping[str, object],
    origins: Mapping[str, str],
    *,
    num_steps: int | None = None,
) -> Checked:
    """Check a schedule's type and parameters.

    Args:
        name: ``scheduler.type``.
        given: ``scheduler.params`` as read from JSON.
        origins: Where the type and each parameter came from, by name (``type`` for the type).
        num_steps: The length of the run, where it is known: a `total_num_steps` that is not given.

    Returns:
        Every parameter of the schedule, what became of each, and everything that is wrong.
    """
    wrong_type = _type_problem(name, origins.get("type", ""))
    if wrong_type:
        return Checked({}, (), [wrong_type])
    known = SCHEDULERS[name]
    checked = {key: parameter.default for key, parameter in known.items()}
    problems = []
    fates = [Fate("scheduler.type", name, Became.HONOURED, "")]
    for key, value in given.items():
        wrong = _problem(name, key, value, has_length=num_steps is not None)
        path = f"scheduler.params.{key}"
        if wrong:
            origin = origins.get(key, "")
            problems.append(Problem(path=path, got=shown(value), origin=origin, **wrong))
        elif value == "auto":
            filled = num_steps if key == "total_num_steps" else known[key].default
            fates.append(Fate(path, filled, Became.DERIVED, f"auto: {known[key].auto}"))
        else:
            checked[key] = None if value is None else known[key].kind.read(value)
            fates.append(Fate(path, value, Became.HONOURED, ""))
    problems += _missing(name, given, has_length=num_steps is not None)
    return Checked(checked, tuple(fates), problems)


def _problem(name: str, key: str, value: object, *, has_length: bool) -> dict[str, str]:
    """What is wrong with a parameter; empty where nothing is."""
    known = SCHEDULERS[name]
    if key not in known:
        near = nearest_key(key, known)
        hint = f"did you mean scheduler.params.{near}?" if near else f"known: {', '.join(known)}"
        return {"reason": f"unknown parameter of {name}", "hint": hint}
    parameter = known[key]
    if value == "auto":
        if parameter.auto and (has_length or key != "total_num_steps"):
            return {}
        return {"reason": '"auto" has no source here: write the value'}
    if value is None and parameter.default is None and not parameter.required:
        return {}
    try:
        parameter.kind.read(value)
    except UnfitValueError:
        return {"expected": parameter.kind.expected, "hint": unfit_hint(parameter.kind, value)}
    return {}


def _missing(name: str, given: Mapping[str, object], *, has_length: bool) -> list[Problem]:
    """Parameters that have to be given and are not."""
    missing = [key for key, value in SCHEDULERS[name].items() if value.required]
    hint = "write it"
    if "total_num_steps" in SCHEDULERS[name] and not has_length:
        missing.append("total_num_steps")
        hint = "write the number of updates the training will make"
    return [
        Problem(path=f"scheduler.params.{key}", reason=f"{name} needs it", hint=hint)
        for key in missing
        if given.get(key) is None
    ]


def scheduler_rate(config: SchedulerConfig | None, *, num_steps: int | None = None) -> Rate | None:
    """The rule of a schedule; None for a constant rate.

    A `total_num_steps` that is None means `num_steps`, the length of the run.
    """
    if config is None:
        return None
    rates: dict[str, type[Rate]] = {
        "WarmupLR": WarmupLR,
        "WarmupDecayLR": WarmupDecayLR,
        "WarmupCosineLR": WarmupCosineLR,
        "OneCycle": OneCycle,
        "LRRangeTest": LRRangeTest,
    }
    params = config.params
    if "total_num_steps" in params and params["total_num_steps"] is None:
        params = params | {"total_num_steps": num_steps}
    return rates[config.type](**params)
