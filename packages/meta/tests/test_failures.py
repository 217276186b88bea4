"""Which rank's error is shown."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from plait._failures import describe, first_failure, record_failure
from plait._launch import Joined, joined
from plait._text import TextError


def test_the_error_recorded_first_is_the_one(tmp_path: Path) -> None:
    record_failure(tmp_path, 2, TextError("data.path: nowhere"))
    record_failure(tmp_path, 0, RuntimeError("connection closed by peer"))
    failure = first_failure(tmp_path, {0: 1})
    assert (failure.rank, failure.message) == (2, "data.path: nowhere")


def test_a_killed_rank_comes_before_the_errors_it_caused(tmp_path: Path) -> None:
    record_failure(tmp_path, 0, RuntimeError("connection closed by peer"))
    failure = first_failure(tmp_path, {1: -signal.SIGKILL})
    assert failure.rank == 1
    assert failure.message == "killed by SIGKILL (the system may have run out of memory)"


def test_a_rank_that_left_no_word_is_named_with_its_exit_code(tmp_path: Path) -> None:
    assert first_failure(tmp_path, {1: 3}).message == "ended with exit code 3 and no message"


def test_errors_that_people_cause_come_without_a_traceback() -> None:
    assert describe(TextError("data.path: empty")) == "data.path: empty"
    assert describe(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
    with pytest.raises(KeyError) as caught:
        os.environ["PLAIT_TEST_SURPRISE"]
    assert "Traceback" in describe(caught.value)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, None),
        ({"WORLD_SIZE": "4"}, None),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, Joined(3, 4, 3)),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "LOCAL_RANK": "1"},
            Joined(3, 4, 1),
        ),
    ],
)
def test_a_launcher_s_rank_is_joined_only_where_it_is_complete(
    variables: dict[str, str], rank: Joined | None
) -> None:
    assert joined(variables) == rank


def test_import_changes_no_variable_starts_nothing_and_is_quick() -> None:
    code = """
import os, sys, threading, time, torch
before, threads, modules = dict(os.environ), threading.active_count(), set(sys.modules)
start = time.process_time()
import plait
took = time.process_time() - start
assert dict(os.environ) == before
assert threading.active_count() == threads
assert not torch.distributed.is_initialized()
assert not (set(sys.modules) - modules) & {"matplotlib", "tqdm"}
print(took)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert float(done.stdout) < 0.6
