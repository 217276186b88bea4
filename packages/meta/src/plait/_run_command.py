"""``plait train``: reads, plans, starts the ranks, turns what happens into exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from plait._config import Config
from plait._config_read import read_config
from plait._devices import num_accelerators
from plait._failures import describe
from plait._launch import (
    Interrupted,
    Joined,
    Prepared,
    RankFailed,
    join_ranks,
    joined,
    launch_ranks,
    leave_failed,
)
from plait._problems import ConfigError, Problem
from plait._run_folder import (
    RunFolderError,
    RunPlan,
    checkpoints_in,
    find_resumed,
    folder_in,
    plan_run,
)
from plait._text import TextError, load_text
from zero_partition import CheckpointError

__all__ = ["run_train"]

_EXIT_FAILED = 1
_EXIT_REFUSED = 2
_REFUSALS = (ConfigError, RunFolderError, TextError, CheckpointError)


class NothingToTrain(Exception):
    """The run that was to be continued is at its last step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the command line asks for, before anything is read."""

    config: str | None
    overrides: Sequence[str]
    num_ranks: int | None
    resume: str | None


def run_train(
    config: str | None, *, overrides: Sequence[str], num_ranks: int | None, resume: str | None
) -> int:
    """Train as the command line asks; returns the exit code.

    Args:
        config: A JSON file, or None for the defaults (or the resumed run's own configuration).
        overrides: ``a.b=value`` each.
        num_ranks: ``--ranks``.
        resume: None for a new run; a folder to continue from; empty for the newest run here.
    """
    request = Request(config=config, overrides=overrides, num_ranks=num_ranks, resume=resume)
    rank = joined(os.environ)
    return _train_joined(request, rank) if rank else _train_launched(request)


def _train_launched(request: Request) -> int:
    try:
        config, plan = _prepare(request, world_size=None)
    except _REFUSALS as error:
        return _say(str(error), _EXIT_REFUSED)
    except NothingToTrain as finished:
        return _say(str(finished), 0)
    try:
        launch_ranks(config, plan)
    except RankFailed as failed:
        _remove_if_empty(plan.folder)
        return _say(str(failed), _EXIT_FAILED, after_bar=True)
    except Interrupted as stop:
        _remove_if_empty(plan.folder)
        said = _stopped(stop.signal_number, plan)
        return _say(said, 128 + stop.signal_number, after_bar=True)
    return 0


def _train_joined(request: Request, rank: Joined) -> int:
    try:
        join_ranks(lambda: _prepare(request, world_size=rank.world_size), rank)
    except _REFUSALS as error:
        return _say(str(error), _EXIT_REFUSED) if rank.rank == 0 else _EXIT_REFUSED
    except NothingToTrain as finished:
        return _say(str(finished), 0) if rank.rank == 0 else 0
    except KeyboardInterrupt:
        return _say("stopped by Ctrl-C", 130) if rank.rank == 0 else 130
    except Exception as error:  # noqa: BLE001  # a rank's last words
        _say(f"rank {rank.rank}: {describe(error)}", _EXIT_FAILED)
        leave_failed()
    return 0


def _prepare(request: Request, *, world_size: int | None) -> Prepared:
    """Everything that can be refused before a rank starts is refused here."""
    parent = Path()
    source, num_ranks, resumed = request.config, request.num_ranks, None
    if request.resume is not None:
        folder = folder_in(request.overrides)
        if folder is None and source is not None:
            first = read_config(
                source, overrides=request.overrides, num_ranks=num_ranks, world_size=world_size
            )
            folder = first.run.folder
        resumed = find_resumed(request.resume, folder=folder, parent=parent)
        if source is None and resumed.config:
            source = str(resumed.config)
            num_ranks = num_ranks or world_size  # the run may have had another number of ranks
    config = read_config(
        source, overrides=request.overrides, num_ranks=num_ranks, world_size=world_size
    )
    if world_size is None:
        _check_accelerators(config, source)
    if resumed and resumed.step is not None and resumed.step >= config.run.steps:
        raise NothingToTrain(
            f"{resumed.checkpoint} is at step {resumed.step} of {config.run.steps}: nothing is "
            f"left to train; go further with --set run.steps={2 * resumed.step}"
        )
    load_text(config.data.path, context_length=config.model.context_length)
    return config, plan_run(config, resumed, parent=parent)


def _check_accelerators(config: Config, source: str | None) -> None:
    found = num_accelerators(config.run.device)
    if 0 < found < config.run.ranks:
        problem = Problem(
            path="run.ranks",
            expected=f"at most {found}, the number of GPUs here",
            got=str(config.run.ranks),
            hint="run.device=cpu trains on CPUs",
        )
        raise ConfigError([problem], source or "the defaults")


def _stopped(signal_number: int, plan: RunPlan) -> str:
    by = "Ctrl-C" if signal_number == signal.SIGINT else signal.Signals(signal_number).name
    if checkpoints_in(plan.folder):
        return f"stopped by {by}; go on with: plait train --resume {plan.folder}"
    return f"stopped by {by}; no checkpoint had been written yet"


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _say(message: str, code: int, *, after_bar: bool = False) -> int:
    """Print a message, on a line of its own where a progress bar may stand; returns `code`."""
    start = "\n" if after_bar else ""
    print(f"{start}plait: {message}", file=sys.stderr, flush=True)
    return code
