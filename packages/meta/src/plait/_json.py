"""JSON as people write it by hand: errors carry line, column and the line itself."""

from __future__ import annotations

import json
from pathlib import Path

from plait._problems import ConfigError, Problem

__all__ = ["JsonObject", "parse_json", "read_json"]

_MAX_LINE = 100


class JsonObject(dict[str, object]):
    """A JSON object that remembers which of its keys came more than once."""

    duplicates: tuple[str, ...] = ()


def _object(pairs: list[tuple[str, object]]) -> JsonObject:
    result = JsonObject(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        result.duplicates = tuple(sorted({name for name in names if names.count(name) > 1}))
    return result


def _pointer(text: str, line_number: int, column: int) -> str:
    """The offending line with a caret under the column."""
    lines = text.splitlines()
    line = lines[line_number - 1] if line_number <= len(lines) else ""
    start = max(0, column - 1 - _MAX_LINE // 2)
    cut = line[start : start + _MAX_LINE].replace("\t", " ")
    return f"    {cut}\n    {' ' * (column - 1 - start)}^"


def parse_json(text: str, *, source: str) -> object:
    """Read JSON text; a syntax error is a ConfigError, a key given twice is remembered."""
    if not text.strip():
        raise ConfigError([Problem(path="", expected="a JSON object", got="nothing")], source)
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        reason = f"{where}: not JSON: {error.msg}\n{_pointer(text, error.lineno, error.colno)}"
    except RecursionError:
        reason = "not a configuration: nested too deeply"
    except ValueError as error:  # a number with more digits than Python reads
        reason = f"not JSON that can be read: {error}"
    raise ConfigError([Problem(path="", reason=reason)], source)


def read_json(path: Path) -> JsonObject:
    """Read the JSON object in a file; everything that can go wrong is a ConfigError."""
    source = str(path)
    if path.is_dir():
        raise ConfigError([Problem(path="", expected="a JSON file", got="a folder")], source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"not text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}"
        raise ConfigError([Problem(path="", reason=reason)], source) from None
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {error.strerror if isinstance(error, OSError) else error}"
        raise ConfigError([Problem(path="", reason=reason)], source) from None
    value = parse_json(text, source=source)
    if not isinstance(value, JsonObject):
        kind = "a list" if isinstance(value, list) else f"the value {value!r}"
        raise ConfigError([Problem(path="", expected="a JSON object { ... }", got=kind)], source)
    return value
