"""Which parameters travel together: the outermost repeated blocks, and the rest.

A *unit* is a module whose parameters are gathered before its forward and backward and whose
gradients are reduced together. The first unit is always the model itself: it holds whatever no
other unit does, and every parameter that two units share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from zero_partition._resting import NAME


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit: where it hangs in the model, and its parameters by first name."""

    name: str
    module: nn.Module
    parameters: tuple[tuple[str, nn.Parameter], ...]


def find_units(model: nn.Module, units: Iterable[nn.Module] | None) -> list[UnitSpec]:
    """Assign every parameter of `model` to exactly one unit; the model itself comes first.

    Args:
        model: The whole model.
        units: Submodules that are to be units, or None for the outermost repeated blocks: children
            of a `ModuleList`, `ModuleDict` or `Sequential` of which at least two are of one class
            and have parameters.

    Returns:
        The model's unit, then the others in the order in which the model registers them.

    Raises:
        ValueError: A unit is not part of the model, is the model itself, or comes twice.
        TypeError: A unit is not a module.
    """
    chosen = set(repeated_blocks(model) if units is None else _check_units(model, list(units)))
    owners = _owners(model, chosen)
    held: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {model: []}
    names = {module: name for name, module in model.named_modules()}
    held.update((module, []) for module in names if module in chosen)
    for name, parameter in model.named_parameters():
        held[owners[parameter]].append((name, parameter))
    return [
        UnitSpec(names[module], module, tuple(parameters))
        for module, parameters in held.items()
        if parameters or module is model
    ]


def _owners(model: nn.Module, chosen: set[nn.Module]) -> dict[nn.Parameter, nn.Module]:
    """The innermost unit around each parameter; the model for one that several units share."""
    found: dict[nn.Parameter, set[nn.Module]] = {}
    seen: set[tuple[nn.Module, nn.Module]] = set()
    waiting = [(model, model)]
    while waiting:
        module, unit = waiting.pop()
        unit = module if module in chosen else unit
        if (module, unit) in seen:
            continue
        seen.add((module, unit))
        for parameter in module.parameters(recurse=False):
            found.setdefault(parameter, set()).add(unit)
        waiting.extend((child, unit) for child in module.children())
    return {p: units.pop() if len(units) == 1 else model for p, units in found.items()}


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks of `model`: layers of a transformer, stages of a ResNet."""
    children = list(model.children())
    if not isinstance(model, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return [block for child in children for block in repeated_blocks(child)]
    callable_ones = [m for m in children if not isinstance(m, nn.ModuleList | nn.ModuleDict)]
    kinds = Counter(type(m) for m in callable_ones if any(True for _ in m.parameters()))
    blocks = []
    for child in children:
        blocks += [child] if kinds[type(child)] >= 2 else repeated_blocks(child)
    return [b for b in blocks if any(True for _ in b.parameters())]


def check_parameters(model: nn.Module) -> None:
    """Refuse what cannot be partitioned, before anything is changed.

    Raises:
        ValueError: There are no parameters, or one is on the meta device, uninitialised, sparse,
            complex, or managed by an earlier `partition`; or an embedding makes sparse gradients.
        TypeError: A parameter is of a class with a layout of its own.
    """
    named = list(model.named_parameters())
    if not named:
        raise ValueError("partition: the model has no parameters")
    for name, parameter in named:
        reason = _unfit(parameter)
        if reason is not None:
            raise ValueError(f"partition: parameter {name!r} {reason}")
        if type(parameter) is not nn.Parameter:
            raise TypeError(
                f"partition: parameter {name!r} is a {type(parameter).__name__}; only plain "
                "nn.Parameter can be cut into slices"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"partition: {name or 'the model'} makes sparse gradients; build it with "
                "sparse=False"
            )


def _unfit(parameter: nn.Parameter) -> str | None:
    """Why a parameter cannot be cut, and the remedy; None if it can."""
    if NAME in parameter.__dict__:
        return "is partitioned already"
    if isinstance(parameter, UninitializedParameter):
        return "has no shape yet; run one forward pass first"
    if parameter.is_meta:
        return (
            "is on the meta device; give it values first (model.to_empty(device=...) and the "
            "model's own initialisation)"
        )
    if parameter.is_complex():
        return "is complex; hold its real view (torch.view_as_real) as the parameter"
    if parameter.layout is not torch.strided:
        return "is sparse; only dense parameters are cut"
    return None


def _check_units(model: nn.Module, units: list[nn.Module]) -> list[nn.Module]:
    known = set(model.modules())
    for unit in units:
        if not isinstance(unit, nn.Module):
            raise TypeError(f"units must be modules, got {type(unit).__name__}")
        if unit not in known:
            raise ValueError(f"units: a {type(unit).__name__} is not part of the model")
        if isinstance(unit, nn.ModuleList | nn.ModuleDict):
            raise ValueError(
                f"units: a {type(unit).__name__} has no forward of its own; "
                "name its members (units=list(blocks))"
            )
    if len(set(units)) != len(units):
        raise ValueError("units: the same module comes twice")
    return [unit for unit in units if unit is not model]
