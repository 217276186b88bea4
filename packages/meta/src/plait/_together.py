"""What one rank finds out reaches all of them: errors before the ranks depend on each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

__all__ = ["PeerFailed", "agreed", "from_rank_zero"]

T = TypeVar("T")


class PeerFailed(RuntimeError):
    """Another rank could not go on; the message names it and says why."""


def agreed(action: Callable[[], T]) -> T:
    """Run `action` on every rank; where it raises on one, every rank raises (collective).

    Raises:
        Exception: What `action` raised on this rank.
        PeerFailed: It raised on others only.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001  # raised below, when the others know
        error = caught
    told = _everyone(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if failed:
        raise PeerFailed("; ".join(failed))
    return result  # type: ignore[return-value]  # `action` returned it


def from_rank_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 alone; every rank gets what it returned or raised (collective)."""
    outcome: list[Any] = [None, None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # noqa: BLE001  # raised on every rank, below
            outcome[1] = error
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]  # of `action`


def _everyone(value: str | None) -> list[str | None]:
    if not dist.is_initialized():
        return [value]
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told
