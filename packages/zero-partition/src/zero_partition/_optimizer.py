"""The user's optimizer class, stepping this rank's part of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from zero_partition._probe import StateForm


class Owner(Protocol):
    """What the optimizer needs from the partition it belongs to."""

    def trainable(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """The trainable ones; refuses parameters that are not the model's."""
        ...

    def pieces_of(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """This rank's pieces of logical parameters."""
        ...

    def step_with(self, step: Callable[[], Any]) -> bool:
        """Run `step` on finished gradients and make the new values everyone's."""
        ...

    def clear(self, optimizer: ZeroOptimizer, *, set_to_none: bool) -> None:
        """Forget the gradients of an optimizer's parameters, or set them to zero."""
        ...


class ZeroOptimizer(torch.optim.Optimizer):
    """Mixed in before the user's class; see `Zero.optimizer`.

    Attributes:
        form: What the class keeps for a parameter.
        logical: The logical parameters of each group, in the order of `param_groups`.
    """

    _owner: Owner
    _class_step: Callable[..., Any]
    form: StateForm
    logical: list[list[nn.Parameter]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of logical parameters, as torch does."""
        group = dict(param_group)
        given = group["params"]
        listed = [given] if isinstance(given, nn.Parameter) else list(given)
        plain = [item[1] if isinstance(item, tuple) else item for item in listed]
        logical = self._owner.trainable(plain)
        taken = {id(p) for members in self.logical for p in members}
        if len({id(p) for p in logical} - taken) < len(logical):
            raise ValueError("some parameters appear twice, or in more than one parameter group")
        group["params"] = self._owner.pieces_of(logical)
        super().add_param_group(group)
        self.logical.append(logical)

    def step(self, closure: object = None) -> bool:  # type: ignore[override]  # says if it stepped
        """Finish the gradients if need be, and step.

        Returns:
            Whether it stepped: False where no parameter has a gradient, or where gradients are not
            finite and `skip_nonfinite` was asked for. Then nothing has changed.

        Raises:
            TypeError: A closure was passed.
        """
        if closure is not None:
            raise TypeError(
                f"{type(self).__name__}.step: a closure would need several backwards within one "
                "step, which sharded gradients cannot give; call step() without it"
            )
        return self._owner.step_with(self._class_step)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  torch's signature
        """Forget the gradients of this optimizer's parameters, or set them to zero."""
        self._owner.clear(self, set_to_none=set_to_none)


def make_optimizer(
    owner: Owner,
    cls: type[torch.optim.Optimizer],
    params: Iterable[Any],
    *,
    form: StateForm,
    options: Mapping[str, Any],
) -> ZeroOptimizer:
    """Build the subclass of `cls` that steps pieces, and an instance of it."""
    listed = list(params)
    if not listed:
        raise ValueError("optimizer got an empty parameter list")
    grouped = bool(listed) and isinstance(listed[0], dict)
    groups = listed if grouped else [{"params": listed}]
    members = {"_owner": owner, "_class_step": _unhooked(cls), "form": form, "logical": []}
    subclass = type(f"Zero{cls.__name__}", (ZeroOptimizer, cls), members)
    made: ZeroOptimizer = subclass([dict(group) for group in groups], **options)
    return made


def _unhooked(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """The step of `cls` without torch's hook-calling wrapper, which is put on at first use."""
    step: Any = cls.step
    while vars(step).get("hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]  # a plain function
