"""The optimizer a configuration names: torch's class, its options checked one by one."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from plait._deepspeed_keys import NOT_BUILT
from plait._kinds import Flag, Kind, Number, NumberList, UnfitValueError
from plait._problems import Problem, nearest_key, shown

__all__ = ["check_optimizer", "optimizer_class"]

# DeepSpeed's own optimizers, and torch's that need more than a gradient an element.
_NOT_BUILT_TYPES = frozenset(
    [
        *("lamb", "lion", "muon", "muadam", "muadamw", "musgd"),
        *("onebitadam", "onebitlamb", "zerooneadam", "sparseadam", "lbfgs"),
    ]
)
_RATE = Number(at_least=0.0)
_KINDS: dict[str, Kind] = {
    "lr": _RATE,
    "eps": _RATE,
    "weight_decay": _RATE,
    "momentum": _RATE,
    "dampening": Number(),
    "lr_decay": _RATE,
    "betas": NumberList(2, Number(at_least=0.0, below=1.0)),
    "adam_w_mode": Flag(),
    "foreach": Flag(),
    "fused": Flag(),
}
_COMMON = ("lr", "betas", "eps", "weight_decay")
_NOT_AN_OPTION = frozenset(["self", "params", "differentiable", "capturable"])


def _torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """The optimizers of torch by lower-case name."""
    found = {}
    for name, value in vars(torch.optim).items():
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer):
            found[name.lower()] = value
    del found["optimizer"]
    return {name: value for name, value in found.items() if name not in _NOT_BUILT_TYPES}


def optimizer_class(
    name: str, params: dict[str, object]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class for a type and its options, both checked before.

    ``Adam`` is AdamW unless ``adam_w_mode`` is false, as in DeepSpeed.
    """
    options = {key: value for key, value in params.items() if key != "adam_w_mode"}
    decoupled = name.lower() == "adam" and params.get("adam_w_mode", True)
    return _torch_classes()["adamw" if decoupled else name.lower()], options


def _type_problem(name: str, origin: str) -> Problem | None:
    classes = _torch_classes()
    if name.lower() in classes:
        return None
    if name.lower() in _NOT_BUILT_TYPES:
        reason = "this optimizer is not built yet"
        hint = "use AdamW, Adam, SGD or another elementwise optimizer of torch.optim"
        return Problem(
            path="optimizer.type", reason=reason, got=shown(name), origin=origin, hint=hint
        )
    near = nearest_key(name, [value.__name__ for value in classes.values()])
    expected = "the name of an optimizer of torch.optim, such as AdamW, Adam or SGD"
    hint = f"did you mean {near}?" if near else ""
    return Problem(
        path="optimizer.type", expected=expected, got=shown(name), origin=origin, hint=hint
    )


def _kind_of(parameter: inspect.Parameter) -> Kind:
    if parameter.name in _KINDS:
        return _KINDS[parameter.name]
    default = parameter.default
    if isinstance(default, bool):
        return Flag()
    if isinstance(default, tuple):
        return NumberList(len(default), Number())
    return Number()


def check_optimizer(
    name: str, given: dict[str, object], origins: dict[str, str]
) -> tuple[dict[str, object], list[Problem]]:
    """Check a type and its parameters.

    Args:
        name: ``optimizer.type``, in any case.
        given: ``optimizer.params`` as read from JSON.
        origins: Where the type and each parameter came from, by name (``type`` for the type).

    Returns:
        The options as the class takes them, and everything that is wrong.
    """
    wrong_type = _type_problem(name, origins.get("type", ""))
    if wrong_type:
        common = {key: value for key, value in given.items() if key in _COMMON}
        return {}, [wrong_type, *check_optimizer("AdamW", common, origins)[1]]
    cls, _ = optimizer_class(name, {})
    parameters = {
        key: value
        for key, value in inspect.signature(cls.__init__).parameters.items()
        if key not in _NOT_AN_OPTION
    }
    known = {*parameters, "adam_w_mode"} if name.lower() == "adam" else set(parameters)
    options: dict[str, object] = {"lr": parameters["lr"].default}
    problems = []
    for key, value in given.items():
        path, got, origin = f"optimizer.params.{key}", shown(value), origins.get(key, "")
        if key not in known:
            reason, hint = _why_unknown(key, known)
            problems.append(Problem(path=path, reason=reason, got=got, origin=origin, hint=hint))
            continue
        kind = _KINDS[key] if key in _KINDS else _kind_of(parameters[key])
        try:
            options[key] = kind.read(value)
        except UnfitValueError:
            hint = 'write a decimal number with a point ("0.9")' if isinstance(value, list) else ""
            expected = kind.expected
            problems.append(
                Problem(path=path, expected=expected, got=got, origin=origin, hint=hint)
            )
    return options, problems or _refused_by_class(name, options)


def _why_unknown(key: str, known: set[str]) -> tuple[str, str]:
    """Reason and hint for an option the class does not have."""
    if f"optimizer.params.{key}" in NOT_BUILT or key in _NOT_AN_OPTION:
        return "not built yet", "remove it"
    near = nearest_key(key, known)
    names = ", ".join(sorted(known))
    hint = f"did you mean optimizer.params.{near}?" if near else f"known: {names}"
    return "unknown option of this optimizer", hint


def _refused_by_class(name: str, options: dict[str, object]) -> list[Problem]:
    """What the class itself says to the options, tried on one number."""
    cls, class_options = optimizer_class(name, options)
    try:
        cls([torch.zeros(1, requires_grad=True)], **class_options)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = f"{cls.__name__} refuses these options: {error}"
        return [Problem(path="optimizer.params", reason=reason, got=shown(options))]
    return []
