"""Models, data and settings of the programs in `test_deepspeed_loops`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from engine_reference import numbers


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def rank_batches(
    dataset: Dataset[Any], rank: int, num_ranks: int, *, epoch: int, batch_size: int, seed: int = 0
) -> list[Any]:
    """What a rank reads in an epoch, by torch's own sampler and loader."""
    sampler = DistributedSampler(dataset, num_replicas=num_ranks, rank=rank, seed=seed)
    sampler.set_epoch(epoch)
    return list(DataLoader(dataset, batch_size=batch_size, sampler=sampler))


class Net(nn.Module):
    """Convolutions and three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 8, 3)
        self.fc1 = nn.Linear(8 * 2 * 2, 20)
        self.fc2 = nn.Linear(20, 14)
        self.fc3 = nn.Linear(14, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def images() -> TensorDataset:
    labels = torch.arange(22) % 10
    return TensorDataset(numbers(22, 3, 14, 14, seed=1), labels)


def image_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 2000,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": 0,
                "warmup_max_lr": 0.01,
                "warmup_num_steps": 4,
                "warmup_type": "linear",
            },
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 15},
        "zero_optimization": {
            "stage": stage,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 50000000,
            "reduce_bucket_size": 50000000,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
    }


def quarter_steps(update: int) -> float:
    return min(1.0, update / 4)


def image_loss(model: nn.Module, rank: int, batch: Any) -> Tensor:
    inputs, labels = batch[rank]
    return F.cross_entropy(model(inputs), labels)


@dataclass
class ModelOutput:
    """As transformers return it."""

    loss: Tensor
    logits: Tensor


class CausalLM(nn.Module):
    """Embedding, two blocks, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> ModelOutput:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return ModelOutput(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


class Prompts(Dataset[dict[str, Tensor]]):
    """Token sequences with their targets, as a collator finds them."""

    def __init__(self, num_prompts: int = 36) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(17, (num_prompts, 7), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


def optimizer_grouped_parameters(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    no_decay = ["bias", "norm"]
    named = list(model.named_parameters())
    return [
        {
            "params": [p for n, p in named if not any(part in n for part in no_decay)],
            "weight_decay": weight_decay,
        },
        {
            "params": [p for n, p in named if any(part in n for part in no_decay)],
            "weight_decay": 0.0,
        },
    ]


def get_linear_schedule(optimizer: Any) -> Any:
    """Two updates of warm-up, down to 0 at the tenth."""

    def share(update: int) -> float:
        return update / 2 if update < 2 else max(0.0, (10 - update) / 8)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def chat_config(stage: int, num_ranks: int) -> dict[str, Any]:
    return {
        "train_batch_size": 2 * 3 * num_ranks,
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10,
        "zero_optimization": {
            "stage": stage,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none"},
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
            "memory_efficient_linear": False,
        },
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }


SAMPLES = 12  # of a micro-batch, over all ranks


def bert_config() -> dict[str, Any]:
    return {
        "train_batch_size": 2 * SAMPLES,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "contiguous_gradients": True, "overlap_comm": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.02, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.01},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": 6,
                "warmup_num_steps": 2,
                "warmup_max_lr": 0.02,
                "warmup_type": "linear",
            },
        },
        "gradient_clipping": 0.5,
    }


def bert() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, 6), nn.Sequential(*blocks), nn.Linear(6, 3))


def masked_batch(iteration: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    x = numbers(SAMPLES, 5, seed=iteration)
    share = slice(rank * SAMPLES // num_ranks, (rank + 1) * SAMPLES // num_ranks)
    return x[share], x[share].argmax(1) % 3


def bert_loss(model: Any, iteration: int, rank: int, num_ranks: int) -> Tensor:
    inputs, labels = masked_batch(iteration, rank, num_ranks)
    return F.cross_entropy(model(inputs.bfloat16()).float(), labels)
