"""The guide says what the code does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait._key import Key, Use
from plait._keys import KEYS
from plait._keys_table import default_said, keys_page
from plait._schedulers import SCHEDULERS

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = DOCS / "plait.md"


@pytest.mark.parametrize(
    "key", [key for key in KEYS if key.use is Use.HONOURED], ids=lambda key: key.path
)
def test_the_guide_lists_every_key_with_its_default_and_meaning(key: Key) -> None:
    row = f"| `{key.path}` | {default_said(key)} | {key.meaning} |"
    assert row in GUIDE.read_text(encoding="utf-8")


def test_the_guide_lists_every_schedule_with_its_parameters() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for name, parameters in SCHEDULERS.items():
        assert name in text
        for key, parameter in parameters.items():
            assert f"| `{key}` | `{json.dumps(parameter.default)}` | {parameter.meaning} |" in text


def test_the_page_on_deepspeed_s_keys_is_the_table_that_the_reader_checks_against() -> None:
    """`plait config --keys > docs/deepspeed-keys.md` makes it again."""
    assert (DOCS / "deepspeed-keys.md").read_text(encoding="utf-8") == keys_page()


def test_the_page_on_deepspeed_s_keys_is_linked() -> None:
    for page in ("README.md", "plait.md"):
        assert "(deepspeed-keys.md)" in (DOCS / page).read_text(encoding="utf-8")
