"""Starts the ranks of a task and collects what they measured. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

PATIENCE_S = 15.0  # of the ranks that are left when one has failed

_DEFAULTS = {
    "GLOO_SOCKET_IFNAME": "lo",  # gloo looks for the host's own name, which need not resolve
    "DS_ACCELERATOR": "cpu",
}


class RanksFailed(RuntimeError):
    """A rank did not end well; the message is the last thing it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a group of ranks is to do.

    Attributes:
        kind: "time" or "memory".
        variants: Keys of the variants.
        size: Name of the model's size.
        num_rounds: Rounds to time.
        num_ranks: Processes.
        seed: Of the parameters and of the order in a round.
    """

    kind: str
    variants: tuple[str, ...]
    size: str
    num_rounds: int
    num_ranks: int
    seed: int

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Read back what `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"variants": tuple(fields["variants"])})

    def to_json(self) -> str:
        """One line for a command line."""
        return json.dumps(asdict(self))


def run_ranks(task: Task) -> list[dict[str, Any]]:
    """Run a task on ranks of one thread each; what they print, their progress, goes to stderr.

    Returns:
        What each rank measured, by variant.

    Raises:
        RanksFailed: A rank failed; none is left running.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ExitStack() as stack:
            processes = []
            for rank in range(task.num_ranks):
                errors = stack.enter_context((folder / f"rank{rank}.txt").open("w"))
                process = stack.enter_context(_start(task, rank, folder, errors=errors))
                stack.callback(process.kill)
                processes.append(process)
            first = _wait(processes)
        if first is not None:
            said = (folder / f"rank{first}.txt").read_text().strip().splitlines()
            raise RanksFailed(said[-1] if said else f"rank {first} ended without a word")
        return [
            json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(task.num_ranks)
        ]


def _start(task: Task, rank: int, folder: Path, *, errors: IO[str]) -> subprocess.Popen[bytes]:
    words = [sys.executable, str(Path(__file__).with_name("_rank.py"))]
    return subprocess.Popen(
        [*words, task.to_json(), str(rank), str(folder)],
        stdout=sys.stderr,
        stderr=errors,
        env={**_DEFAULTS, **os.environ, "OMP_NUM_THREADS": "1", **_launched(task, rank)},
    )


def _launched(task: Task, rank: int) -> dict[str, str]:
    """What a launcher tells its ranks; DeepSpeed asks for it even where all are connected."""
    number, size = str(rank), str(task.num_ranks)
    return {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "LOCAL_SIZE": size}


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait for all ranks; once one has failed, not for long. Returns the first that failed."""
    first, deadline = None, float("inf")
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
        if first is None:
            first = next((r for r, process in enumerate(processes) if process.returncode), None)
            deadline = time.monotonic() + PATIENCE_S if first is not None else deadline
    if first is None:
        first = next((r for r, process in enumerate(processes) if process.returncode), None)
    return first
