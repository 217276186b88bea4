"""Whether an optimizer treats every element on its own, found out by trying it.

ZeRO cuts parameters into slices, so an optimizer may only be used on them if stepping the slices
gives what stepping the whole gives. That is decided here, bitwise, and not by a list of names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_SHAPE = (9, 11)
_CUTS = (16, 48, 64)  # multiples of the slice length, as real slices are
_STEPS = 4
_REMEDY = (
    "use an optimizer that treats elements alike (SGD, Adam, AdamW, Adagrad, RMSprop, ...); one "
    "that needs whole parameters works at stage=0, one that needs a closure does not"
)


@dataclass(frozen=True, slots=True)
class StateForm:
    """What the optimizer keeps for a parameter.

    Attributes:
        elementwise: Bytes an element, by name of the state.
        scalars: Bytes of each state that is one number for a parameter.
    """

    elementwise: Mapping[str, int]
    scalars: Mapping[str, int]


def probe(
    cls: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    device: torch.device,
    sliced: bool,
) -> StateForm:
    """Step a whole tensor against slices of it; return the form of the optimizer's state.

    Args:
        cls: The optimizer class.
        options: As the caller passed them.
        dtype: Dtype of what will be stepped.
        device: Where it lies.
        sliced: Whether slices will be stepped (stages 1 to 3); whole tensors may always be.

    Raises:
        ValueError: The results differ, or slices cannot be stepped.
    """
    options = dict(options)
    if not isinstance(options.get("lr"), Tensor) and not options.get("lr", 1.0):
        options["lr"] = 0.01  # with 0 nothing would move and every optimizer would look alike
    generator = torch.Generator().manual_seed(20)
    start = torch.randn(_SHAPE, generator=generator, dtype=torch.float64)
    steps = [torch.randn(_SHAPE, generator=generator, dtype=torch.float64) for _ in range(_STEPS)]
    start, steps = start.to(device, dtype), [step.to(device, dtype) for step in steps]
    whole = [nn.Parameter(start.clone())]
    optimizer = cls(whole, **options)
    try:
        _run(optimizer, whole, [[step] for step in steps])
    except Exception as error:
        raise ValueError(
            f"{cls.__name__} cannot step a dense matrix on its own ({error}); {_REMEDY}"
        ) from error
    if sliced:
        _compare(cls, options, start, steps, whole[0])
    return _form(optimizer.state[whole[0]], whole[0])


def _compare(
    cls: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    start: Tensor,
    steps: list[Tensor],
    whole: Tensor,
) -> None:
    try:
        slices = [nn.Parameter(part.clone()) for part in _slices(start)]
        _run(cls(slices, **options), slices, [_slices(step) for step in steps])
    except Exception as error:
        raise ValueError(
            f"{cls.__name__} cannot step slices of a parameter ({error}); {_REMEDY}"
        ) from error
    joined = torch.cat([part.detach() for part in slices]).view(whole.shape)
    if not torch.equal(joined, whole.detach()):
        raise ValueError(
            f"{cls.__name__} is not elementwise: stepping slices of a parameter gives other values "
            f"than stepping it whole; {_REMEDY}"
        )


def _run(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: list[list[Tensor]]
) -> None:
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def _slices(tensor: Tensor) -> list[Tensor]:
    return list(torch.tensor_split(tensor.reshape(-1), _CUTS))


def _form(state: Mapping[str, Any], parameter: Tensor) -> StateForm:
    elementwise, scalars = {}, {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            elementwise[name] = value.element_size()
        elif isinstance(value, Tensor):
            scalars[name] = value.untyped_storage().nbytes()
    return StateForm(elementwise, scalars)
