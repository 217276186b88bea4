"""One rank's error becomes everybody's, so that nobody waits for a rank that has given up."""

from __future__ import annotations

from zero_partition._errors import CheckpointError
from zero_partition._exchange import exchange
from zero_partition._transport import Transport


class Agreement:
    """Call it on every rank with an error or None; it raises on all if any rank had one.

    Args:
        transport: Knows the ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __call__(self, error: BaseException | None) -> None:
        """Raise this rank's own error, or a `CheckpointError` that names the ranks that failed."""
        mine = None if error is None else str(error)
        lane = self._transport.lane
        told = [mine] if lane is None else exchange(mine, lane.control)
        if error is not None:
            raise error
        failed = {rank: text for rank, text in enumerate(told) if text is not None}
        if failed:
            reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
            raise CheckpointError(reasons)
