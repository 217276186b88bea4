"""The loop that an engine stands for: plain data parallelism in one process, rank after rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LossOf = Callable[[nn.Module, int], Tensor]


def small_model() -> nn.Module:
    """Prime widths, and a stack of equal blocks; 3 inputs, the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7)) for _ in range(2)]
        return nn.Sequential(nn.Linear(3, 7), nn.Sequential(*blocks), nn.Linear(7, 1))


def numbers(*shape: int, seed: int) -> Tensor:
    """Normal numbers of a seed's own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def square_loss(model: Any, micro_step: int, rank: int) -> Tensor:
    """Mean square of the outputs for inputs of a micro-batch's own."""
    x = numbers(4, 3, seed=1000 * micro_step + rank)
    loss: Tensor = model(x.to(next(model.parameters()).dtype)).float().square().mean()
    return loss


def decay_groups(model: nn.Module, *, lr: float | None = None) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without and at a rate of their own, as many loops do."""
    wide = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    own = {} if lr is None else {"lr": lr}
    return [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, **own}]


class ReferenceLoop:
    """Data parallelism over `num_ranks` ranks, in one process.

    Args:
        model: Changed in place.
        num_ranks: Ranks that it plays.
        accumulation_steps: Micro-batches an update.
        clipping: Largest norm; 0 is none.
        bf16: Parameters in bfloat16, with fp32 masters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_ranks: int,
        accumulation_steps: int,
        clipping: float,
        bf16: bool = False,
    ) -> None:
        self.model, self.num_ranks = model, num_ranks
        self.accumulation_steps, self.clipping = accumulation_steps, clipping
        self.sums: list[Tensor | None] = [None for _ in model.parameters()]
        self.masters = list(model.parameters())
        if bf16:
            self.masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
            model.bfloat16()
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.norms: list[float] = []
        self.rates: list[list[float]] = []

    def groups(self, of_model: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups of the model's parameters as groups of what the optimizer steps."""
        masters = dict(zip(map(id, self.model.parameters()), self.masters, strict=True))
        return [
            {**group, "params": [masters[id(p)] for p in group["params"]]} for group in of_model
        ]

    def micro_batch(self, loss_of: LossOf) -> list[float]:
        """Add a micro-batch's gradients, over the ranks in their order; each rank's loss."""
        losses: list[float] = []
        micro: list[Tensor | None] = [None for _ in self.sums]
        for rank in range(self.num_ranks):
            self.model.zero_grad()
            loss = loss_of(self.model, rank)
            loss.backward()
            losses.append(loss.item())
            gradients = [p.grad for p in self.model.parameters()]
            micro = [_added(a, b) for a, b in zip(micro, gradients, strict=True)]
        self.sums = [_added(a, b) for a, b in zip(self.sums, micro, strict=True)]
        return losses

    def update(self) -> None:
        """Divide, clip, step, round, schedule."""
        divisor = self.num_ranks * self.accumulation_steps
        gradients = [None if total is None else total / divisor for total in self.sums]
        used = [g for g in gradients if g is not None]
        norm = torch.stack([g.double().square().sum() for g in used]).sum().sqrt().float()
        if self.clipping:
            factor = torch.clamp(self.clipping / (norm + 1e-6), max=1.0)
            for gradient in used:
                gradient.mul_(factor)
            self.norms.append(norm.item())
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.model.parameters(), self.masters, strict=True):
                p.copy_(master)
        if self.scheduler is not None:
            self.scheduler.step()
        self.sums = [None for _ in self.sums]

    def run(self, micro_steps: range, loss_of: Callable[[nn.Module, int, int], Tensor]) -> None:
        """Micro-batches, and an update after each that ends a window."""
        for micro in micro_steps:
            self.micro_batch(lambda model, rank, micro=micro: loss_of(model, micro, rank))
            if (micro + 1) % self.accumulation_steps == 0:
                self.update()

    def state(self) -> dict[str, Tensor]:
        """The whole parameters."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return total
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
    return wide if total is None else total + wide


def check_same(expected: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """The same names and bits."""
    assert expected.keys() == got.keys()
    wrong = [name for name in expected if not torch.equal(expected[name], got[name])]
    assert wrong == [], f"bits differ: {', '.join(wrong)}"
