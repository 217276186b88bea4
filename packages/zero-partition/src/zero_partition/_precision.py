"""In which dtype parameters, masters and gradient sums are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SIXTEEN_BIT = (torch.bfloat16, torch.float16)
TRAINABLE_DTYPES = (torch.float64, torch.float32, *SIXTEEN_BIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtypes of a partitioned model.

    A trainable 16-bit parameter always has a float32 master, which the optimizer steps, and float32
    gradient sums; wider parameters are their own masters, and their gradients are summed in their
    own dtype.

    Args:
        param: Dtype that trainable floating-point parameters compute in: bfloat16, float16, float32
            or float64. Masters keep what the parameters held before. None leaves each as it is.
        frozen: Dtype for frozen floating-point parameters. None leaves them as they are.
        cast_inputs: Whether floating-point tensors among the arguments of the model's forward are
            cast to `param` (when it is given).

    Raises:
        ValueError: A dtype that parameters cannot be trained in.

    Example:
        >>> Precision(param=torch.bfloat16).param
        torch.bfloat16
    """

    param: torch.dtype | None = None
    frozen: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        for field, dtype in (("param", self.param), ("frozen", self.frozen)):
            if dtype is not None and dtype not in TRAINABLE_DTYPES:
                names = ", ".join(str(d) for d in TRAINABLE_DTYPES)
                raise ValueError(f"Precision.{field} must be one of {names} or None, got {dtype!r}")

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        """The dtype `parameter` is to compute in."""
        wanted = self.param if parameter.requires_grad else self.frozen
        if wanted is None or not parameter.is_floating_point():
            return parameter.dtype
        return wanted


def sum_dtype(param_dtype: torch.dtype) -> torch.dtype:
    """Dtype of masters and gradient sums for parameters of `param_dtype`: float32 or wider."""
    return torch.float32 if param_dtype in SIXTEEN_BIT else param_dtype
