"""What can be wrong with a configuration, and how it is said.

ConfigError (a ValueError) carries every problem found, not just the first one:

    2 errors in the configuration (ds.json):
      optimizer.params.lr: expected a number of at least 0, got "fast"
      run.stepz: unknown key, got 5 (--set); did you mean run.steps?
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["ConfigError", "Problem", "ProblemList", "nearest_key", "shown"]

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

    Looks beside it first, then for the same name elsewhere, then for a similar name elsewhere.
    """
    keys = sorted(set(known))
    parent, _, name = path.rpartition(".")
    beside = {
        key.rpartition(".")[2].lower(): key for key in keys if key.rpartition(".")[0] == parent
    }
    found = difflib.get_close_matches(name.lower(), beside, n=1, cutoff=0.6)
    if found:
        return beside[found[0]]
    elsewhere: dict[str, str] = {}
    for key in keys:
        elsewhere.setdefault(key.rpartition(".")[2].lower(), key)
    found = difflib.get_close_matches(name.lower(), elsewhere, n=1, cutoff=0.75)
    return elsewhere[found[0]] if found else None
