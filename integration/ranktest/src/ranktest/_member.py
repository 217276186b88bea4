"""One rank as the test process sees it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from ranktest._rank import Raised, Returned, serve

_EXIT_LIMIT_S = 5.0


class Member:
    """A rank's process, our end of its pipe, and the file that its stacks go to."""

    def __init__(self, rank: int, stacks: Path, import_paths: Sequence[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["ranktest._preload"])
        self.pipe, theirs = context.Pipe()
        self.stacks = stacks
        self.process = context.Process(
            target=serve,
            args=(rank, theirs, stacks, import_paths),
            daemon=True,
            name=f"rank-{rank}",
        )
        self.process.start()
        theirs.close()  # the pipe ends when the process does

    @property
    def waitables(self) -> tuple[Connection, int]:
        """What becomes ready when the rank answers or ends."""
        return self.pipe, self.process.sentinel

    def send(self, call: bytes, limit_s: float) -> None:
        """Send a call. A dead rank is noticed when its answer is awaited."""
        with contextlib.suppress(OSError):
            self.pipe.send((call, limit_s))

    def receive(self) -> Returned | Raised | None:
        """Give the answer that has come, or None where the process ended instead."""
        try:
            answer: Returned | Raised | None = self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, OSError):
            return None
        return answer

    def ask_for_stacks(self) -> bool:
        """Make the process write the stacks of its threads; False if it is not up to that yet."""
        if self.process.pid is None or not self.stacks.exists():
            return False
        os.kill(self.process.pid, signal.SIGUSR1)
        return True

    def read_stacks(self) -> str:
        """Give the stacks written so far."""
        return self.stacks.read_text() if self.stacks.exists() else ""

    def describe_exit(self) -> str:
        """Say how the process ended."""
        self.process.join(_EXIT_LIMIT_S)
        code = self.process.exitcode
        if code is None:
            return "died: it closed its pipe"
        return (
            f"died of {signal.Signals(-code).name}" if code < 0 else f"died with exit code {code}"
        )

    def end(self, limit_s: float) -> None:
        """Let the process exit by itself for `limit_s`, then kill it."""
        self.pipe.close()
        self.process.join(limit_s)
        self.process.kill()
        self.process.join()
        self.process.close()
