"""ZeRO as it is defined: plain data parallelism in one process, one rank after the other.

Nothing here knows the library. A micro-batch's gradients are added over the ranks in rank order,
in float32 or wider, then added to the accumulator; one division by the denominator ends an
accumulation; the optimizer steps on the parameters, or on float32 masters where parameters have 16
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LossOf = Callable[[nn.Module, int], Tensor]
ParamsOf = Callable[[Sequence[tuple[str, nn.Parameter]]], Any]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or wider where the parameter is wider."""
    return torch.promote_types(dtype, torch.float32)


class Reference:
    """The loop of plain data parallelism over `num_ranks` ranks, in one process.

    Args:
        model: Changed in place. No layer may depend on another rank's batch.
        num_rank_pools: RankPools whose micro-batches each `backward` takes.
        param: Type of the trainable parameters in forward and backward; None keeps them as is.
    """

    def __init__(
        self, model: nn.Module, num_ranks: int, *, param: torch.dtype | None = None
    ) -> None:
        self.model = model
        self.num_ranks = num_ranks
        self.masters: dict[str, nn.Parameter] = {}
        self.sums: dict[str, Tensor] = {}
        self.finished = False
        self.optimizer: torch.optim.Optimizer | None = None
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            whole = p.detach().to(accumulator_dtype(param or p.dtype), copy=True)
            if param is not None:
                p.data = p.detach().to(param, copy=True)
            self.masters[name] = p if p.dtype == whole.dtype else nn.Parameter(whole)

    def make_optimizer(
        self, cls: type[torch.optim.Optimizer], params: ParamsOf | None = None, **options: Any
    ) -> torch.optim.Optimizer:
        """`cls` over the masters; `params` turns (name, parameter) pairs into what torch takes."""
        named = list(self.masters.items())
        chosen = [p for _, p in named] if params is None else params(named)
        self.optimizer = cls(chosen, **options)
        return self.optimizer

    def backward(self, loss_of: LossOf, ranks: Sequence[int] | None = None) -> list[Tensor]:
        """One micro-batch: every rank's gradients, added in rank order; the losses by rank."""
        assert not self.finished, "an accumulation ends with step() or zero_grad()"
        losses: list[Tensor] = []
        micro: dict[str, Tensor] = {}
        params = dict(self.model.named_parameters())
        for rank in range(self.num_ranks) if ranks is None else ranks:
            for p in params.values():
                p.grad = None
            loss = loss_of(self.model, rank)
            loss.backward()
            losses.append(loss.detach())
            for name in self.masters:
                grad = params[name].grad
                if grad is not None:
                    wide = grad.to(accumulator_dtype(grad.dtype), copy=True)
                    micro[name] = micro[name] + wide if name in micro else wide
        for name, total in micro.items():
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        for p in params.values():
            p.grad = None
        return losses

    def finish(self, denominator: float | None = None) -> None:
        """Divide once. A denominator of 0 says that nothing was counted: sums of nothing stay."""
        if self.finished:
            return
        divisor = self.num_ranks if denominator is None else denominator
        if divisor != 0:
            self.sums = {name: total / divisor for name, total in self.sums.items()}
        self.finished = True

    def gradients(self) -> dict[str, Tensor | None]:
        """By name; None where no rank used the parameter."""
        self.finish()
        return {name: self.sums.get(name) for name in self.masters}

    def norm(self) -> Tensor:
        """Squares summed in float64, rounded once."""
        self.finish()
        squares = [g.double().square().sum() for g in self.sums.values()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)
        return total.sqrt().float()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """torch's formula, with `norm`."""
        norm = self.norm()
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in self.sums.values():
            grad.mul_(coefficient)
        return norm

    def step(self, *, skip_nonfinite: bool = False) -> bool:
        """Step on the masters, then round them into the parameters; drops the gradients.

        Returns whether there was a step: not without gradients, and not when one is skipped.
        """
        assert self.optimizer is not None
        self.finish()
        stepped = False
        if not (skip_nonfinite and any(not bool(g.isfinite().all()) for g in self.sums.values())):
            for name, master in self.masters.items():
                master.grad = self.sums.get(name)
            stepped = bool(self.sums)
            self.optimizer.step()
            self.round_masters()
        self.zero_grad()
        return stepped

    @torch.no_grad()
    def round_masters(self) -> None:
        """Copy every master into its parameter."""
        for name, p in self.model.named_parameters():
            if name in self.masters and self.masters[name] is not p:
                p.copy_(self.masters[name])

    def zero_grad(self) -> None:
        """Drop what was accumulated."""
        self.sums = {}
        self.finished = False
        for master in self.masters.values():
            master.grad = None

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Optimizer state by state and parameter name; a number is a float64 scalar."""
        assert self.optimizer is not None
        found: dict[str, dict[str, Tensor]] = {}
        for name, master in self.masters.items():
            for key, value in self.optimizer.state.get(master, {}).items():
                if value is not None:
                    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
                    found.setdefault(key, {})[name] = tensor.detach().clone()
        return found

    def parameters(self) -> dict[str, Tensor]:
        """Whole parameters under every alias, and buffers, as `model.state_dict()` gives them."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}
