"""The guide says what the code does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait._keys import KEYS, Key
from plait._schedulers import SCHEDULERS

GUIDE = Path(__file__).parents[3] / "docs" / "plait.md"


def default_said(key: Key) -> str:
    return key.default_said or f"`{json.dumps(key.default)}`"


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_the_guide_lists_every_key_with_its_default_and_meaning(key: Key) -> None:
    row = f"| `{key.path}` | {default_said(key)} | {key.meaning} |"
    assert row in GUIDE.read_text(encoding="utf-8")


def test_the_guide_lists_every_schedule_with_its_parameters() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for name, parameters in SCHEDULERS.items():
        assert name in text
        for key, parameter in parameters.items():
            assert f"| `{key}` | `{json.dumps(parameter.default)}` | {parameter.meaning} |" in text
