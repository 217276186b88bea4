"""Optimizers: which classes are taken, groups, schedules, hooks, state."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ranktest import RankPools
from strategies import FUSED, OPTIMIZERS
from twin import STAGES, Twin, seeded, square_loss
from zero_partition import partition


@seeded
def mlp() -> nn.Module:
    """Widths that no vector length divides."""
    return nn.Sequential(nn.Linear(3, 37), nn.Tanh(), nn.Linear(37, 1))


def every_optimizer(rank: int, name: str, options: dict[str, Any]) -> None:
    for stage in STAGES:
        cls, bucket_numel = getattr(torch.optim, name), 1 if stage % 2 else None
        twin = Twin(mlp, stage=stage, bucket_numel=bucket_numel, cls=cls, options=options)
        for step in range(3):
            twin.backward(square_loss(step))
            assert twin.step() is True
        twin.check_states()


@pytest.mark.parametrize(("name", "options"), [*OPTIMIZERS, *FUSED], ids=str)
def test_elementwise_optimizers_give_the_bits_of_whole_parameters(
    rank_pools: RankPools, name: str, options: tuple[tuple[str, Any], ...]
) -> None:
    rank_pools(3).run(every_optimizer, name, dict(options))


class SignDecay(torch.optim.Optimizer):
    """Somebody's own elementwise optimizer, with a state of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state.setdefault("trend", torch.zeros_like(p)).lerp_(p.grad, 0.3)
                    p.sub_(group["lr"] * (state["trend"].sign() + 0.01 * p))


