"""The command line: help, version, and refusals before any rank starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import plait as package
from plait import _run_command
from plait._cli import main
from running import environment, plait, write_text_and_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in, where no rank can start."""

    def refuse(*_: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(_run_command, "launch_ranks", refuse)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    write_text_and_config(tmp_path)
    return tmp_path


def test_the_version_is_printed_by_the_command(tmp_path: Path) -> None:
    done = plait("--version", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"plait {package.__version__}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_says_what_to_type(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert "train" in said
    if arguments[0] == "train":
        for option in ("CONFIG.json", "--ranks", "--set", "--resume", "torchrun", "Exit codes"):
            assert option in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train", "--ranks", "0"], "--ranks: expected a whole number of at least 1, got '0'"),
        (["train", "--ranks", "two"], "--ranks: expected a whole number of at least 1, got 'two'"),
        (["train", "--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_wrong_command_line_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--set", "run.stepz=5", "--set", "train_batch_size=7"],
            "plait: 2 errors in the configuration (the defaults):\n  run.stepz: unknown key",
        ),
        (["train", "nope.json"], "(nope.json):\n  cannot be read: No such file or directory"),
        (["train", "--set", "data.path=gone.txt"], "data.path: gone.txt cannot be read"),
        (["train", "--set", "data.path=empty"], "data.path: empty holds no files"),
        (["train", "--resume"], "--resume: no plait-run-N folder in "),
        (["train", "--resume", "tiny.json"], "--resume: tiny.json is a file, expected a run"),
        (["train", "tiny.json", "--set", "run.folder=tiny.json"], "tiny.json is a file"),
    ],
)
def test_a_refusal_exits_with_2_before_any_rank_starts_and_leaves_nothing_behind(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("plait: ")
    assert message in said.err
    assert not list(folder.glob("plait-run-*"))


@pytest.mark.usefixtures("folder")
def test_more_ranks_than_gpus_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_run_command, "num_accelerators", lambda device: int(device == "auto"))
    assert main(["train", "--ranks", "2"]) == 2
    assert capsys.readouterr().err.splitlines()[1] == (
        "  run.ranks: expected at most 1, the number of GPUs here, got 2; "
        "run.device=cpu trains on CPUs"
    )


@pytest.mark.parametrize("arguments", [["config"], ["config", "--schema"], ["config", "--keys"]])
def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback(
    tmp_path: Path, arguments: list[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "plait", *arguments],
        cwd=tmp_path,
        env=environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
