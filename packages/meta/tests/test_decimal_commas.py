"""Decimal commas, as translated tutorials print them, are found, and nothing else is."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import ConfigError, read_config
from plait._decimal_commas import find_decimal_commas, joined_numbers
from strategies import json_values


def problems_in(folder: Path, text: str) -> list[str]:
    path = folder / "ds.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    return [str(problem).partition("\n")[0] for problem in caught.value.problems]


def comma(line: int, column: int, instead: str) -> str:
    return f"line {line}, column {column}: a comma within a number: write {instead}"


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ('{"weight_decay": 0,01}', [comma(1, 19, "0.01")]),
        ('{"a": 1,\n "weight_decay": 0,01\n}', [comma(2, 19, "0.01")]),
        ('{"a": {"b": {"weight_decay": 0,01}}}', [comma(1, 31, "0.01")]),
        ('{"lr": 1,5e-4, "b": 2}', [comma(1, 9, "1.5e-4")]),
        ('{"lr": -0,5}', [comma(1, 10, "-0.5")]),
        ('{"betas": [0,9; 0,999]}', [comma(1, 13, "0.9"), comma(1, 18, "0.999")]),
        ('{"betas": [0,9;0,999]}', [comma(1, 13, "0.9"), comma(1, 17, "0.999")]),
        ('{"betas": [0,9, 0,01]}', [comma(1, 13, "0.9"), comma(1, 18, "0.01")]),
        (
            '{"betas": [0,9; 0,999],\r\n "eps": 1e-8,\r\n "weight_decay": 0,01}',
            [comma(1, 13, "0.9"), comma(1, 18, "0.999"), comma(3, 19, "0.01")],
        ),
        ('{"steps": 1,024}', [comma(1, 12, "1.024 or 1024")]),
        ('{"size": 50,000,000}', [comma(1, 12, "50000000")]),
        # A second error of another kind is said too.
        (
            '{"lr": 0,01, "a": 1,}',
            [
                comma(1, 9, "0.01"),
                (
                    "line 1, column 21: not JSON: Expecting property name enclosed in double "
                    "quotes; leave out the comma before it"
                ),
            ],
        ),
    ],
)
def test_a_decimal_comma_is_said_with_line_column_and_what_to_write(
    tmp_path: Path, text: str, problems: list[str]
) -> None:
    assert problems_in(tmp_path, text) == problems


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1 "b": 2}',
        '{"a": 1,}',
        '{"a": [1,2,]}',
        '{"a": [1,2 3]}',
        '{"a": [0,9, 0,999,]}',
        '{"a": 1,2: 3}',
        '{"a": 1, 2}',
        '{"a": 1e-3,5}',
        '{"a": 01}',
        '{"a: 0,01}',
        '{"a": "0,01", "b": }',
        '{"a": "[0,9; 0,999]" "b": 1}',
        '{"a": [0.9; 0.999]}',
        '{"a": [1,2], "b": [3,4] "c": 5}',
    ],
)
def test_other_errors_are_not_taken_for_one(tmp_path: Path, text: str) -> None:
    (said,) = problems_in(tmp_path, text)
    assert "not JSON: " in said
    assert "comma within" not in said


@pytest.mark.parametrize(
    ("betas", "instead"),
    [
        ([0, 9, 0, 999], "[0.9, 0.999]"),
        ([0.9, 0, 999], "[0.9, 0.999]"),
        ([0, 9, 0.95], "[0.9, 0.95]"),
        ("[0,9; 0,999]", "[0.9, 0.999]"),
    ],
)
def test_four_numbers_where_two_belong_are_said_with_what_to_write(
    tmp_path: Path, betas: object, instead: str
) -> None:
    (said,) = problems_in(tmp_path, json.dumps({"optimizer": {"params": {"betas": betas}}}))
    assert said.startswith("optimizer.params.betas: expected a list of 2 numbers")
    assert said.endswith(f"; a decimal number has a point: write {instead}")


@pytest.mark.parametrize("betas", [[0.9], [0.9, 0.99, 0.999], [1, 2, 3, 4], [0.9, "x"], []])
def test_lists_that_are_wrong_in_another_way_get_no_such_advice(
    tmp_path: Path, betas: object
) -> None:
    (said,) = problems_in(tmp_path, json.dumps({"optimizer": {"params": {"betas": betas}}}))
    assert "write" not in said


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("0,01", "a decimal number has a point: write 0.01"),
        ('"1e-4"', "write 1e-4 without quotes"),
        ("1,5e-4", "a decimal number has a point: write 1.5e-4"),
    ],
)
def test_a_number_that_is_text_is_said_with_what_to_write(typed: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        read_config(overrides=[f"optimizer.params.lr={typed}"])


@given(value=st.dictionaries(st.text(max_size=5), json_values(), max_size=4))
def test_json_has_none_in_its_objects(value: object) -> None:
    text = json.dumps(value, indent=1)
    assert find_decimal_commas(text) == []


@given(
    numbers=st.lists(st.integers(1, 999), min_size=1, max_size=5),
    spaces=st.sampled_from(["", " ", "\n  "]),
)
def test_every_number_with_a_comma_in_an_object_is_found(numbers: list[int], spaces: str) -> None:
    items = [f'"k{i}":{spaces}0,{number}' for i, number in enumerate(numbers)]
    found = find_decimal_commas("{" + f",{spaces}".join(items) + "}")
    assert [item.instead for item in found] == [f"0.{number}" for number in numbers]


@given(numbers=st.lists(st.integers(1, 99999), min_size=1, max_size=4))
def test_numbers_parted_at_their_commas_are_joined(numbers: list[int]) -> None:
    parted = [part for number in numbers for part in (0, number)]
    joined = joined_numbers(parted, len(numbers))
    assert joined == f"[{', '.join(f'0.{number}' for number in numbers)}]"
    assert all(math.isfinite(number) for number in json.loads(joined))
