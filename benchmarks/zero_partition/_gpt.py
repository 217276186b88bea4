"""The model that every variant trains, and its data: a GPT over bytes.

Shapes: B sequences, T positions, C channels, H heads, D channels a head, V bytes.
"""

from __future__ import annotations

import math
from pydoc_data.topics import topics

import torch
from _plan import Size
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each after a norm and added to the stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.num_heads = size.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """One layer; shape ``(B, T, C)`` in and out."""
        x_BTC = x_BTC + self._attend(self.attention_norm(x_BTC))
        hidden = F.gelu(self.mlp_in(self.mlp_norm(x_BTC)))
        out_BTC: Tensor = x_BTC + self.mlp_out(hidden)
        return out_BTC

    def _attend(self, x_BTC: Tensor) -> Tensor:
        heads = self.qkv(x_BTC).unflatten(-1, (3, self.num_heads, -1))
        q_BHTD, k_BHTD, v_BHTD = heads.permute(2, 0, 3, 1, 4)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        y_BTC: Tensor = self.attention_out(y_BHTD.transpose(1, 2).flatten(-2))
        return y_BTC


class GPT(nn.Module):
    """A decoder-only transformer with learned positions; its blocks are a `ModuleList`."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            if parameter.dim() == 2:
                std = 0.02 / math.sqrt(2 * size.num_layers) if residual else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Scores of the next byte at every position, shape ``(B, T, V)``."""
        x_BTC = self.embedding(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV


class Text:
    """Python's own documentation topics, as bytes."""

    def __init__(self, size: Size) -> None:
        text = "\n".join(topics.values()).encode()
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._size = size

    def batch(self, step: int, *, rank: int, num_ranks: int) -> Tensor:
        """The micro-batch of a rank: int64, shape ``(B, T + 1)``, targets included."""
        generator = torch.Generator().manual_seed(step * num_ranks + rank)
        span = self._size.length + 1
        highest = self._bytes.numel() - span
        starts = torch.randint(highest, (self._size.batch,), generator=generator)
        return torch.stack([self._bytes[start : start + span] for start in starts.tolist()]).long()
