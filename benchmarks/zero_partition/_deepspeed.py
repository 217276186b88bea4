"""DeepSpeed's engine, as `_training.py` wants it; imported by those who train with it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_deepspeed: Any = importlib.import_module("deepspeed")  # without types
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


class WithLinear(nn.Module):
    """Calls `module` with a function in the place of `torch.nn.functional.linear`."""

    def __init__(self, module: nn.Module, linear: Any) -> None:
        super().__init__()
        self._module, self._linear = module, linear

    def forward(self, *args: Any) -> Any:
        """The module's."""
        torchs = functional.linear
        functional.linear = self._linear
        try:
            return self._module(*args)
        finally:
            functional.linear = torchs


class Engine:
    """An engine around `model`: what is called, backward, step, and the whole parameters."""

    def __init__(self, model: nn.Module, engine: Any, *, linear: Any, is_sharded: bool) -> None:
        self.module: nn.Module = WithLinear(engine, linear)
        self._model, self._engine, self._is_sharded = model, engine, is_sharded

    def zero_grad(self) -> None:
        """Nothing: `step` has forgotten them."""

    def backward(self, loss: Tensor) -> None:
        """From a loss to the reduced gradients."""
        self._engine.backward(loss)

    def step(self) -> None:
        """Update."""
        self._engine.step()

    def values(self) -> Mapping[str, Tensor]:
        """Whole parameters by name (collective)."""
        if not self._is_sharded:
            return self._model.state_dict()
        parameters = dict(self._model.named_parameters())
        with _deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: value.detach().clone() for name, value in parameters.items()}


def build_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    stage: int,
    batch: int,
    replaces_linear: bool,
) -> Engine:
    """An engine on the process group that is there; what is not named has DeepSpeed's default.

    Args:
        model: What is trained.
        optimizer: Over its parameters: torch's, so that the arithmetic is everybody's.
        stage: 1, 2 or 3.
        batch: Sequences a rank and step.
        replaces_linear: Whether stage 3 puts a function of its own, which saves memory, in the
            place of `torch.nn.functional.linear`. It does so for everything in the process; here it
            is there while this engine's model runs, so that other variants have torch's.
    """
    torchs = functional.linear
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # its default is 1
        "zero_optimization": {"stage": stage, "memory_efficient_linear": replaces_linear},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = _deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    linear, functional.linear = functional.linear, torchs
    return Engine(model, engine, linear=linear, is_sharded=stage == 3)
