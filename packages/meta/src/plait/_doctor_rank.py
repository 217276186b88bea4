"""One rank of the self-test: ``python -m plait._doctor_rank RANK FOLDER``.

It leaves its progress in ``FOLDER/rankR``: a step a line, and ``error: ...`` if one failed.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from plait._doctor_facts import Step

__all__ = ["main"]

_NUM_RANKS = 2
_NUMEL = 1 << 16
_LOOK_S = 0.02


def main(rank: int, folder: Path, time_limit_s: float) -> int:
    """Meet the other rank as ``plait train`` does, and add up a tensor; returns the exit code."""
    limit = timedelta(seconds=time_limit_s)
    with (folder / f"rank{rank}").open("w", buffering=1, encoding="utf-8") as told:
        print(Step.IMPORTED, file=told)
        try:
            store = _store(rank, folder, limit)
            store.set(f"rank{rank}", "is here")
            store.wait([f"rank{each}" for each in range(_NUM_RANKS)], limit)
            print(Step.MET, file=told)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=_NUM_RANKS, timeout=limit
            )
            print(Step.CONNECTED, file=told)
            x = torch.full((_NUMEL,), rank + 1.0)
            dist.all_reduce(x)
            _check_sum(x)
            print(Step.ADDED, file=told)
            dist.destroy_process_group()
        except Exception as error:  # noqa: BLE001  # whatever it is, the doctor reports it
            print(f"error: {type(error).__name__}: {' '.join(str(error).split())}", file=told)
            return 1
    return 0


def _check_sum(x: Tensor) -> None:
    if not torch.equal(x, torch.full_like(x, 3.0)):
        raise RuntimeError(f"1 + 2 came to {x[0].item()}")


def _store(rank: int, folder: Path, limit: timedelta) -> Store:
    """A TCP store on localhost, at a port that rank 0 leaves in a file."""
    named = folder / "port"
    if rank == 0:
        store = _tcp_store(0, limit, is_master=True)
        unfinished = folder / "port.new"
        unfinished.write_text(str(store.port))
        unfinished.rename(named)
        return store
    deadline = time.monotonic() + limit.total_seconds()
    while not named.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("rank 0 opened no store")
        time.sleep(_LOOK_S)
    return _tcp_store(int(named.read_text()), limit, is_master=False)


def _tcp_store(port: int, limit: timedelta, *, is_master: bool) -> TCPStore:
    return TCPStore(
        host_name="localhost",
        port=port,
        world_size=_NUM_RANKS,
        is_master=is_master,
        timeout=limit,
        wait_for_workers=False,
    )


if __name__ == "__main__":
    code = main(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
    sys.stdout.flush()
    os._exit(code)  # after a failure gloo's threads may never end
