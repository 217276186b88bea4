"""How codes and scales lie in a message. Pure.

A message is a row of *runs*, one for each slice it carries; a run is the slice's codes, then its
scales. Every start is a multiple of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comm_quant._codec import Codec

ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Run:
    """Where one slice of `numel` elements lies in a message of such runs.

    Attributes:
        spec: What it is quantized with.
        numel: Its elements.
    """

    spec: Codec
    numel: int

    @property
    def scales_start(self) -> int:
        """Bytes before the scales."""
        return _aligned(self.spec.code_bytes(self.numel))

    @property
    def run_bytes(self) -> int:
        """Bytes of the whole run."""
        return self.scales_start + _aligned(self.spec.scale_bytes(self.numel))

    def codes(self, messages: Tensor, run: int = 0) -> Tensor:
        """The codes of one run: ``(num_blocks, block_bytes)``, or of each row of messages."""
        part = messages[..., run * self.run_bytes :][..., : self.spec.code_bytes(self.numel)]
        blocks = self.spec.num_blocks(self.numel)
        codes: Tensor = part.unflatten(-1, (blocks, self.spec.block_bytes))
        return codes

    def scales(self, messages: Tensor, run: int = 0) -> Tensor:
        """The scales of one run, ``(num_blocks,)``, or of each row of messages."""
        start = run * self.run_bytes + self.scales_start
        part = messages[..., start:][..., : self.spec.scale_bytes(self.numel)]
        if not part.numel():  # whose offset need not suit the type
            return part.to(self.spec.scale_dtype)
        return part.view(self.spec.scale_dtype)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def new_messages(*shape: int, device: torch.device) -> Tensor:
    """Messages to be filled; zero, so that the gaps between the runs say nothing."""
    return torch.zeros(*shape, dtype=torch.uint8, device=device)
