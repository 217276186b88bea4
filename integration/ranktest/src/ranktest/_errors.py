"""What a run ends with when a rank fails."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_HEADLINE_WIDTH = 100


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one rank failed.

    Args:
        rank: The rank.
        kind: It ``"raised"`` an exception, its process ``"died"``, or it was ``"silent"`` when
            time was up.
        summary: One line.
        detail: Its traceback, or the stacks of its threads; may be empty.
    """

    rank: int
    kind: Literal["raised", "died", "silent"]
    summary: str
    detail: str

    def __str__(self) -> str:
        return f"--- rank {self.rank} {self.summary}\n{self.detail}".rstrip()


class RankError(AssertionError):
    """Ranks raised, died or were silent. `failures` has one entry for each, in rank order.

    A rank that only waited for one that had failed is silent too. So the message starts with the
    ranks that raised or died.
    """

    def __init__(self, what: str, failures: Sequence[RankFailure]) -> None:
        self.failures = tuple(failures)
        loud = [failure for failure in failures if failure.kind != "silent"]
        silent = [failure for failure in failures if failure.kind == "silent"]
        lines = [f"rank {failure.rank} {failure.summary}" for failure in loud + silent]
        headline = "; ".join(textwrap.shorten(line, _HEADLINE_WIDTH) for line in lines)
        super().__init__("\n".join([f"{what}: {headline}", *map(str, loud + silent)]))
