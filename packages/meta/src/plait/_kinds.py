"""What a configuration value may be: each kind says what it expects and reads one value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "Anything",
    "Flag",
    "Integer",
    "Kind",
    "Number",
    "NumberList",
    "Object",
    "OneOf",
    "PerGroup",
    "PrintInterval",
    "Schema",
    "Text",
    "TextList",
    "UnfitValueError",
]

Schema = dict[str, object]
"""A piece of JSON schema, draft 2020-12."""


class UnfitValueError(ValueError):
    """The value is not of this kind."""


class Kind(Protocol):
    """A kind of value."""

    @property
    def expected(self) -> str:
        """What is expected, as a phrase."""

    def read(self, value: object) -> object:
        """The value as Python has it; raises UnfitValueError."""

    def schema(self) -> Schema:
        """The same as JSON schema, for editors."""


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number; ``1e3`` counts, ``true`` does not."""

    at_least: int
    below: int | None = None

    @property
    def expected(self) -> str:
        bound = "" if self.below is None else f" and below {self.below}"
        return f"a whole number of at least {self.at_least}{bound}"

    def read(self, value: object) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < self.at_least:
            raise UnfitValueError
        if self.below is not None and value >= self.below:
            raise UnfitValueError
        return value

    def schema(self) -> Schema:
        above = {} if self.below is None else {"exclusiveMaximum": self.below}
        return {"type": "integer", "minimum": self.at_least} | above


@dataclass(frozen=True, slots=True)
class PrintInterval:
    """A whole number of updates; infinity is never, as some trainers write it."""

    expected: str = "a whole number of at least 1"

    def read(self, value: object) -> int | None:
        return None if value == math.inf else Integer(1).read(value)

    def schema(self) -> Schema:
        return Integer(1).schema()


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number in a range; a bound set with `below` is not part of it."""

    at_least: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf

    @property
    def expected(self) -> str:
        bounds = []
        if self.at_least > -math.inf:
            bounds.append(f"of at least {self.at_least:g}")
        if self.at_most < math.inf:
            bounds.append(f"of at most {self.at_most:g}")
        if self.below < math.inf:
            bounds.append(f"below {self.below:g}")
        return " ".join(["a number", " and ".join(bounds)]).strip()

    def read(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnfitValueError
        try:
            number = float(value)
        except OverflowError:
            raise UnfitValueError from None
        fits = self.at_least <= number <= self.at_most and number < self.below
        if not math.isfinite(number) or not fits:
            raise UnfitValueError
        return number

    def schema(self) -> Schema:
        bounds = {
            "minimum": self.at_least,
            "maximum": self.at_most,
            "exclusiveMaximum": self.below,
        }
        finite = {name: bound for name, bound in bounds.items() if math.isfinite(bound)}
        return {"type": "number", **finite}


@dataclass(frozen=True, slots=True)
class NumberList:
    """A fixed count of numbers, such as ``betas``."""

    length: int
    item: Number

    @property
    def expected(self) -> str:
        return f"a list of {self.length} numbers, each {self.item.expected}"

    def read(self, value: object) -> tuple[float, ...]:
        if not isinstance(value, list | tuple) or len(value) != self.length:
            raise UnfitValueError
        return tuple(self.item.read(number) for number in value)

    def schema(self) -> Schema:
        length = {"minItems": self.length, "maxItems": self.length}
        return {"type": "array", "items": self.item.schema(), **length}


@dataclass(frozen=True, slots=True)
class PerGroup:
    """A number, or a list with one for each of the optimizer's parameter groups."""

    item: Number

    @property
    def expected(self) -> str:
        return f"{self.item.expected}, or a list with one for each parameter group"

    def read(self, value: object) -> float | tuple[float, ...]:
        if isinstance(value, list | tuple) and value:
            return tuple(self.item.read(number) for number in value)
        return self.item.read(value)

    def schema(self) -> Schema:
        item = self.item.schema()
        return {"anyOf": [item, {"type": "array", "items": item, "minItems": 1}]}


@dataclass(frozen=True, slots=True)
class Flag:
    """true or false, nothing that merely looks like it."""

    expected: str = "true or false"

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise UnfitValueError
        return value

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text:
    """Text that is not empty."""

    expected: str = "text that is not empty"

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            raise UnfitValueError
        return value

    def schema(self) -> Schema:
        return {"type": "string", "minLength": 1}


@dataclass(frozen=True, slots=True)
class TextList:
    """A list of names."""

    expected: str = "a list of names in quotes"

    def read(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise UnfitValueError
        return tuple(Text().read(name) for name in value)

    def schema(self) -> Schema:
        return {"type": "array", "items": Text().schema()}


@dataclass(frozen=True, slots=True)
class Object:
    """An object whose inside is not looked at."""

    expected: str = "an object { ... }"

    def read(self, value: object) -> dict[str, object]:
        if not isinstance(value, dict):
            raise UnfitValueError
        return value

    def schema(self) -> Schema:
        return {"type": "object"}


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value: of a part that does nothing here."""

    expected: str = "any value"

    def read(self, value: object) -> object:
        return value

    def schema(self) -> Schema:
        return {}


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few values of one type."""

    values: tuple[str, ...] | tuple[int, ...]

    @property
    def expected(self) -> str:
        *some, last = (
            f'"{value}"' if isinstance(value, str) else str(value) for value in self.values
        )
        return f"{', '.join(some)} or {last}"

    def read(self, value: object) -> str | int:
        for allowed in self.values:
            if type(value) is type(allowed) and value == allowed:
                return allowed
        raise UnfitValueError

    def schema(self) -> Schema:
        return {"enum": list(self.values)}
