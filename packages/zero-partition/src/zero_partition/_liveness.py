"""Whether the processes that share a file are alive.

Each holds a lock on a byte of the file; the kernel drops it when the process ends, however it ends,
and needs no common numbering of processes.
"""

from __future__ import annotations

import fcntl
import os
import weakref


class Liveness:
    """Tells whether the other ranks live; closes the file when it goes.

    Args:
        file: A file descriptor that this takes over; the only one this process has on that file,
            because closing any of them would drop the lock.
        rank: The byte that this process holds from now on.
    """

    def __init__(self, file: int, rank: int) -> None:
        self._file = file
        fcntl.lockf(file, fcntl.LOCK_EX, 1, rank)
        weakref.finalize(self, os.close, file)

    def of(self, rank: int) -> bool:
        """Whether the process of `rank`, which must have made its own `Liveness`, is alive."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return False
