"""The caller's optimizer, or the file's, as something that can be made again over shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from plait._config import OptimizerConfig
from plait._optimizers import optimizer_class
from zero_partition import Zero

__all__ = [
    "ClientOptimizer",
    "OptimizerRecipe",
    "check_members",
    "parameter_list",
    "recipe_of",
    "recipe_of_config",
]

Parameters: TypeAlias = list[Any]
ClientOptimizer: TypeAlias = torch.optim.Optimizer | Callable[[Parameters], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRecipe:
    """What an optimizer over this rank's shards is made from.

    Args:
        cls: Class.
        groups: What it steps: parameters or groups of them; None is everything trainable.
        options: Its options, where a group has none of its own.
    """

    cls: type[torch.optim.Optimizer]
    groups: Parameters | None
    options: dict[str, Any]

    @property
    def num_groups(self) -> int:
        """Number of parameter groups."""
        groups = self.groups or []
        return len(groups) if groups and isinstance(groups[0], dict) else 1

    def make(self, zero: Zero) -> torch.optim.Optimizer:
        """The optimizer.

        Raises:
            ValueError: The class is not elementwise, or a parameter is not the model's.
        """
        return zero.optimizer(self.cls, self.groups, **self.options)


def parameter_list(given: object) -> Parameters | None:
    """``model_parameters`` as torch's optimizers take them; None where none were given.

    Raises:
        TypeError: Something else than parameters, (name, parameter) pairs or dicts of groups.
        ValueError: There are none.
    """
    if given is None:
        return None
    if isinstance(given, Tensor | str | Mapping) or not isinstance(given, Iterable):
        raise TypeError(
            "model_parameters: expected parameters or dicts of groups in a list, got "
            f"{type(given).__name__}"
        )
    listed = [_group(item) if isinstance(item, Mapping) else item for item in given]
    for item in listed:
        named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], nn.Parameter)
        if not (isinstance(item, dict | nn.Parameter) or named):
            raise TypeError(
                "model_parameters: expected parameters or dicts of groups, got a "
                f"{type(item).__name__}"
            )
    if not listed:
        raise ValueError("model_parameters: expected parameters, got none (a used-up generator?)")
    if len({isinstance(item, dict) for item in listed}) > 1:
        raise TypeError("model_parameters: expected parameters or groups, got some of each")
    return listed


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    if "params" not in group:
        raise ValueError(f'model_parameters: a group without "params": its keys are {list(group)}')
    params = group["params"]
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def check_members(parameters: Parameters | None, model: nn.Module) -> None:
    """Refuse parameters that are not the model's.

    Raises:
        ValueError: Says the shape of one; or none is trainable.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "optimizer: the model has no trainable parameters; give them requires_grad, or leave "
            "the optimizer out to evaluate"
        )
    known = {id(parameter) for parameter in model.parameters()}
    for item in parameters or []:
        for member in item["params"] if isinstance(item, dict) else [item]:
            parameter = member[1] if isinstance(member, tuple) else member
            if id(parameter) not in known:
                raise ValueError(
                    f"initialize: a parameter of shape {tuple(parameter.shape)}, passed for the "
                    "optimizer, is not one of the model's"
                )


def recipe_of_config(config: OptimizerConfig, parameters: Parameters | None) -> OptimizerRecipe:
    """The optimizer that the file names, over ``model_parameters``."""
    cls, options = optimizer_class(config.type, config.params)
    return OptimizerRecipe(cls=cls, groups=parameters, options=options)


def recipe_of(client: object, model: nn.Module, parameters: Parameters | None) -> OptimizerRecipe:
    """What the optimizer a caller passed is made of.

    Args:
        client: A torch optimizer, or a callable that makes one of parameters.
        model: Whose parameters the callable is handed where `parameters` is None.
        parameters: ``model_parameters``.

    Raises:
        TypeError: `client` is neither, or returned something else.
        ValueError: It has stepped already, or cannot be made again from its defaults.
    """
    made = client
    if not isinstance(client, torch.optim.Optimizer):
        if not callable(client):
            raise TypeError(
                "optimizer: expected a torch optimizer or a callable that makes one of parameters, "
                f"got {type(client).__name__}"
            )
        made = client(list(model.parameters()) if parameters is None else parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "optimizer: the callable was expected to return a torch optimizer, it returned "
            f"{type(made).__name__}"
        )
    # Adagrad, for one, makes its state before the first step
    stepped = [kept for kept in made.state.values() if kept.get("step", 1) != 0]
    if stepped:
        raise ValueError(
            f"optimizer: this {type(made).__name__} has state of {len(stepped)} parameters: it "
            "has stepped already; pass a fresh one, and load_checkpoint() what was before"
        )
    groups = [
        {key: value for key, value in group.items() if key != "param_names"}
        for group in made.param_groups
    ]
    return OptimizerRecipe(
        cls=type(made),
        groups=[{**group, "params": list(group["params"])} for group in groups],
        options=_options(made),
    )


def _options(made: torch.optim.Optimizer) -> dict[str, Any]:
    """The constructor's arguments, as the optimizer keeps them in its defaults."""
    cls = type(made)
    parameters = list(inspect.signature(cls).parameters.values())[1:]  # the first takes `params`
    lost = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in made.defaults
    ]
    if lost:
        raise ValueError(
            f"optimizer: {cls.__name__} must be made again over shards, and its arguments "
            f"{', '.join(lost)} are not among its defaults ({', '.join(made.defaults)}); give "
            "them defaults in a subclass"
        )
    taken = {parameter.name for parameter in parameters}
    return {key: value for key, value in made.defaults.items() if key in taken}
