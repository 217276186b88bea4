"""``plait doctor`` on the machine at hand: looking at its parts, and letting ranks meet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from plait import _doctor_host, _doctor_torch
from plait._doctor_facts import Step, Unreadable, gathered
from plait._doctor_self_test import self_test
from running import environment, plait

PACKAGES = Path(__file__).parents[2]


def test_a_look_that_raises_becomes_what_it_raised() -> None:
    def look() -> int:
        raise OSError("no such thing")

    assert gathered(look) == Unreadable("OSError: no such thing")
    assert gathered(lambda: 3) == 3


@pytest.mark.parametrize("name", ["meta", "zero-partition", "comm-quant"])
def test_the_libraries_are_those_that_the_packages_declare(name: str) -> None:
    project = tomllib.loads((PACKAGES / name / "pyproject.toml").read_text())["project"]
    needed = {
        f"{each.name}>={each.minimum}" if each.minimum else each.name
        for each in _doctor_host.LIBRARIES
        if each.is_needed
    }
    assert needed >= set(project["dependencies"])
    if name == "meta":
        assert needed == set(project["dependencies"])
    # An extra may have an upper bound, which the doctor does not repeat.
    known = {f"{each.name}>={each.minimum}" for each in _doctor_host.LIBRARIES}
    extras = project.get("optional-dependencies", {}).values()
    asked = {each.partition(",")[0] for requirements in extras for each in requirements}
    assert known >= asked


def test_a_folder_that_is_not_there_has_no_shared_memory(tmp_path: Path) -> None:
    shared = _doctor_host.shared_memory(tmp_path / "shm")
    assert not shared.exists


def test_looking_leaves_nothing_behind(tmp_path: Path) -> None:
    assert _doctor_host.disk(tmp_path).error == ""
    assert _doctor_host.shared_memory(tmp_path).error == ""
    assert not list(tmp_path.iterdir())


def test_every_part_of_this_machine_can_be_looked_at() -> None:
    for look in (
        _doctor_host.system,
        _doctor_host.cores,
        _doctor_host.memory,
        _doctor_host.shared_memory,
        _doctor_host.files,
        _doctor_host.libraries,
        _doctor_torch.kernels,
    ):
        assert not isinstance(gathered(look), Unreadable)


def test_an_interface_that_is_not_there_fails_once_the_ranks_have_met() -> None:
    test = self_test({**os.environ, "GLOO_SOCKET_IFNAME": "no-such-if"})
    assert test.error
    assert test.reached is Step.MET
    assert test.interface == "no-such-if"
    assert test.works_with == ""


def test_ranks_that_cannot_start_are_a_finding() -> None:
    test = self_test({**os.environ, "PYTHONUTF8": "no number"})
    assert test.error
    assert test.reached is None


def test_a_torch_without_collectives_is_told(tmp_path: Path) -> None:
    program = (
        "import torch._C, sys\n"
        "del torch._C._c10d_init\n"  # what torch.distributed.is_available looks for
        "from plait._cli import main\n"
        "sys.exit(main(['doctor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "fail  torch.distributed" in done.stdout, done.stderr
    assert done.returncode == 1


def test_the_command_lets_two_ranks_meet_and_tells_it_as_json(tmp_path: Path) -> None:
    done = plait("doctor", "--json", folder=tmp_path)
    told = json.loads(done.stdout)
    assert done.stderr == ""
    assert told["facts"]["self_test"]["reached"] == Step.ADDED
    fails = [each for each in told["findings"] if each["level"] == "fail"]
    assert done.returncode == bool(fails)
    assert told["findings"][0].keys() == {"group", "level", "what", "value", "remedy"}
    assert environment()["OMP_NUM_THREADS"] == told["facts"]["cores"]["omp_num_threads"]
