"""The tensors inside whatever a forward takes or returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from torch import Tensor, nn

_DEPTH = 6


def tensors_in(value: object) -> list[Tensor]:
    """Every tensor reachable through containers, dataclasses and plain objects' attributes.

    Containers torch's pytree does not know (a custom cache object, say) count too; modules are not
    entered. Nesting deeper than six levels is not followed.
    """
    found: dict[int, Tensor] = {}
    _collect(value, found, set(), _DEPTH)
    return list(found.values())


def _collect(value: object, found: dict[int, Tensor], seen: set[int], depth: int) -> None:
    if isinstance(value, Tensor):
        found[id(value)] = value
        return
    if depth == 0 or isinstance(value, str | bytes | int | float | complex | type | nn.Module):
        return
    if value is None or id(value) in seen:
        return
    seen.add(id(value))
    for item in _members(value):
        _collect(item, found, seen, depth - 1)


def _members(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values()) + _attributes(value)
    if isinstance(value, Sequence | Set):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return _attributes(value)


def _attributes(value: object) -> list[object]:
    held = list(vars(value).values()) if hasattr(value, "__dict__") else []
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        held += [getattr(value, n, None) for n in names if n not in ("__dict__", "__weakref__")]
    return held
