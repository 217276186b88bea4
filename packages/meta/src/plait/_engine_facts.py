"""What an engine can be asked: sizes, counts, rates, under the names of DeepSpeed's engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait._batch import BatchSizes
from plait._client_scheduler import Scheduler
from plait._config import TrainingConfig
from plait._loader import RankLoader
from zero_partition import Zero

__all__ = ["Counts", "EngineFacts", "EngineParts"]


@dataclass(kw_only=True, slots=True)
class Counts:
    """How far a training has come.

    Attributes:
        global_steps: Updates, those that were skipped among them.
        global_samples: Samples of those updates, over all ranks.
        micro_steps: Calls of `step`, each the end of a micro-batch.
        skipped_steps: Updates that changed nothing, because gradients were not finite.
        window_steps: Micro-batches since the latest update.
        backwards: Backwards since the latest call of `step`.
    """

    global_steps: int = 0
    global_samples: int = 0
    micro_steps: int = 0
    skipped_steps: int = 0
    window_steps: int = 0
    backwards: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """What `plait.initialize` assembles an engine of."""

    module: nn.Module
    zero: Zero
    config: TrainingConfig
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Scheduler | None
    training_dataloader: RankLoader | None
    device: torch.device
    local_rank: int


class EngineFacts:
    """The part of the engine that answers questions and changes nothing.

    Attributes:
        module: The model that was passed, in place.
        zero: Its handle: `gathered`, `shards`, `sync`, `memory` and the like.
        optimizer: Steps this rank's shards; None for an engine that only evaluates.
        lr_scheduler: Stepped by the engine, once an update.
        training_dataloader: Made of ``training_data``.
        config: What the file says of the training.
        device: Where this rank computes.
        local_rank: This rank's number on its machine.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.module, self.zero, self.config = parts.module, parts.zero, parts.config
        self.optimizer, self.lr_scheduler = parts.optimizer, parts.lr_scheduler
        self.training_dataloader = parts.training_dataloader
        self.device, self.local_rank = parts.device, parts.local_rank
        self._batch: BatchSizes = parts.config.batch
        self._counts = Counts()
        self._norm: Tensor | None = None
        self._applied = False
        self._boundary: bool | None = None  # None: counted

    # Ranks and counts.

    @property
    def global_rank(self) -> int:
        """This rank."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.zero.num_ranks

    @property
    def dp_world_size(self) -> int:
        """Number of ranks that share the batch: all of them."""
        return self.zero.num_ranks

    @property
    def global_steps(self) -> int:
        """Updates made, those that were skipped among them."""
        return self._counts.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of those updates, over all ranks."""
        return self._counts.global_samples

    @property
    def micro_steps(self) -> int:
        """Micro-batches ended by `step`."""
        return self._counts.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Updates that changed nothing, because gradients were not finite."""
        return self._counts.skipped_steps

    # The configuration.

    def train_batch_size(self) -> int:
        """Samples an update, over all ranks."""
        return self._batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples a backward, on one rank."""
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches an update, on one rank."""
        return self._batch.accumulation_steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three sizes above, in that order."""
        batch = self._batch
        return batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps

    def gradient_clipping(self) -> float:
        """Largest gradient norm; 0 is none."""
        return self.config.gradient_clipping

    def steps_per_print(self) -> int | None:
        """Updates between two printed lines; None prints none."""
        return self.config.steps_per_print

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.config.stage > 0

    def zero_optimization_stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return self.config.stage

    def bfloat16_enabled(self) -> bool:
        """Whether parameters have 16 bits."""
        return self.config.bf16

    def fp16_enabled(self) -> bool:
        """False: float16 with loss scaling is not built yet."""
        return False

    # The latest update.

    def was_step_applied(self) -> bool:
        """Whether the latest call of `step` changed the parameters."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Norm of the latest update's gradients before clipping; None where none is clipped."""
        return None if self._norm is None else self._norm.item()

    def get_lr(self) -> list[float]:
        """Each group's learning rate in the next update."""
        return [float(rate) for rate in self._options("lr")]

    def get_mom(self) -> list[Any]:
        """Each group's momentum, or its betas."""
        return self._options("betas") or self._options("momentum")

    def _options(self, name: str) -> list[Any]:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group[name] for group in groups if name in group]
