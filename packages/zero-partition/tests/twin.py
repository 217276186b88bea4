"""A model under the library on this rank, and the reference of all ranks beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models import ModelSpec, Moment, loss
from reference import LossOf, Reference
from training import Named, check_same, whole_states
from zero_partition import Precision, RestingError, partition

STAGES = (0, 1, 2, 3)


class Twin:
    """Do the same to both and compare bits.

    Args:
        make: Makes the model, with the same weights at every call on every rank.
        cls: The optimizer.
        options: Its options.
        params: What the optimizer is handed, from (name, parameter) pairs; None for everything.
        param: 16-bit type of the parameters, with float32 masters.
        **how: Handed to `partition`.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        *,
        cls: type[torch.optim.Optimizer] = torch.optim.AdamW,
        options: dict[str, Any] | None = None,
        params: Callable[[Named], Any] | None = None,
        param: torch.dtype | None = None,
        units_of: Callable[[nn.Module], Any] | None = None,
        **how: Any,
    ) -> None:
        options = {"lr": 0.05} if options is None else options
        self.model = make()
        units = None if units_of is None else units_of(self.model)
        precision = Precision(param=param)
        self.zero = partition(self.model, units=units, precision=precision, **how)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        chosen = None if params is None else params(named)
        self.optimizer = self.zero.optimizer(cls, chosen, **options)
        self.reference = Reference(make(), self.zero.num_ranks, param=param)
        self.reference.make_optimizer(cls, params, **options)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.zero.rank

    def backward(self, loss_of: LossOf, ranks: Sequence[int] | None = None) -> Tensor:
        """One micro-batch on `ranks` (all of them by default); the loss is the reference's."""
        losses = self.reference.backward(loss_of, ranks)
        who = list(range(self.zero.num_ranks)) if ranks is None else list(ranks)
        if self.rank not in who:
            return torch.zeros(())
        loss = loss_of(self.model, self.rank)
        loss.backward()
        expected = losses[who.index(self.rank)]
        assert torch.equal(loss, expected), f"loss {loss.item()}, expected {expected.item()}"
        return loss.detach()

    def finish(self, denominator: float | None = None) -> None:
        """End the accumulation; the whole gradients are the reference's."""
        self.zero.finish(denominator)
        self.reference.finish(denominator)
        self.check_gradients()

    def check_gradients(self) -> None:
        """The whole gradients are the reference's."""
        check_same("gradient", self.reference.gradients(), self.zero.gradients())

    def clip(self, max_norm: float) -> Tensor:
        """Clip; the norm is the reference's."""
        norm = self.zero.clip_grad_norm_(max_norm)
        expected = self.reference.clip_grad_norm_(max_norm)
        assert torch.equal(norm, expected), f"norm {norm.item()!r}, expected {expected.item()!r}"
        return norm

    def step(self, *, skip_nonfinite: bool = False) -> bool:
        """Step and clear; the whole parameters are the reference's."""
        stepped: bool = self.optimizer.step()
        assert stepped is self.reference.step(skip_nonfinite=skip_nonfinite)
        self.optimizer.zero_grad()
        self.check()
        return stepped

    def check(self) -> None:
        """The whole parameters and buffers are the reference's."""
        check_same("parameter", self.reference.parameters(), self.zero.state_dict())

    def check_states(self) -> None:
        """The whole optimizer state is the reference's."""
        expected, got = self.reference.states(), whole_states(self.zero, self.optimizer)
        assert expected.keys() == got.keys(), f"states {sorted(got)}, expected {sorted(expected)}"
        for key in expected:
            check_same(f"state {key} of", expected[key], got[key])


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Callable[[], nn.Module]:
    """`make` with the same random numbers at every call, and none taken from the caller."""

    def made() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return made


def numbers(*shape: int, seed: int) -> Tensor:
    """Normal numbers of a seed's own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@seeded
def mlp() -> nn.Module:
    """Prime widths, and a stack of equal blocks; 3 inputs."""
    blocks = [nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 7)) for _ in range(2)]
    return nn.Sequential(nn.Linear(3, 7), nn.Sequential(*blocks), nn.Linear(7, 1))


@seeded
def stack() -> nn.Module:
    """Three equal blocks; 5 inputs."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))


def square_loss(seed: int, num_inputs: int = 3) -> LossOf:
    """Mean square of a model's outputs for inputs of each rank's own."""

    def loss_of(model: nn.Module, rank: int) -> Tensor:
        x = numbers(4, num_inputs, seed=100 * seed + rank)
        return model(x.to(next(model.parameters()).dtype)).square().mean()

    return loss_of


def spec_loss(spec: ModelSpec, step: int, micro: int = 0) -> LossOf:
    """The loss of a `ModelSpec`'s model on each rank's own batch."""
    return lambda model, rank: loss(model, spec, Moment(step, micro, rank))


def check_at_rest(model: nn.Module) -> None:
    """No parameter can be read."""
    for p in model.parameters():
        with pytest.raises(RestingError):
            p.sum()
