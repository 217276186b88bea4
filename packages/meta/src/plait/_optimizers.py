"""The optimizer a configuration names: torch's class, its options checked one by one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from plait._fates import Became, Checked, Fate
from plait._key import Key, Use, asks_nothing
from plait._kinds import Flag, Kind, Number, NumberList, UnfitValueError
from plait._optimizer_keys import OPTIMIZER_KEYS
from plait._problems import Problem, nearest_key, shown, unfit_hint

__all__ = ["check_optimizer", "optimizer_class", "optimizer_options"]

# DeepSpeed's own optimizers, and torch's that need more than a gradient an element.
_NOT_BUILT_TYPES = frozenset(
    [
        *("lamb", "lion", "muon", "muadam", "muadamw", "musgd"),
        *("onebitadam", "onebitlamb", "zerooneadam", "sparseadam", "lbfgs"),
    ]
)
_RATE = Number(at_least=0.0)
_KEYS = {key.path.rpartition(".")[2]: key for key in OPTIMIZER_KEYS}
_KINDS: dict[str, Kind] = {
    **{name: key.kind for name, key in _KEYS.items() if key.use is Use.HONOURED},
    "momentum": _RATE,
    "dampening": Number(),
    "lr_decay": _RATE,
    "foreach": Flag(),
    "fused": Flag(),
}
_ADAMS = ("adam", "adamw")
_CLASS_DEFAULT = ("betas", "eps")  # for "auto": every trainer's default is the class's
_NO_SOURCE = '"auto" has no source here: write the value'
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
        if name.lower() == "onebitadam":
            reason = "plait's loop does not run it yet"
            hint = "comm_quant.OneBitAdam trains in a loop of your own; here use AdamW"
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


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    """The options of a type that a configuration may set."""
    cls, _ = optimizer_class(name, {})
    signature = inspect.signature(cls.__init__).parameters
    return {key: value for key, value in signature.items() if key not in _NOT_AN_OPTION}


def optimizer_options() -> dict[str, Kind]:
    """Every option of every optimizer of torch that can be named, with its kind."""
    options: dict[str, Kind] = {}
    for name in _torch_classes():
        for key, parameter in _parameters(name).items():
            options.setdefault(key, _KINDS[key] if key in _KINDS else _kind_of(parameter))
    return options


def check_optimizer(name: str, given: Mapping[str, object], origins: Mapping[str, str]) -> Checked:
    """Check a type and its parameters.

    Args:
        name: ``optimizer.type``, in any case.
        given: ``optimizer.params`` as read from JSON.
        origins: Where the type and each parameter came from, by name (``type`` for the type).

    Returns:
        The options as the class takes them, what became of each, and everything that is wrong.
    """
    wrong_type = _type_problem(name, origins.get("type", ""))
    if wrong_type:
        common = {key: value for key, value in given.items() if key in _COMMON}
        checked = check_optimizer("AdamW", common, origins)
        return Checked({}, (), [wrong_type, *checked.problems])
    parameters = _parameters(name)
    options: dict[str, object] = {"lr": parameters["lr"].default}
    problems: list[Problem] = []
    fates = [Fate("optimizer.type", name, Became.HONOURED, "")]
    for key, value in given.items():
        try:
            options_of_key, fate = _read_option(name, key, value, parameters)
        except _OptionError as error:
            problems.append(error.problem(key, value, origins.get(key, "")))
        else:
            options |= options_of_key
            fates.append(fate)
    if name.lower() in _ADAMS and not given.get("torch_adam") and "weight_decay" not in given:
        options["weight_decay"] = 0.0
        path, note = "optimizer.params.weight_decay", "DeepSpeed's default"
        fates.append(Fate(path, 0.0, Became.DERIVED, note))
    return Checked(options, tuple(fates), problems or _refused_by_class(name, options))


class _OptionError(Exception):
    """An option that cannot be used: a reason, or what was expected, and a hint."""

    def __init__(self, *, reason: str = "", expected: str = "", hint: str = "") -> None:
        super().__init__(reason)
        self.said = {"reason": reason, "expected": expected, "hint": hint}

    def problem(self, key: str, value: object, origin: str) -> Problem:
        return Problem(path=f"optimizer.params.{key}", got=shown(value), origin=origin, **self.said)


def _read_option(
    name: str, key: str, value: object, parameters: Mapping[str, inspect.Parameter]
) -> tuple[dict[str, object], Fate]:
    """What an option adds to those of the class, and what became of it."""
    path = f"optimizer.params.{key}"
    ours = _KEYS.get(key)
    if key not in parameters and ours and ours.use is not Use.HONOURED:
        return {}, _fate_of_ours(ours, value)
    known = {*parameters, "adam_w_mode"} if name.lower() in _ADAMS else set(parameters)
    if key not in known:
        reason, hint = _why_unknown(key, known)
        raise _OptionError(reason=reason, hint=hint)
    if value == "auto":
        if key not in _CLASS_DEFAULT:
            raise _OptionError(reason=_NO_SOURCE)
        default = parameters[key].default
        return {}, Fate(path, default, Became.DERIVED, "auto: torch's default")
    kind = _KINDS[key] if key in _KINDS else _kind_of(parameters[key])
    read = _read(kind, value)
    if key == "adam_w_mode" and name.lower() == "adamw":
        return {}, Fate(path, value, Became.DECIDED, "AdamW is AdamW")
    return {key: read}, Fate(path, value, Became.HONOURED, "")


def _fate_of_ours(key: Key, value: object) -> Fate:
    """What becomes of an option that DeepSpeed has and torch has not."""
    if value == "auto":
        return Fate(key.path, key.default, Became.DERIVED, "auto: as when it is absent")
    if value is not None or not key.takes_null:
        _read(key.kind, value)
    if key.use is Use.DECIDED:
        return Fate(key.path, value, Became.DECIDED, key.meaning)
    if asks_nothing(key, value):
        return Fate(key.path, value, Became.OFF, "")
    raise _OptionError(reason=f"not built yet: {key.meaning}", hint=key.instead)


def _read(kind: Kind, value: object) -> object:
    try:
        return kind.read(value)
    except UnfitValueError:
        hint = unfit_hint(kind, value)
        raise _OptionError(expected=kind.expected, hint=hint) from None


def _why_unknown(key: str, known: Iterable[str]) -> tuple[str, str]:
    """Reason and hint for an option the class does not have."""
    if key in _NOT_AN_OPTION:
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
