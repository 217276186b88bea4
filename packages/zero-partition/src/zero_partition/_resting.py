"""Stand-ins that answer for metadata and raise, by name, when values are touched.

A parameter stays the same object all its life. While its values are not held whole, its class is
switched from `nn.Parameter` to `Resting` (as torch's own `UninitializedParameter` does it) and the
storage under it is empty. A reduced gradient that lies elsewhere is shown in ``.grad`` by a
`ShardedGrad`, so that code which would read it raises, and torch's ``clip_grad_norm_`` does not
return 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_partition._errors import RestingError

NAME = "_zero_partition_name"
"""Attribute under which a managed parameter carries its logical name."""

_READABLE = frozenset(
    """shape dtype device requires_grad grad is_leaf ndim layout grad_fn is_meta is_sparse names
    is_cuda is_cpu is_xpu is_mps is_quantized is_nested is_sparse_csr is_mkldnn nbytes itemsize
    output_nr retains_grad _version _backward_hooks _post_accumulate_grad_hooks _grad grad_dtype
    size numel nelement dim ndimension stride storage_offset element_size is_floating_point
    is_complex is_signed is_contiguous is_shared is_pinned is_inference get_device
    __hash__ __len__ requires_grad_ register_hook register_post_accumulate_grad_hook
    _is_view has_names""".split()  # noqa: SIM905  a list of seventy lines reads worse
)
_REMEDY = (
    "use it inside its module's forward, or read it in `with zero.gathered():`, "
    "`zero.state_dict()` or `zero.save(...)`"
)


class Resting(nn.Parameter):
    """A parameter whose values are not held whole here: metadata answers, values raise."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = _function_name(func)
        if name in _READABLE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "is_same_size":
            return args[0].shape == args[1].shape
        raise RestingError(_message(name, (args, kwargs or {})))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch: Any
        return (
            f"Parameter at rest: {self.__dict__.get(NAME, '?')}, shape {tuple(self.shape)}, "
            f"dtype {self.dtype}, device {self.device}, requires_grad={self.requires_grad}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RestingError(_message("copy.deepcopy", self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RestingError(_message("pickle", self))


def rest(parameter: nn.Parameter) -> None:
    """Make `parameter` refuse to be read."""
    parameter.__class__ = Resting


def wake(parameter: nn.Parameter) -> None:
    """Make `parameter` an ordinary one again; its storage must hold its values by now."""
    parameter.__class__ = nn.Parameter


class ShardedGrad(Tensor):
    """What ``.grad`` holds where the reduced gradient is not: its shape, and errors for the rest.

    Args:
        parameter: The parameter whose gradient this stands for.
        name: Its logical name.
        where: Where the values are and how to read them, for the message.
        zero_: Called when somebody zeroes the gradient in place.
    """

    _name: str
    _where: str
    _zero: Callable[[], None]

    @staticmethod
    def __new__(
        cls: type[ShardedGrad], parameter: Tensor, name: str, where: str, zero_: Callable[[], None]
    ) -> ShardedGrad:
        made: ShardedGrad = Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made._name, made._where, made._zero = name, where, zero_
        return made

    def __init__(self, *_: object) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types it as disabled
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for found in _walk((args, kwargs or {})):
            if type(found) is ShardedGrad:
                if func is torch.ops.aten.zero_.default:
                    found._zero()
                    return found
                if func is torch.ops.aten.detach.default:
                    return found
                raise RestingError(found._refusal(func.__name__))
        return func(*args, **(kwargs or {}))

    # These read storage below the dispatcher.

    def tolist(self) -> Any:
        """Refuse."""
        raise RestingError(self._refusal("tolist"))

    def numpy(self, *, force: bool = False) -> Any:  # noqa: ARG002  torch's signature
        """Refuse."""
        raise RestingError(self._refusal("numpy"))

    def __array__(self, *_: Any) -> Any:
        raise RestingError(self._refusal("numpy"))

    def _refusal(self, what: str) -> str:
        return f"{what}: the gradient of {self._name!r} is not held here: {self._where}"

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch: Any
        return f"gradient of {self._name!r}, shape {tuple(self.shape)}: {self._where}"


def _function_name(func: Callable[..., Any]) -> str:
    owner = getattr(func, "__self__", None)  # a property's getter: Tensor.shape.__get__
    name: str = func.__name__
    if name in ("__get__", "__set__", "__delete__") and owner is not None:
        read: str = owner.__name__
        if name != "__get__" and read not in ("grad", "requires_grad", "_backward_hooks"):
            return f"{read}="
        return read
    return name


def _message(what: str, involved: object) -> str:
    for found in _walk(involved):
        if type(found) is Resting:
            name = found.__dict__.get(NAME, "?")
            return f"{what}: parameter {name!r} is at rest (its values are sharded); {_REMEDY}"
    return f"{what}: a parameter is at rest (its values are sharded); {_REMEDY}"


def _walk(value: object) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _walk(item)]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _walk(item)]
    return [value]
