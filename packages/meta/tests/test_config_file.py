"""A file that cannot be read, or is not JSON, is said with line, column and the line itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from plait import ConfigError, read_config


def written(folder: Path, text: str) -> Path:
    path = folder / "ds.json"
    path.write_text(text, encoding="utf-8")
    return path


def problems_in(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"a": 1,\n\t"weight_decay": 0,01}',
            (
                "line 2, column 19: a comma within a number: write 0.01\n"
                '     "weight_decay": 0,01}\n'
                "                      ^"
            ),
        ),
        ("{'a': 1}", "line 1, column 2: not JSON: Expecting property name"),
        ('{"a": 1', "line 1, column 8: not JSON: Expecting ',' delimiter"),
        ("", "expected a JSON object, got nothing"),
        ("[1]", "expected a JSON object { ... }, got a list"),
        ("3", "expected a JSON object { ... }, got the value 3"),
        ("[" * 100_000, "not a configuration: nested too deeply"),
        ('{"run": {"steps": ' + "9" * 5000 + "}}", "not JSON that can be read: "),
    ],
)
def test_a_broken_file_is_said_with_line_column_and_the_line(
    tmp_path: Path, text: str, message: str
) -> None:
    found = problems_in(written(tmp_path, text))
    assert len(found) == 1
    assert found[0].startswith(message)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ('{\n  // batch\n  "seed": 1}', "JSON has no comments, take it out"),
        ('{"seed": 1 # one\n}', "JSON has no comments, take it out"),
        ('{/* a */ "seed": 1}', "JSON has no comments, take it out"),
        ('{"seed": 1, }', "leave out the comma before it"),
        ('{"a": [1,]}', "leave out the comma before it"),
        ("{'seed': 1}", 'JSON has straight double quotes: "..."'),
        ("{\u201cseed\u201d: 1}", 'JSON has straight double quotes: "..."'),
        ('{"a": True}', "JSON has true, false and null"),
        ('{"a": auto}', "a name or a word needs double quotes"),
        ("{seed: 1}", "a name or a word needs double quotes"),
        ('{"a": .5}', "a number begins with a digit, or with - and a digit"),
    ],
)
def test_what_json_has_not_is_said_with_what_to_write(
    tmp_path: Path, text: str, remedy: str
) -> None:
    (found,) = problems_in(written(tmp_path, text))
    said = found.splitlines()[0]
    if sys.version_info < (3, 13) or "comma before" not in remedy:  # which says it itself
        assert said.endswith(f"; {remedy}")


def test_an_unfinished_file_has_no_remedy_that_is_wrong(tmp_path: Path) -> None:
    (found,) = problems_in(written(tmp_path, '{"seed": 1} x'))
    assert found.splitlines()[0] == "line 1, column 13: not JSON: Extra data"


@pytest.mark.parametrize(("text", "said"), [("null", "null"), ('"x"', '"x"')])
def test_a_file_that_holds_no_object_is_told_in_json_s_words(
    tmp_path: Path, text: str, said: str
) -> None:
    (found,) = problems_in(written(tmp_path, text))
    assert found == f"expected a JSON object {{ ... }}, got the value {said}"


def test_a_dotted_key_is_no_section(tmp_path: Path) -> None:
    text = '{"zero_optimization.stage": 3, "zero_optimization": {"stage": 1}, "bf16": {"a.b": 1}}'
    assert problems_in(written(tmp_path, text)) == [
        (
            "zero_optimization.stage: a key with a point, got 3; write "
            '{"zero_optimization": {"stage": ...}}'
        ),
        "bf16.a.b: a key with a point, got 1",
    ]
    assert problems_in(written(tmp_path, '{"": 1}')) == [
        '"": unknown key, got 1; see plait config --keys'
    ]
    assert problems_in(written(tmp_path, '{"enabled": true}')) == [
        "enabled: unknown key, got true; see plait config --keys"
    ]


def test_a_long_broken_line_is_cut_around_the_error(tmp_path: Path) -> None:
    text = '{"a": [' + "1, " * 500 + "oops]}"
    lines = problems_in(written(tmp_path, text))[0].splitlines()
    assert len(lines[1]) < 120
    assert lines[1][lines[2].index("^")] == "o"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "nope.json")
    assert str(caught.value) == (
        f"1 error in the configuration ({tmp_path / 'nope.json'}):\n"
        "  cannot be read: No such file or directory"
    )
    assert problems_in(tmp_path) == ["expected a JSON file, got a folder"]
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    assert problems_in(tmp_path / "latin.json") == ["not text in UTF-8: byte 7 is 0xe9"]


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_bytes(b'\xef\xbb\xbf{"run": {"steps": 3}}')
    assert read_config(tmp_path / "ds.json").run.steps == 3
