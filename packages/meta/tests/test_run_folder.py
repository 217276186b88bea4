"""Run folders: which one, what is refused, what a resumed run finds and replaces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait import Config, read_config
from plait._run_folder import (
    RunFolderError,
    checkpoints_in,
    find_resumed,
    folder_in,
    keep_newest,
    plan_run,
    start_folder,
)
from zero_partition import CheckpointError, partition


def config_for(folder: Path | None = None, *overrides: str) -> Config:
    given = [f"run.folder={folder}"] if folder else []
    return read_config(overrides=[*given, *overrides])


def save_checkpoint(path: Path) -> None:
    """A checkpoint of next to nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partition(torch.nn.Linear(1, 1), stage=0).save(path)


def run_in(folder: Path, *steps: int) -> Path:
    """A run folder with checkpoints at the given steps."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("{}\n")
    for step in steps:
        save_checkpoint(folder / "checkpoints" / f"step-{step}")
    return folder


def test_a_run_without_a_folder_gets_the_next_free_name(tmp_path: Path) -> None:
    (tmp_path / "plait-run-2").mkdir()
    (tmp_path / "plait-run-x").mkdir()
    first = plan_run(config_for(), None, parent=tmp_path)
    second = plan_run(config_for(), None, parent=tmp_path)
    assert [first.folder.name, second.folder.name] == ["plait-run-3", "plait-run-4"]


def test_a_folder_that_holds_a_run_is_refused_with_the_three_ways_on(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", 4)
    with pytest.raises(RunFolderError) as caught:
        plan_run(config_for(folder), None, parent=tmp_path)
    assert str(caught.value) == (
        f"run.folder: {folder} already holds a run (config.json, metrics.jsonl, checkpoints); "
        "continue it with --resume, choose another folder, or replace it with "
        "--set run.overwrite=true"
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file, expected a folder"):
        plan_run(config_for(tmp_path / "file"), None, parent=tmp_path)


def test_replacing_a_run_removes_its_files_only_when_the_new_one_begins(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", 4)
    (folder / "mine.txt").write_text("keep")
    config = config_for(folder, "run.overwrite=true")
    plan = plan_run(config, None, parent=tmp_path)
    assert checkpoints_in(folder)
    start_folder(plan, config)
    assert not checkpoints_in(folder)
    assert not plan.metrics.exists()
    assert (folder / "mine.txt").read_text() == "keep"
    assert read_config(folder / "config.json").as_json() == config.as_json()


def test_resume_finds_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", 4, 12, 8)
    (folder / "checkpoints" / "step-16").mkdir()  # no index
    (folder / "checkpoints" / "step-20.tmp").mkdir()
    (folder / "checkpoints" / "step-20.tmp" / "index.json").write_text("{}")
    resumed = find_resumed(str(folder), folder=None, parent=tmp_path)
    assert resumed.checkpoint == folder / "checkpoints" / "step-12"
    assert resumed.config == folder / "config.json"
    assert find_resumed("", folder=str(folder), parent=tmp_path) == resumed


def test_resume_alone_means_the_newest_default_folder_that_holds_a_checkpoint(
    tmp_path: Path,
) -> None:
    run_in(tmp_path / "plait-run-2", 4)
    run_in(tmp_path / "plait-run-10", 6)
    run_in(tmp_path / "plait-run-11")
    resumed = find_resumed("", folder=None, parent=tmp_path)
    assert resumed.checkpoint == tmp_path / "plait-run-10" / "checkpoints" / "step-6"


def test_resume_takes_one_checkpoint_by_its_folder(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", 4, 8)
    resumed = find_resumed(str(folder / "checkpoints" / "step-4"), folder=None, parent=tmp_path)
    assert resumed.folder == folder
    lone = tmp_path / "step-9"
    save_checkpoint(lone)
    resumed = find_resumed(str(lone), folder=None, parent=tmp_path)
    assert (resumed.folder, resumed.config) == (None, None)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "--resume: no plait-run-N folder in {parent} holds a checkpoint; name the run"),
        ("nowhere", "--resume: {parent}/nowhere does not exist"),
        ("a.json", "--resume: {parent}/a.json is a file, expected a run folder"),
        ("empty", "--resume: {parent}/empty holds no complete checkpoint; it is made after"),
        ("dead", "--resume: {parent}/dead holds no complete checkpoint (incomplete: step-4.tmp)"),
    ],
)
def test_nothing_to_resume_is_said(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dead" / "checkpoints" / "step-4.tmp").mkdir(parents=True)
    with pytest.raises(RunFolderError) as caught:
        find_resumed(path and str(tmp_path / path), folder=None, parent=tmp_path)
    assert str(caught.value).startswith(message.format(parent=tmp_path))


def test_an_older_checkpoint_does_not_replace_newer_ones_unasked(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", 4, 8, 12)
    older = find_resumed(str(folder / "checkpoints" / "step-4"), folder=None, parent=tmp_path)
    with pytest.raises(RunFolderError, match=r"newer checkpoints \(step-8, step-12\) than step-4"):
        plan_run(config_for(), older, parent=tmp_path)
    config = config_for(None, "run.overwrite=true")
    plan = plan_run(config, older, parent=tmp_path)
    start_folder(plan, config)
    assert [step for step, _ in checkpoints_in(folder)] == [4]
    assert plan.metrics.exists()


def test_continuing_in_another_folder_takes_the_metrics_along(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", 4, 8)
    older = find_resumed(str(folder / "checkpoints" / "step-4"), folder=None, parent=tmp_path)
    config = config_for(tmp_path / "branch")
    plan = plan_run(config, older, parent=tmp_path)
    start_folder(plan, config)
    assert plan.metrics.read_text() == (folder / "metrics.jsonl").read_text()
    assert [step for step, _ in checkpoints_in(folder)] == [4, 8]


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", 80, 160, 240)
    resumed = find_resumed(str(folder), folder=None, parent=tmp_path)
    keep_newest(plan_run(config_for(), resumed, parent=tmp_path))
    assert [step for step, _ in checkpoints_in(folder)] == [160, 240]


def test_the_last_folder_given_on_the_command_line_counts() -> None:
    assert folder_in(["run.folder=a", "run.steps=1", "run.folder=b"]) == "b"
    assert folder_in(["run.steps=1"]) is None


def test_a_damaged_newest_checkpoint_is_not_passed_over(tmp_path: Path) -> None:
    folder = run_in(tmp_path / "run", 4, 8)
    (folder / "checkpoints" / "step-8" / "index.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="step-8"):
        find_resumed(str(folder), folder=None, parent=tmp_path)