class NormScaled(torch.optim.Optimizer):
    """Scales an update by a norm over the whole parameter, as LARS and LAMB do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - torch's signature
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.norm() / p.grad.norm() * p.grad)


def own_optimizer(rank: int) -> None:
    for stage in STAGES:
        twin = Twin(mlp, stage=stage, cls=SignDecay, options={"lr": 0.1})
        for step in range(3):
            twin.backward(square_loss(step))
            twin.step()
        twin.check_states()


def test_a_users_own_elementwise_optimizer_works_at_every_stage(rank_pools: RankPools) -> None:
    rank_pools(2).run(own_optimizer)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.Adafactor, {}),
        (torch.optim.LBFGS, {}),
        (torch.optim.Muon, {}),
        (torch.optim.SparseAdam, {}),
        (NormScaled, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_optimizer_that_is_not_elementwise_is_refused_with_reason_and_remedy(
    stage: int, cls: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    zero = partition(mlp(), stage=stage)
    with pytest.raises((ValueError, TypeError), match=rf"(?s){cls.__name__}.*(use|AdamW|stage=0)"):
        zero.optimizer(cls, **options)


def test_a_closure_is_refused() -> None:
    model = mlp()
    optimizer = partition(model, stage=3).optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(lambda: 0.0)


GROUPS: dict[str, Callable[[Any], Any]] = {
    "decay by shape": lambda named: [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for _, p in named if p.ndim <= 1], "weight_decay": 0.0, "lr": 0.2},
    ],
    "names": list,
    "named groups": lambda named: [
        {"params": list(named[2:]), "lr": 0.2},
        {"params": list(named[:2]), "betas": (0.5, 0.9)},
    ],
    "some": lambda named: [p for name, p in named if "weight" in name],
    "a generator": lambda named: (p for _, p in named),
    "reversed": lambda named: [p for _, p in reversed(named)],
}


def grouped(rank: int, how: str) -> None:
    for stage in STAGES:
        for param in (None, torch.bfloat16):
            twin = Twin(mlp, stage=stage, params=GROUPS[how], param=param)
            for step in range(3):
                twin.backward(square_loss(step))
                twin.step()
            twin.check_states()


@pytest.mark.parametrize("how", sorted(GROUPS))
def test_groups_and_names_are_taken_as_torch_takes_them(rank_pools: RankPools, how: str) -> None:
    rank_pools(2).run(grouped, how)


def group_added_later(rank: int) -> None:
    for stage in STAGES:
        twin = Twin(mlp, stage=stage, params=lambda named: [named[0][1], named[1][1]])
        twin.backward(square_loss(0))
        twin.step()
        last = [p for n, p in twin.model.named_parameters() if n.startswith("2")]
        twin.optimizer.add_param_group({"params": last, "lr": 0.2})
        masters = [m for n, m in twin.reference.masters.items() if n.startswith("2")]
        assert twin.reference.optimizer is not None
        twin.reference.optimizer.add_param_group({"params": masters, "lr": 0.2})
        for step in (1, 2):
            twin.backward(square_loss(step))
            twin.step()
        twin.check_states()


def test_a_group_may_be_added_later(rank_pools: RankPools) -> None:
    rank_pools(2).run(group_added_later)


def two_optimizers(rank: int) -> None:
    for stage in STAGES:
        twin = Twin(mlp, stage=stage, params=lambda named: [p for _, p in named[:2]])
        rest = [p for n, p in twin.model.named_parameters() if n.startswith("2")]
        second = twin.zero.optimizer(torch.optim.SGD, rest, lr=0.1)
        masters = [m for n, m in twin.reference.masters.items() if n.startswith("2")]
        reference_second = torch.optim.SGD(masters, lr=0.1)
        for step in range(3):
            twin.backward(square_loss(step))
            twin.finish()
            for name, master in twin.reference.masters.items():
                master.grad = twin.reference.sums[name]
            assert second.step() is True
            reference_second.step()
            twin.step()


def test_two_optimizers_may_share_a_model(rank_pools: RankPools) -> None:
    rank_pools(2).run(two_optimizers)


def note(seen: list[str], what: str, *_: object) -> None:
    """A step hook that leaves a word."""
    seen.append(what)


def schedule_and_hooks(rank: int) -> None:
    for stage in STAGES:
        twin = Twin(mlp, stage=stage, cls=torch.optim.SGD, options={"lr": 1.0})
        seen: list[str] = []
        twin.optimizer.register_step_pre_hook(partial(note, seen, "before"))
        twin.optimizer.register_step_post_hook(partial(note, seen, "after"))
        assert isinstance(twin.optimizer, torch.optim.SGD)
        assert twin.reference.optimizer is not None
        ours = torch.optim.lr_scheduler.LambdaLR(twin.optimizer, lambda k: (k + 1) / 10)
        theirs = torch.optim.lr_scheduler.LambdaLR(twin.reference.optimizer, lambda k: (k + 1) / 10)
        for step in range(4):
            assert ours.get_last_lr() == [(step + 1) / 10]
            twin.backward(square_loss(step))
            twin.step()
            ours.step()  # a warning here is an error: the schedule must have seen the step
            theirs.step()
            assert seen == ["before", "after"] * (step + 1)


def test_schedules_and_step_hooks_fire_once_a_step(rank_pools: RankPools) -> None:
    rank_pools(2).run(schedule_and_hooks)


def local_state(rank: int) -> None:
    for stage in STAGES:
        twin = Twin(mlp, stage=stage)
        twin.backward(square_loss(0))
        twin.step()
        if rank == 0:  # no collective: the other rank does not call it
            state = twin.optimizer.state_dict()
            assert state["param_groups"][0]["lr"] == 0.05
            twin.optimizer.load_state_dict(state)
        twin.backward(square_loss(1))
        twin.step()
        twin.check_states()


def test_the_state_dict_is_local_and_goes_back_where_it_came_from(rank_pools: RankPools) -> None:
    rank_pools(2).run(local_state)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([nn.Parameter(torch.ones(2))], "partition"),
        ([torch.ones(2)], "(?i)parameter"),
        ([], "empty|no param"),
    ],
    ids=["foreign", "not a parameter", "none"],
)
def test_parameters_that_are_not_the_models_are_refused(params: list[Any], message: str) -> None:
    zero = partition(mlp(), stage=3)
    with pytest.raises((ValueError, TypeError), match=message):
        zero.optimizer(torch.optim.SGD, params, lr=0.1)
