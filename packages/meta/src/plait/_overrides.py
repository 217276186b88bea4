"""``--set a.b=value``: one key changed from the command line, checked like the file."""

from __future__ import annotations

import json

from plait._json import JsonObject
from plait._keys import KEYS_BY_PATH, canonical_path
from plait._kinds import Text
from plait._problems import ProblemList

__all__ = ["Origins", "apply_override"]

ORIGIN = "--set"


class Origins:
    """Where values came from that are not from the file, by dotted path."""

    def __init__(self) -> None:
        self._by_path: dict[str, str] = {}

    def record(self, path: str, origin: str) -> None:
        """Remember that everything at and under `path` came from `origin`."""
        under = f"{path}."
        for known in [key for key in self._by_path if key.startswith(under)]:
            del self._by_path[known]
        self._by_path[path] = origin

    def of(self, path: str) -> str:
        """The origin of the value at `path`, or of something in it; empty for the file."""
        for known, origin in self._by_path.items():
            if known.startswith(f"{path}."):
                return origin
        while path:
            if path in self._by_path:
                return self._by_path[path]
            path = path.rpartition(".")[0]
        return ""


def _value(path: str, text: str) -> object:
    """The value as JSON where it is JSON, else as text; text keys take what was typed."""
    key = KEYS_BY_PATH.get(canonical_path(path))
    takes_text = key is not None and isinstance(key.kind, Text)
    if takes_text and text != "null":
        return text
    try:
        return json.loads(text, object_pairs_hook=JsonObject)
    except (ValueError, RecursionError):
        return text


def apply_override(
    tree: JsonObject, origins: Origins, override: str, problems: ProblemList
) -> None:
    """Put ``a.b=value`` into `tree`; what is wrong with its form goes to `problems`."""
    path, equals, text = override.partition("=")
    path = path.strip()
    names = path.split(".")
    if not equals or not all(names):
        expected = "KEY=VALUE with a dotted key, such as run.steps=100"
        problems.add(ORIGIN, expected=expected, got=override)
        return
    node = tree
    for depth, name in enumerate(names[:-1], start=1):
        inner = node.setdefault(name, JsonObject())
        if not isinstance(inner, JsonObject):
            reason = f"{ORIGIN} {override} needs an object here"
            problems.add(".".join(names[:depth]), reason=reason, got=inner)
            return
        node = inner
    node[names[-1]] = _value(path, text)
    origins.record(path, ORIGIN)
