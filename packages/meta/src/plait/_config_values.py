"""One pass over a configuration tree: the value at every key, and what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from plait._fates import Became, Fate
from plait._json import JsonObject
from plait._key import Key, Use, asks_nothing
from plait._keys import KEYS_BY_PATH, SECTIONS, canonical_path, unknown_key
from plait._kinds import UnfitValueError
from plait._problems import ProblemList, unfit_hint
from plait._typed_sections import TYPED_SECTIONS, TypedSection, read_typed_section

__all__ = ["NO_SOURCE", "Entry", "Values"]

NO_SOURCE = '"auto" has no source here: write the value'


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of the file.

    Args:
        path: As the file has it; an alias keeps its name.
        key: What the table says of it.
        given: As the file has it.
        value: As Python has it; the default where the file says ``"auto"``.
    """

    path: str
    key: Key
    given: object
    value: object

    @property
    def is_auto(self) -> bool:
        """Whether the file leaves the value to plait."""
        return self.given == "auto" and self.value != "auto"


class Values:
    """The keys of a tree, read; problems on the side.

    Args:
        tree: The configuration.
        problems: Takes everything that is wrong.
    """

    def __init__(self, tree: JsonObject, problems: ProblemList) -> None:
        self.problems = problems
        self.entries: dict[str, Entry] = {}
        self.unfit: set[str] = set()
        self.empty: list[str] = []  # sections that are null
        self.typed: dict[str, TypedSection | None] = {}
        self._read_object(tree, "")

    def get(self, path: str) -> object:
        """The value at a path; its default where the file has none."""
        entry = self.entries.get(path)
        return KEYS_BY_PATH[path].default if entry is None else entry.value

    def given(self, path: str) -> object:
        """The value that the file gives; None where it is absent or left to plait."""
        entry = self.entries.get(path)
        return None if entry is None or entry.is_auto else entry.value

    def int(self, path: str) -> int:
        """The value at the path of an Integer."""
        value = self.get(path)
        assert isinstance(value, int)  # by its kind
        return value

    def section(self, name: str) -> dict[str, object]:
        """Every value of a section, by its name there."""
        under = f"{name}."
        paths = [path for path in KEYS_BY_PATH if path.startswith(under)]
        return {path.removeprefix(under): self.get(path) for path in paths}

    def fates(self) -> list[Fate]:
        """What became of each key that the file has, in its order."""
        nothing = [
            Fate(path, None, Became.DERIVED, "null: as when it is absent")
            if path in TYPED_SECTIONS
            else Fate(path, None, Became.OFF, "null is nothing")
            for path in self.empty
        ]
        return [_fate(entry) for entry in self.entries.values()] + nothing

    def _read_object(self, tree: JsonObject, prefix: str) -> None:
        self.problems.add_duplicates(prefix.rstrip("."), tree.duplicates)
        for name, value in tree.items():
            path = prefix + (name or '""')
            if "." in name:
                hint = f"write {_nested(path)}" if canonical_path(path) in KEYS_BY_PATH else ""
                self.problems.add(path, reason="a key with a point", got=value, hint=hint)
                continue
            known = canonical_path(path)
            if known in TYPED_SECTIONS:
                self._read_typed(known, value)
            elif known in SECTIONS:
                self._read_section(path, known, value)
            elif known in KEYS_BY_PATH:
                self._read_value(path, KEYS_BY_PATH[known], value)
            else:
                reason, hint = unknown_key(path)
                self.problems.add(path, reason=reason, got=value, hint=hint)

    def _read_section(self, path: str, known: str, value: object) -> None:
        if isinstance(value, JsonObject):
            self._read_object(value, f"{path}.")
        elif value is None and known.partition(".")[0] not in ("model", "data", "run"):
            self.empty.append(path)
        else:
            self.problems.add(path, expected="an object { ... }", got=value)

    def _read_typed(self, path: str, value: object) -> None:
        if value is None:
            self.typed[path] = None
            self.empty.append(path)
            return
        section = read_typed_section(path, value, self.problems)
        if section is None:
            self.unfit.add(path)
            return
        self.typed[path] = section
        assert isinstance(value, JsonObject)  # else it were no section
        for name, inner in value.items():
            if f"{path}.{name}" in KEYS_BY_PATH:
                self._read_value(f"{path}.{name}", KEYS_BY_PATH[f"{path}.{name}"], inner)

    def _read_value(self, path: str, key: Key, given: object) -> None:
        if key.path in self.entries:
            other = self.entries[key.path].path
            reason = f"the same key as {other}; keep one of them"
            self.problems.add(path, reason=reason, got=given)
            return
        try:
            value = self._value(key, given)
        except UnfitValueError:
            self.unfit.add(key.path)
            hint = NO_SOURCE if given == "auto" else unfit_hint(key.kind, given)
            self.problems.add(path, expected=key.kind.expected, got=given, hint=hint)
            return
        self.entries[key.path] = Entry(path, key, given, value)
        if key.use is Use.ASKS and not asks_nothing(key, value):
            reason = f"not built yet: {key.meaning}"
            self.problems.add(path, reason=reason, got=given, hint=key.instead)

    @staticmethod
    def _value(key: Key, given: object) -> object:
        if (given is None and key.takes_null) or (given == "auto" and key.auto):
            return key.default
        return key.kind.read(given)


def _nested(path: str) -> str:
    """A dotted path as objects within objects."""
    *sections, name = path.split(".")
    opened = "".join(f'{{"{section}": ' for section in sections)
    return f'{opened}{{"{name}": ...}}' + "}" * len(sections)


def _fate(entry: Entry) -> Fate:
    """What became of a key that nothing is wrong with."""
    key = entry.key
    if key.use is Use.DECIDED:
        return Fate(entry.path, entry.given, Became.DECIDED, key.meaning)
    if key.use is Use.ASKS:
        return Fate(entry.path, entry.given, Became.OFF, "")
    if key.use is Use.PART:
        return Fate(entry.path, entry.given, Became.OFF, f"{key.needs} is off")
    if entry.is_auto:
        note = f"auto: {key.default_said or 'the default'}".replace("`", "")
        return Fate(entry.path, entry.value, Became.DERIVED, note)
    given = entry.value if entry.given == math.inf else entry.given  # which JSON has not
    return Fate(entry.path, given, Became.HONOURED, "")
