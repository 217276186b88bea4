"""One key of the configuration: what it takes, what it means, what plait does with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plait._kinds import Kind

__all__ = ["Key", "Use", "asks_nothing"]


class Use(StrEnum):
    """What plait does with a key that is given."""

    HONOURED = "honoured"
    """Its value is used."""
    DECIDED = "decided by plait"
    """Its value is checked and then left alone: it tunes what plait decides itself."""
    ASKS = "refused when it asks"
    """Values that turn its feature off are taken; others ask for what is not built."""
    PART = "part of a feature"
    """Says how a feature works that its `needs` turns on, and that is not built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key.

    Args:
        path: Dotted path.
        kind: What it takes; null too where the default is None or the value is not used.
        default: Value when the key is absent.
        meaning: One phrase for the reader; of a decided key, what plait does instead.
        default_said: The default in words where the value alone says too little.
        use: What plait does with it.
        off: Values that ask for nothing.
        needs: The key without which this one does nothing.
        instead: What to do where it asks for what is not built.
        auto: Whether ``"auto"`` means the default.
        deprecated: Whether DeepSpeed itself has given the key up.
    """

    path: str
    kind: Kind
    default: object
    meaning: str
    default_said: str = ""
    use: Use = Use.HONOURED
    off: tuple[object, ...] = ()
    needs: str = ""
    instead: str = ""
    auto: bool = False
    deprecated: bool = False

    @property
    def takes_null(self) -> bool:
        """Whether null is a value of this key."""
        return self.use is not Use.HONOURED or self.default is None


def asks_nothing(key: Key, value: object) -> bool:
    """Whether `value` turns the feature of `key` off."""
    if isinstance(value, dict):
        return not value or _all_disabled(value)
    return any(_equal(value, off) for off in key.off)


def _equal(value: object, off: object) -> bool:
    """Equal as JSON has it: 1 and 1.0 are, 1 and true are not."""
    return isinstance(value, bool) == isinstance(off, bool) and value == off


def _all_disabled(section: dict[str, object]) -> bool:
    """Whether the section is switched off as a whole, or each of its parts is."""
    if "enabled" in section:
        return section["enabled"] is False
    shared = section.get("shared_parameters")
    if isinstance(shared, dict):  # of compression_training: speaks for all groups
        return _all_disabled(shared)
    parts = [value for value in section.values() if isinstance(value, dict)]
    return len(parts) == len(section) and all(_all_disabled(part) for part in parts)
