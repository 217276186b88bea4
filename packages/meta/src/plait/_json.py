"""JSON as people write it by hand: errors carry line, column and the line itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

from plait._decimal_commas import DecimalComma, find_decimal_commas, point_for_comma
from plait._problems import ConfigError, Problem, shown

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
    lines = text.split("\n")
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
        raise ConfigError(_syntax_problems(text, error), source) from None
    except RecursionError:
        reason = "not a configuration: nested too deeply"
    except ValueError as error:  # a number with more digits than Python reads
        reason = f"not JSON that can be read: {str(error).partition(';')[0]}"
    raise ConfigError([Problem(path="", reason=reason)], source)


def _syntax_problems(text: str, error: json.JSONDecodeError) -> list[Problem]:
    """Every decimal comma; the error itself where they do not explain it."""
    commas = find_decimal_commas(text)
    problems = [_decimal_comma(text, comma) for comma in commas]
    try:
        json.loads(point_for_comma(text, commas))
    except json.JSONDecodeError as left:
        error = left
    except (ValueError, RecursionError):
        return problems
    else:
        return problems
    where = f"line {error.lineno}, column {error.colno}"
    said = f"{where}: not JSON: {error.msg}{_remedy(text, error)}"
    reason = f"{said}\n{_pointer(text, error.lineno, error.colno)}"
    return [*problems, Problem(path="", reason=reason)]


_COMMENT = re.compile(r"//|/\*|#")
_COMMA_BEFORE = re.compile(r",\s*$")
_REMEDIES = (
    (r"'|[\u2018-\u201f]", 'JSON has straight double quotes: "..."'),
    (r"True\b|False\b|None\b", "JSON has true, false and null"),
    (r"\.\d|\+", "a number begins with a digit, or with - and a digit"),
    (r"[A-Za-z_]", "a name or a word needs double quotes"),
)


def _remedy(text: str, error: json.JSONDecodeError) -> str:
    """What to do about what stands where JSON ends; empty where nothing is known."""
    rest = text[error.pos : error.pos + 8]
    if _COMMENT.match(rest):
        return "; JSON has no comments, take it out"
    if rest.startswith(("}", "]")) and _COMMA_BEFORE.search(text[: error.pos]):
        return "; leave out the comma before it"
    if error.msg.startswith(("Expecting value", "Expecting property name")):
        for pattern, remedy in _REMEDIES:
            if re.match(pattern, rest):
                return f"; {remedy}"
    return ""


def _decimal_comma(text: str, comma: DecimalComma) -> Problem:
    line = text.count("\n", 0, comma.comma) + 1
    column = comma.comma - text.rfind("\n", 0, comma.comma)
    said = f"line {line}, column {column}: a comma within a number: write {comma.instead}"
    return Problem(path="", reason=f"{said}\n{_pointer(text, line, column)}")


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
        kind = "a list" if isinstance(value, list) else f"the value {shown(value)}"
        raise ConfigError([Problem(path="", expected="a JSON object { ... }", got=kind)], source)
    return value
