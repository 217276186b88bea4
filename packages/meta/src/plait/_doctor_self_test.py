"""The self-test: two ranks in processes of their own, which a hang cannot outlive."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from plait._doctor_facts import SelfTest, Step

__all__ = ["TIME_LIMIT_S", "self_test"]

TIME_LIMIT_S = 60.0  # most of it is for importing torch on a busy machine
_RANK_TIME_LIMIT_S = 15.0  # of each thing that needs the other rank
_PATIENCE_S = 2.0  # with one rank when the other has failed
_LOOK_S = 0.05
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def self_test(environment: Mapping[str, str]) -> SelfTest:
    """Let two ranks meet; where gloo cannot connect them, try the loopback interface by name."""
    first = _try(environment)
    if not first.error or first.reached is not Step.MET or first.interface:
        return first
    second = _try({**environment, _INTERFACE: _LOOPBACK})
    return first if second.error else replace(first, works_with=_LOOPBACK)


def _try(environment: Mapping[str, str]) -> SelfTest:
    start = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="plait-doctor-")))
        ranks = []
        for rank in range(2):
            words = [sys.executable, "-P", "-m", "plait._doctor_rank", str(rank), str(folder)]
            errors = stack.enter_context((folder / f"stderr{rank}").open("w"))
            process = stack.enter_context(
                subprocess.Popen(
                    [*words, str(_RANK_TIME_LIMIT_S)],
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            )
            stack.callback(process.kill)
            ranks.append(process)
        in_time = _wait(ranks, start + TIME_LIMIT_S)
        seconds = time.monotonic() - start
        told = [_told(folder, rank, ranks[rank].poll()) for rank in range(2)]
    error = next((error for _, error in told if error), "")
    if not error and not in_time:
        error = f"no answer within {TIME_LIMIT_S:.0f} s"
    fewest = min((steps for steps, _ in told), key=len)
    return SelfTest(
        seconds=seconds,
        reached=fewest[-1] if fewest else None,
        error=error,
        interface=environment.get(_INTERFACE, ""),
        works_with="",
    )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait for both ranks; once one has failed, not for long. Whether they ended in time."""
    while any(process.poll() is None for process in ranks):
        if time.monotonic() > deadline:
            return False
        if any(process.returncode for process in ranks):
            deadline = min(deadline, time.monotonic() + _PATIENCE_S)
        time.sleep(_LOOK_S)
    return True


def _told(folder: Path, rank: int, code: int | None) -> tuple[list[Step], str]:
    """The steps a rank has done, and its error: its last words where it died before it could."""
    path = folder / f"rank{rank}"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    steps = [Step(line) for line in lines if not line.startswith("error: ")]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if code and not errors:
        words = (folder / f"stderr{rank}").read_text(errors="replace").strip().splitlines()
        errors = words[-1:] or [f"rank {rank} ended with exit code {code}"]
    return steps, errors[0] if errors else ""
