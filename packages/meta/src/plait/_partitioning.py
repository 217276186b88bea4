"""A model shared out over the ranks as a configuration says, and over the wire that it asks for."""

from __future__ import annotations

import torch
from torch import nn

from comm_quant import BlockQuant, ErrorFeedback, QuantizedWire
from plait._config import TrainingConfig, WireConfig
from zero_partition import Precision, Zero, partition

__all__ = ["make_wire", "partition_as"]


def partition_as(config: TrainingConfig, model: nn.Module) -> Zero:
    """Partition a model in place (collective)."""
    return partition(
        model,
        stage=config.stage,
        precision=Precision(param=torch.bfloat16) if config.bf16 else Precision(),
        bucket_numel=config.bucket_numel,
        overlap=config.overlap,
        skip_nonfinite=config.skip_nonfinite,
        wire=make_wire(config.wire),
        secondary="local" if config.wire.ranks_a_node > 1 else None,
    )


def make_wire(config: WireConfig) -> QuantizedWire | None:
    """A wire with the block lengths of the paper; None where everything travels as it is."""
    if config.is_plain:
        return None
    feedback = None
    if config.err_beta is not None:
        feedback = ErrorFeedback(beta=config.err_beta, reset_steps=config.reset_steps)
    parameters = BlockQuant(bits=8, block_numel=256)
    return QuantizedWire(
        weights=parameters if config.weights else None,
        frozen_weights=parameters if config.frozen_weights else None,
        grads=BlockQuant(bits=4, block_numel=128) if config.gradients else None,
        num_local=config.ranks_a_node if config.ranks_a_node > 1 else None,
        feedback=feedback,
    )
