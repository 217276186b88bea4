"""What became of each key of a configuration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plait._problems import Problem

__all__ = ["Became", "Checked", "Fate"]


class Became(StrEnum):
    """What plait did with a key."""

    HONOURED = "honoured"
    """Its value is used."""
    OFF = "off"
    """It asks for nothing."""
    DECIDED = "decided by plait"
    """It tunes what plait decides itself."""
    DERIVED = "derived"
    """Absent or ``"auto"``: the value was filled in."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one key.

    Args:
        path: Dotted path, as the file has it.
        value: What the file says, or what was derived.
        became: What plait does with it.
        note: Why, in one phrase; may be empty.
    """

    path: str
    value: object
    became: Became
    note: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """An optimizer's or a schedule's parameters, what became of each, and what is wrong."""

    params: dict[str, object]
    fates: tuple[Fate, ...]
    problems: list[Problem]
