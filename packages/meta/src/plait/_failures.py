"""How a rank's failure reaches the person: one message, from the rank where it began."""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from plait._problems import ConfigError
from plait._run_folder import RunFolderError
from plait._text import TextError
from plait._train import TrainingError
from zero_partition import ZeroError

__all__ = ["Failure", "first_failure", "record_failure"]

# Said without a traceback: the message is for the person who started the run.
_EXPECTED = (
    ConfigError,
    RunFolderError,
    TextError,
    TrainingError,
    ZeroError,
    OSError,
    torch.OutOfMemoryError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What ended a rank.

    Args:
        rank: The rank.
        time_s: When, seconds since the epoch.
        message: What to say.
    """

    rank: int
    time_s: float
    message: str


def describe(error: BaseException) -> str:
    """The message of an error, with its traceback where it is not one that people cause."""
    if isinstance(error, _EXPECTED):
        return str(error) or type(error).__name__
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return "".join(lines).rstrip()


def record_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Leave a rank's error in `folder` for the process that started it."""
    failure = Failure(rank=rank, time_s=time.time(), message=describe(error))
    part = folder / f"{rank}.tmp"
    part.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    part.replace(folder / f"{rank}.json")


def first_failure(folder: Path, exit_codes: Mapping[int, int]) -> Failure:
    """Where it began: a rank that was killed, else the error recorded first.

    Args:
        folder: Where ranks recorded errors.
        exit_codes: Of the ranks that were found failed; negative for a signal.
    """
    recorded = [Failure(**json.loads(path.read_text("utf-8"))) for path in folder.glob("*.json")]
    for rank, code in exit_codes.items():
        if code < 0 and all(failure.rank != rank for failure in recorded):
            name = signal.Signals(-code).name
            hint = " (the system may have run out of memory)" if -code == signal.SIGKILL else ""
            return Failure(rank=rank, time_s=0.0, message=f"killed by {name}{hint}")
    if recorded:
        return min(recorded, key=lambda failure: failure.time_s)
    rank, code = next(iter(exit_codes.items()))
    return Failure(rank=rank, time_s=0.0, message=f"ended with exit code {code} and no message")
