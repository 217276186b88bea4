"""Starts the ranks of a run on this machine, or joins those a launcher has started."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from plait._config import Config
from plait._devices import rank_device
from plait._failures import Failure, first_failure, record_failure
from plait._run_folder import RunPlan
from plait._train import train

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = [
    "Interrupted",
    "Joined",
    "RankFailed",
    "join_ranks",
    "joined",
    "launch_ranks",
    "leave_failed",
]

# Long enough for the launcher to see which rank died first, before the ranks it takes with it.
_LINGER_S = 0.5
_STORE_KEY = "plait/prepared"

Prepared = tuple[Config, RunPlan]


class Interrupted(Exception):
    """A signal ended the run; its number is `signal_number`."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class RankFailed(Exception):
    """A rank failed; `failure` says which and why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"rank {failure.rank}: {failure.message}")
        self.failure = failure


@dataclass(frozen=True, slots=True)
class Joined:
    """A rank that a launcher started."""

    rank: int
    world_size: int
    local_rank: int


def joined(environment: Mapping[str, str]) -> Joined | None:
    """The rank that torchrun, or a launcher that sets the same variables, made of this process."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return None
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return Joined(rank, world_size, int(environment.get("LOCAL_RANK", rank)))


def launch_ranks(config: Config, plan: RunPlan) -> None:
    """Start ``config.run.ranks`` processes that train, and wait for them.

    Raises:
        RankFailed: With the error of the rank that failed first.
        Interrupted: A signal ended the run.
    """
    with (
        tempfile.TemporaryDirectory(prefix="plait-") as errors,
        _rank_environment(config.run.ranks),
        _launcher_is_silent(),
    ):
        launch = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=config.run.ranks,
            logs_specs=DefaultLogsSpecs(log_dir=errors),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
        )
        try:
            elastic_launch(launch, _rank_main)(config, plan, errors)
        except SignalException as stop:
            raise Interrupted(int(stop.sigval)) from None
        except ChildFailedError as failed:
            codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
            if -signal.SIGINT in codes.values():
                raise Interrupted(signal.SIGINT) from None
            raise RankFailed(first_failure(Path(errors), codes)) from None


@contextlib.contextmanager
def _launcher_is_silent() -> Iterator[None]:
    """Keep torch's launcher from logging what is said once, by the exceptions above."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _rank_environment(num_ranks: int) -> Iterator[None]:
    """Variables the ranks inherit; this process has its own back afterwards."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    wanted = {"OMP_NUM_THREADS": str(max(1, num_cores // num_ranks))}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _rank_main(config: Config, plan: RunPlan, errors: str) -> None:
    """A rank's whole life, in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher says that it stopped
    rank = joined(os.environ)
    assert rank is not None  # the launcher has set it
    try:
        join_ranks(lambda: (config, plan), rank)
    except Exception as error:  # noqa: BLE001  # a rank's last words
        record_failure(Path(errors), rank.rank, error)
        leave_failed()


def leave_failed() -> None:
    """End this process with exit code 1; a clean shutdown would wait for the other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_LINGER_S)
    os._exit(1)


def join_ranks(prepare: Callable[[], Prepared], rank: Joined) -> Path:
    """Train as a rank that a launcher started; rank 0 prepares the run for all.

    Args:
        prepare: Reads the configuration and plans the run; called on rank 0.
        rank: This rank.

    Returns:
        The run folder.

    Raises:
        Exception: What `prepare` raised on rank 0, on every rank.
    """
    store, _, _ = next(rendezvous("env://"))
    if rank.rank == 0:
        try:
            outcome: Prepared | Exception = prepare()
        except Exception as error:  # noqa: BLE001  # raised on every rank, below
            outcome = error
        store.set(_STORE_KEY, pickle.dumps(outcome))
    else:
        outcome = pickle.loads(store.get(_STORE_KEY))
    if isinstance(outcome, Exception):
        raise outcome
    config, plan = outcome
    with process_group(config, rank, store) as device:
        train(config, plan, device=device)
    return plan.folder


@contextlib.contextmanager
def process_group(config: Config, rank: Joined, store: Store) -> Iterator[torch.device]:
    """The default process group and this rank's device; left standing after an error."""
    device = rank_device(config.run.device, rank.local_rank)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        device_id=None if device.type == "cpu" else device,
    )
    yield device
    dist.barrier()
    dist.destroy_process_group()
