"""States as JSON: what a caller may store in a checkpoint, and what schedules keep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["check_json", "decode", "encode"]

_PLAIN = (type(None), bool, int, float, str)
_KIND, _HELD = "!kind", "!held"


def check_json(value: object, where: str) -> None:
    """Refuse what JSON would not give back as it is, naming where it stands.

    Raises:
        TypeError: A value that JSON has no form for, or a key that is not text.
    """
    if type(value) in _PLAIN:
        return
    if type(value) is list:
        for index, inner in enumerate(value):
            check_json(inner, f"{where}[{index}]")
    elif type(value) is dict:
        for key, inner in value.items():
            if type(key) is not str:
                raise TypeError(f"{where}: expected keys that are text, got {key!r}")
            check_json(inner, f"{where}[{key!r}]")
    else:
        hint = ""
        if isinstance(value, tuple):
            hint = "; write a list"
        elif isinstance(value, Tensor):
            hint = "; write .tolist(), or save tensors in a file of your own"
        raise TypeError(
            f"{where}: expected what JSON has (numbers, text, true, false, null, lists, "
            f"dicts), got {type(value).__name__}{hint}"
        )


def encode(value: object, where: str) -> Any:
    """A schedule's state as JSON: as `check_json`, and tuples, counters and other keys too."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list):
        return [encode(inner, f"{where}[{index}]") for index, inner in enumerate(value)]
    if isinstance(value, tuple):
        return {_KIND: "tuple", _HELD: encode(list(value), where)}
    if not isinstance(value, Mapping):
        check_json(value, where)  # raises
    return _encode_mapping(value, where)  # type: ignore[arg-type]  # refused above otherwise


def _encode_mapping(value: Mapping[Any, object], where: str) -> Any:
    pairs = [[encode(k, where), encode(inner, f"{where}[{k!r}]")] for k, inner in value.items()]
    if isinstance(value, Counter):
        return {_KIND: "Counter", _HELD: pairs}
    if all(type(key) is str for key in value) and _KIND not in value:
        return dict(pairs)
    return {_KIND: "dict", _HELD: pairs}


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: decode(inner) for key, inner in value.items()}
    held = decode(value[_HELD])
    match value[_KIND]:
        case "tuple":
            return tuple(held)
        case "Counter":
            return Counter(dict(held))
        case _:
            return dict(held)
