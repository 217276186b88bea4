"""``plait doctor``: its findings as lines for a reader."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines import HEALTHY, NOT_MET
from plait._doctor import gigabytes
from plait._doctor_command import report
from plait._doctor_facts import Files
from plait._doctor_parts import judge


def test_the_report_groups_lines_and_ends_with_a_sum() -> None:
    facts = replace(HEALTHY, self_test=NOT_MET, files=Files(soft_limit=16, hard_limit=16))
    said = report(judge(facts)).splitlines()
    assert said[0].startswith("plait ")
    assert "open files" in said
    (line,) = [line for line in said if line.startswith("  warn")]
    assert line.split("  -> ")[1] == "raise the hard limit (limits.conf)"
    assert said[-1] == "2 fail, 1 to look at"
    assert report(judge(HEALTHY)).splitlines()[-1] == "nothing fails"


@pytest.mark.parametrize(
    ("num_bytes", "said"), [(0, "0 MiB"), (64 * 2**20, "64 MiB"), (3 * 2**29, "1.5 GiB")]
)
def test_sizes_are_said_in_powers_of_1024(num_bytes: int, said: str) -> None:
    assert gigabytes(num_bytes) == said
