"""One rank: a process that joins a gloo group and runs whatever calls its pipe brings.

A call is the pickle of ``(function, args)`` and becomes ``function(rank, *args)``. Joining, leaving
and meeting are calls like any other. The process that tests run in imports this module too, so
torch is imported inside the functions.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import math
import pickle
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

COLLECTIVE_TIMEOUT_S = 25.0
"""Less than the limit of a run: a collective that hangs raises where it hangs."""

_ALARM_AFTER_S = 10
"""A rank ends itself this long after its limit, in case the test process is gone."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The call returned. `result` is a pickle, so that tensors travel by value."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """The call raised."""

    exception: str
    trace: str


def serve(rank: int, pipe: Connection, stacks: Path, import_paths: Sequence[str]) -> None:
    """Answer calls until the pipe ends. On a crash or SIGUSR1 the file `stacks` gets the stacks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the ranks
    importlib.import_module("ranktest._preload")  # where the server could not
    sys.path.extend(path for path in import_paths if path not in sys.path)
    with stacks.open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        try:
            while True:
                call, limit_s = pipe.recv()
                signal.alarm(math.ceil(limit_s) + _ALARM_AFTER_S)
                answer = _answer(rank, call)
                signal.alarm(0)
                pipe.send(answer)
        except (EOFError, ConnectionError):
            leave()


def _answer(rank: int, call: bytes) -> Returned | Raised:
    try:
        function, args = pickle.loads(call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # torch says so where numpy is not installed; none of its users here needs numpy
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            result = function(rank, *args)
        return Returned(pickle.dumps(result))
    except BaseException as error:  # noqa: BLE001 - the parent raises it, whatever it is
        first_line = (str(error).splitlines() or [""])[0]
        return Raised(f"{type(error).__name__}: {first_line}", _format(error))


def _format(error: BaseException) -> str:
    """Format the traceback without the frames of this file above the function that was called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def join(rank: int, num_ranks: int, store: str, timeout_s: float) -> None:
    """Leave every group and join the one that meets at the file `store`."""
    import torch
    import torch.distributed as dist

    leave()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def leave() -> None:
    """Leave every group."""
    import torch.distributed as dist

    subgroup.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def meet(_rank: int) -> None:
    """Wait for all ranks. Fails where some of them issued a collective that others did not."""
    import torch.distributed as dist

    dist.barrier()


def run_seeded(rank: int, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call `function` with the rank as random seed: no call depends on an earlier one."""
    import torch

    random.seed(rank)
    torch.manual_seed(rank)
    return function(rank, *args)


@functools.cache
def subgroup(*ranks: int, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> ProcessGroup | None:
    """Give a process group of some of the ranks. Every rank calls it.

    A group costs sockets and threads, so each is made once and lives as long as the ranks.

    Args:
        ranks: Its members, ascending.
        timeout_s: Seconds after which one of its collectives raises. Torch's default for a further
            group is half an hour, whatever the default group has.

    Returns:
        The group, or None on a rank that is not a member.
    """
    import torch.distributed as dist

    group: ProcessGroup | None = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
    return group if dist.get_rank() in ranks else None
