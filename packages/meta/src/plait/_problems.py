"""What can be wrong with a configuration, and how it is said.

ConfigError (a ValueError) carries every problem found, not just the first one:

    2 errors in the configuration (ds.json):
      optimizer.params.lr: expected a number of at least 0, got "fast"
      run.stepz: unknown key, got 5 (--set); did you mean run.steps?
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from plait._decimal_commas import joined_numbers
from plait._kinds import Flag, Kind, NumberList

__all__ = ["ConfigError", "Problem", "ProblemList", "nearest_key", "shown", "unfit_hint"]

_MAX_SHOWN = 60


def shown(value: object) -> str:
    """`value` as the reader wrote it in JSON, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong.

    Args:
        path: Where, as a dotted key (``optimizer.params.lr``); empty for the file as a whole.
        reason: What is wrong when that is not simply an unexpected value.
        expected: What was expected there.
        got: What came, as shown to the reader.
        origin: Where the value came from when not from the file (``--set``, ``--ranks``).
        hint: What to do; the nearest known key.
    """

    path: str
    reason: str = ""
    expected: str = ""
    got: str = ""
    origin: str = ""
    hint: str = ""

    def __str__(self) -> str:
        parts = [self.reason] if self.reason else []
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.got:
            parts.append(f"got {self.got}" + (f" ({self.origin})" if self.origin else ""))
        text = ", ".join(parts)
        if self.path:
            text = f"{self.path}: {text}"
        return f"{text}; {self.hint}" if self.hint else text


_NOTHING = object()


class ProblemList:
    """Collects problems as they are found.

    Args:
        origin_of: Where the value at a path came from; empty for the file.
    """

    def __init__(self, origin_of: Callable[[str], str]) -> None:
        self.found: list[Problem] = []
        self._origin_of = origin_of

    def add(
        self,
        path: str,
        *,
        reason: str = "",
        expected: str = "",
        got: object = _NOTHING,
        hint: str = "",
    ) -> None:
        """Add a problem with the value at `path`."""
        problem = Problem(
            path=path,
            reason=reason,
            expected=expected,
            got="" if got is _NOTHING else shown(got),
            origin=self._origin_of(path),
            hint=hint,
        )
        self.found.append(problem)

    def add_duplicates(self, path: str, names: Iterable[str]) -> None:
        """Add a problem for each of the keys that came more than once in the object at `path`."""
        for name in names:
            reason = "this key came more than once; keep one of them"
            self.add(f"{path}.{name}".lstrip("."), reason=reason)


class ConfigError(ValueError):
    """A configuration that cannot be used, with everything that is wrong with it.

    Attributes:
        problems: Every problem found, in the order of the file.
        source: The file (or ``the defaults``) the configuration was read from.

    Example:
        >>> problem = Problem(path="run.steps", expected="a number", got="true")
        >>> print(ConfigError([problem], "a.json"))
        1 error in the configuration (a.json):
          run.steps: expected a number, got true
    """

    def __init__(self, problems: Iterable[Problem], source: str) -> None:
        self.problems = tuple(problems)
        self.source = source
        count = len(self.problems)
        head = f"{count} error{'s' * (count != 1)} in the configuration ({source}):"
        lines = [str(problem).replace("\n", "\n  ") for problem in self.problems]
        super().__init__("\n  ".join([head, *lines]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...], str]]:
        return ConfigError, (self.problems, self.source)


def nearest_key(path: str, known: Iterable[str]) -> str | None:
    """The known dotted key that `path` most likely means, or None.

    Looks beside it first, then for the same name elsewhere, then for a similar name elsewhere; a
    name that many sections have (``enabled``) says nothing.
    """
    keys = sorted(set(known))
    parent, _, name = path.rpartition(".")
    beside = {
        key.rpartition(".")[2].lower(): key for key in keys if key.rpartition(".")[0] == parent
    }
    found = difflib.get_close_matches(name.lower(), beside, n=1, cutoff=0.6)
    if found:
        return beside[found[0]]
    elsewhere: dict[str, list[str]] = {}
    for key in keys:
        elsewhere.setdefault(key.rpartition(".")[2].lower(), []).append(key)
    found = difflib.get_close_matches(name.lower(), elsewhere, n=1, cutoff=0.75)
    likely = elsewhere[found[0]] if found else []
    return likely[0] if len(likely) == 1 else None


_QUOTED_NUMBER = re.compile(r"\s*-?\d+([.,]\d+)?([eE][+-]?\d+)?\s*", re.ASCII)
_POINTED = "a decimal number has a point: write"


def unfit_hint(kind: Kind, value: object) -> str:
    """What to do about a value that is almost of a kind; empty where nothing is known."""
    if isinstance(kind, NumberList):
        joined = _joined(value, kind.length)
        return f"{_POINTED} {joined}" if joined else ""
    if isinstance(kind, Flag) and isinstance(value, str) and value.lower() in ("true", "false"):
        return f"write {value.lower()} without quotes"
    if isinstance(value, str) and _QUOTED_NUMBER.fullmatch(value):
        number = value.strip().replace(",", ".")
        return f"{_POINTED} {number}" if "," in value else f"write {number} without quotes"
    return ""


def _joined(value: object, count: int) -> str | None:
    """`value` as a list of `count` decimal numbers, where commas within them made it unfit."""
    if isinstance(value, str):
        parts = value.strip(" []").split(";")
        return _unquoted(parts) if len(parts) == count and "," in value else None
    if not isinstance(value, list | tuple):
        return None
    if len(value) != count:
        return joined_numbers(value, count)
    has_commas = any(isinstance(part, str) and "," in part for part in value)
    return _unquoted(value) if has_commas else None


def _unquoted(parts: Sequence[object]) -> str | None:
    """Numbers that may be in quotes and have commas, as a list; None where one is none."""
    numbers = [str(part).strip() for part in parts]
    if not all(map(_QUOTED_NUMBER.fullmatch, numbers)):
        return None
    return f"[{', '.join(number.replace(',', '.') for number in numbers)}]"
