"""Payload: bytes that this rank hands to others, without headers, by group and collective."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Payload:
    """What a rank has sent.

    Attributes:
        sent_bytes: By (collective, hop): "gather" or "reduce", and "all", "local" or "cross".
    """

    sent_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count(self, collective: str, hop: str, *, message_bytes: int, num_peers: int) -> None:
        """Note one message to each of some peers."""
        if message_bytes and num_peers:
            self.sent_bytes[collective, hop] += message_bytes * num_peers

    def total_bytes(self, hop: str | None = None) -> int:
        """All bytes, or those of one hop."""
        return sum(n for (_, each), n in self.sent_bytes.items() if hop in (None, each))

    def clear(self) -> None:
        """Begin again at nothing."""
        self.sent_bytes.clear()

    def __str__(self) -> str:
        lines = [f"{'collective':<12}{'hop':<8}{'bytes sent':>16}"]
        lines += [
            f"{collective:<12}{hop:<8}{num_bytes:>16,}"
            for (collective, hop), num_bytes in sorted(self.sent_bytes.items())
        ]
        return "\n".join(lines)
