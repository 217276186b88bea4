"""Decimal commas, as translated tutorials print them: found, and what to write instead.

``0,01`` breaks an object (after a comma comes a name), and ``[0,9; 0,999]`` a list;
``[0,9, 0,999]`` is a list of four numbers. Where a comma may as well part two numbers, nothing is
said.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["DecimalComma", "find_decimal_commas", "joined_numbers", "point_for_comma"]

_TOKEN = re.compile(
    r"""(?P<space>\s+)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<number>-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
      | (?P<other>.)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_WITH_COMMAS = re.compile(r"-?\d+(?:,\d+)+(?:[eE][+-]?\d+)?", re.ASCII)
_THOUSANDS = re.compile(r"-?[1-9]\d{0,2}(?:,\d{3})+", re.ASCII)


@dataclass(frozen=True, slots=True)
class DecimalComma:
    """A number with a comma in it.

    Args:
        start: Position of the number in the text.
        comma: Position of its first comma.
        written: As it stands there.
        instead: What to write.
    """

    start: int
    comma: int
    written: str
    instead: str


@dataclass(slots=True)
class _Bracket:
    """An open ``{`` or ``[``, and what has been seen in it."""

    opens: str
    is_foreign: bool = False  # a list that JSON does not have: with ; or with a leading zero


def find_decimal_commas(text: str) -> list[DecimalComma]:
    """The decimal commas of a text that is not JSON, in order."""
    brackets: list[_Bracket] = []
    found: list[tuple[_Bracket, DecimalComma]] = []
    end = 0  # of the number with commas that was found last
    for token in _TOKEN.finditer(text):
        said = token.group()
        if said == '"':  # an open string: what follows may be text
            break
        if token.lastgroup == "other":
            _bracket(brackets, said)
        elif token.lastgroup == "number" and brackets and token.start() >= end:
            comma = _at(text, token.start())
            parts = [said] if comma is None else comma.written.split(",")
            brackets[-1].is_foreign |= any(map(_has_leading_zero, parts))
            if comma:
                end = comma.start + len(comma.written)
                found.append((brackets[-1], comma))
    return [comma for bracket, comma in found if bracket.opens == "{" or bracket.is_foreign]


def _bracket(brackets: list[_Bracket], said: str) -> None:
    """Open or close one, or mark the open one."""
    if said in ("{", "["):
        brackets.append(_Bracket(said))
    elif said in ("}", "]") and brackets:
        brackets.pop()
    elif said == ";" and brackets:
        brackets[-1].is_foreign = True


def _has_leading_zero(number: str) -> bool:
    return re.match(r"-?0\d", number) is not None


def _at(text: str, start: int) -> DecimalComma | None:
    """The number with commas that begins at `start`; None where it is followed by a colon."""
    match = _WITH_COMMAS.match(text, start)
    if not match or re.match(r"\s*[:.]", text[match.end() : match.end() + 20]):
        return None
    written = match.group()
    return DecimalComma(start, start + written.index(","), written, _instead(written))


def _instead(written: str) -> str:
    """What to write for a number with commas."""
    plain = written.replace(",", "")
    if written.count(",") > 1:
        return plain
    if _THOUSANDS.fullmatch(written):
        return f"{written.replace(',', '.')} or {plain}"
    return written.replace(",", ".")


def point_for_comma(text: str, commas: Sequence[DecimalComma]) -> str:
    """`text` with points in the place of `commas`, and commas in the place of ``;``."""
    letters = list(text)
    for comma in commas:
        for position in range(comma.start, comma.start + len(comma.written)):
            if letters[position] == ",":
                letters[position] = "." if position == comma.comma else "0"
    if commas:
        outside = [match for match in _TOKEN.finditer(text) if match.group() == ";"]
        for match in outside:
            letters[match.start()] = ","
    return "".join(letters)


def joined_numbers(values: Sequence[object], count: int) -> str | None:
    """What `values` say as `count` decimal numbers whose commas parted them; None if nothing.

    Example:
        >>> joined_numbers([0, 9, 0, 999], 2)
        '[0.9, 0.999]'
    """
    numbers = _join(list(values), count)
    return None if numbers is None else f"[{', '.join(numbers)}]"


def _join(values: list[object], count: int) -> list[str] | None:
    if not values or not count:
        return [] if not values and not count else None
    first, *rest = values
    if not isinstance(first, int | float) or isinstance(first, bool):
        return None
    if isinstance(first, int) and rest and isinstance(rest[0], int) and rest[0] >= 0:
        joined = _join(rest[1:], count - 1)
        if joined is not None and first == 0:
            return [f"{first}.{rest[0]}", *joined]
    alone = _join(rest, count - 1)
    return None if alone is None else [f"{first}", *alone]
