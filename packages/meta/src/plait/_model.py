"""The example to train: a byte-level GPT.

Shapes: B sequences, T positions, C channels, H heads, V bytes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait._config import ModelConfig

__all__ = ["ByteGPT", "generate"]

VOCABULARY = 256


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each after a norm and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self._attend(self.attention_norm(x_BTC))
        hidden_BTF = F.gelu(self.mlp_in(self.mlp_norm(x_BTC)), approximate="tanh")
        out_BTC: Tensor = x_BTC + self.mlp_out(hidden_BTF)
        return out_BTC

    def _attend(self, x_BTC: Tensor) -> Tensor:
        batch, length, width = x_BTC.shape
        heads = self.qkv(x_BTC).view(batch, length, 3, self.num_heads, width // self.num_heads)
        q_BHTD, k_BHTD, v_BHTD = heads.permute(2, 0, 3, 1, 4)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        y_BTC: Tensor = self.attention_out(y_BHTD.transpose(1, 2).reshape(batch, length, width))
        return y_BTC


class ByteGPT(nn.Module):
    """A decoder-only transformer over bytes, with learned positions and norms before each part."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.context_length = config.context_length
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        self.positions = nn.Embedding(config.context_length, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self._initialize(residual_std=0.02 / math.sqrt(2 * config.num_layers))

    def _initialize(self, residual_std: float) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("attention_out.weight", "mlp_out.weight")):
                nn.init.normal_(parameter, std=residual_std)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Scores of the next byte at every position; float32, shape ``(B, T, 256)``."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.embedding(tokens_BT) + self.positions(positions_T)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV.float()


@torch.no_grad()
def generate(
    model: ByteGPT, prompt: bytes, *, num_bytes: int, seed: int, device: torch.device
) -> bytes:
    """Continue a prompt at temperature 0.8; every rank calls it and gets the same bytes.

    Args:
        model: Its forwards may be collective; each rank runs as many.
        prompt: At least one byte.
        num_bytes: Bytes to add.
        seed: Of the draws.
        device: Where the model runs.

    Returns:
        The added bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(num_bytes):
        tokens_BT = torch.tensor([text[-model.context_length :]], device=device)
        logits_V = model(tokens_BT)[0, -1].cpu().double()
        probabilities_V = torch.softmax(logits_V / 0.8, dim=0)
        text.append(int(torch.multinomial(probabilities_V, 1, generator=generator)))
    return bytes(text[len(prompt) :])
