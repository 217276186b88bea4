"""The folder of a run: where it is, what it holds, where a resumed run begins.

plait-run-1/
  config.json     the configuration, as it was understood
  metrics.jsonl   one line a step
  loss.png        the curves
  sample.txt      text generated at the end
  checkpoints/step-N/
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait._config import Config
from zero_partition import latest_checkpoint

__all__ = ["RunFolderError", "RunPlan", "find_resumed", "keep_newest", "plan_run", "start_folder"]

DEFAULT_NAME = "plait-run-"
KEPT_CHECKPOINTS = 2
_STEP = re.compile(r"step-(\d+)")
_CONTENTS = ("config.json", "metrics.jsonl", "loss.png", "sample.txt", "checkpoints")


class RunFolderError(ValueError):
    """The run folder does not allow what was asked; the message says what does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """A checkpoint to continue from, and the run folder it lies in, if it lies in one."""

    checkpoint: Path
    folder: Path | None

    @property
    def step(self) -> int | None:
        """Updates made, where the checkpoint has the name that plait gives."""
        match = _STEP.fullmatch(self.checkpoint.name)
        return int(match[1]) if match else None

    @property
    def config(self) -> Path | None:
        """The configuration the run was started with."""
        path = self.folder / "config.json" if self.folder else None
        return path if path and path.is_file() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Where a run writes, and the checkpoint it continues from."""

    folder: Path
    resumed: Resumed | None

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.folder / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Holds ``step-N`` folders."""
        return self.folder / "checkpoints"


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run folder, oldest first; a save that died left another name."""
    found = []
    for path in (folder / "checkpoints").glob("step-*"):
        match = _STEP.fullmatch(path.name)
        if match and (path / "index.json").is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def _default_folders(parent: Path) -> list[tuple[int, Path]]:
    """``plait-run-N`` folders, lowest number first."""
    found = []
    for path in parent.glob(f"{DEFAULT_NAME}*"):
        number = path.name.removeprefix(DEFAULT_NAME)
        if number.isdecimal() and path.is_dir():
            found.append((int(number), path))
    return sorted(found)


def find_resumed(path: str, *, folder: str | None, parent: Path) -> Resumed:
    """The checkpoint that ``--resume`` means.

    Args:
        path: A run folder or a checkpoint folder; empty for the run in `folder`, or else the
            newest ``plait-run-N`` in `parent` that holds a checkpoint.
        folder: ``run.folder``, where it is set.
        parent: Where default run folders are looked for.

    Raises:
        RunFolderError: There is none.
        zero_partition.CheckpointError: The newest one is damaged.
    """
    given = path or folder
    if not given:
        for _, candidate in reversed(_default_folders(parent)):
            if newest := latest_checkpoint(candidate / "checkpoints"):
                return Resumed(checkpoint=newest, folder=candidate)
        raise RunFolderError(
            f"--resume: no {DEFAULT_NAME}N folder in {parent.resolve()} holds a checkpoint; "
            "name the run folder: --resume PATH"
        )
    at = Path(given)
    if not at.exists():
        raise RunFolderError(f"--resume: {at} does not exist")
    if not at.is_dir():
        raise RunFolderError(
            f"--resume: {at} is a file, expected a run folder or a checkpoint folder "
            "(a configuration file goes before --resume)"
        )
    if (at / "index.json").is_file():
        inside = at.resolve().parent.name == "checkpoints"
        return Resumed(checkpoint=at, folder=at.resolve().parent.parent if inside else None)
    newest = latest_checkpoint(at / "checkpoints")
    if newest is None:
        raise RunFolderError(f"--resume: {at} holds no complete checkpoint{_incomplete(at)}")
    return Resumed(checkpoint=newest, folder=at)


def _incomplete(folder: Path) -> str:
    dead = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    return (
        f" (incomplete: {', '.join(dead)})" if dead else "; it is made after run.save_every steps"
    )


def plan_run(config: Config, resumed: Resumed | None, *, parent: Path) -> RunPlan:
    """Decide where a run writes; makes the folder when it has a default name, and nothing else.

    Raises:
        RunFolderError: The folder holds a run, or newer checkpoints, that would be replaced.
    """
    if config.run.folder is not None:
        folder = Path(config.run.folder)
    elif resumed and resumed.folder:
        folder = resumed.folder
    else:
        return RunPlan(folder=_new_folder(parent), resumed=resumed)
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"run.folder: {folder} is a file, expected a folder")
    same = bool(resumed and resumed.folder and resumed.folder.resolve() == folder.resolve())
    if not config.run.overwrite:
        if same and resumed:
            _check_newest(folder, resumed.checkpoint)
        elif held := _held(folder):
            raise RunFolderError(
                f"run.folder: {folder} already holds a run ({', '.join(held)}); continue it with "
                "--resume, choose another folder, or replace it with --set run.overwrite=true"
            )
    return RunPlan(folder=folder, resumed=resumed)


def _new_folder(parent: Path) -> Path:
    number = max([number for number, _ in _default_folders(parent)], default=0) + 1
    while True:
        folder = parent / f"{DEFAULT_NAME}{number}"
        try:
            folder.mkdir()
        except FileExistsError:  # another run took it meanwhile
            number += 1
        else:
            return folder


def _held(folder: Path) -> list[str]:
    return [name for name in _CONTENTS if (folder / name).exists()]


def _check_newest(folder: Path, checkpoint: Path) -> None:
    """Continuing from an older checkpoint would replace the newer ones."""
    paths = [path.resolve() for _, path in checkpoints_in(folder)]
    newer = paths[paths.index(checkpoint.resolve()) + 1 :] if checkpoint.resolve() in paths else []
    if newer:
        names = ", ".join(path.name for path in newer)
        raise RunFolderError(
            f"--resume: {folder} holds newer checkpoints ({names}) than {checkpoint.name}; "
            "replace them with --set run.overwrite=true, or keep them: --set run.folder=NEW"
        )


def start_folder(plan: RunPlan, config: Config) -> None:
    """Make the folder ready: what is replaced goes, the configuration is written.

    Called once, by rank 0, when everything that can be refused has been accepted.
    """
    plan.folder.mkdir(parents=True, exist_ok=True)
    resumed = plan.resumed
    if resumed and resumed.folder and resumed.folder.resolve() == plan.folder.resolve():
        kept = resumed.checkpoint.resolve()
        paths = [path for _, path in checkpoints_in(plan.folder)]
        resolved = [path.resolve() for path in paths]
        newer = paths[resolved.index(kept) + 1 :] if kept in resolved else []
        for path in newer:
            shutil.rmtree(path)
    else:
        for name in _held(plan.folder):
            path = plan.folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        if resumed and resumed.folder and (resumed.folder / "metrics.jsonl").is_file():
            shutil.copyfile(resumed.folder / "metrics.jsonl", plan.metrics)
    plan.checkpoints.mkdir(exist_ok=True)
    text = json.dumps(config.as_json(), indent=2) + "\n"
    (plan.folder / "config.json").write_text(text, encoding="utf-8")


def keep_newest(plan: RunPlan, *, count: int = KEPT_CHECKPOINTS) -> None:
    """Remove all but the newest checkpoints."""
    for _, path in checkpoints_in(plan.folder)[:-count]:
        shutil.rmtree(path)


def folder_in(overrides: Sequence[str]) -> str | None:
    """``run.folder`` where ``--set`` gives it."""
    prefix = "run.folder="
    given = [text.removeprefix(prefix) for text in overrides if text.startswith(prefix)]
    return given[-1] if given else None
