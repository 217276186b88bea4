"""Optimizers and schedules that a caller brings."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedules

import plait
from engine_reference import decay_groups, small_model, square_loss
from ranktest import RankPools

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
}
WITH_BOTH = CONFIG | {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}


def update(engine: Any, micro: int = 0) -> None:
    engine.backward(square_loss(engine, micro, engine.global_rank))
    engine.step()


def both(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    schedule = torch_schedules.ConstantLR(optimizer, factor=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine, made, _, moved = plait.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, config=WITH_BOTH
        )
    said = [str(warning.message) for warning in caught]
    if rank == 0:
        assert "the optimizer that was passed is used, not the configuration's AdamW" in said[0]
        assert "the scheduler that was passed is used, not the configuration's WarmupLR" in said[1]
    assert len(said) == (2 if rank == 0 else 0)
    assert isinstance(made, torch.optim.SGD)
    assert moved is schedule
    assert schedule.optimizer is made is engine.optimizer
    update(engine)
    assert engine.get_lr() == [0.25]


def test_what_is_passed_wins_over_the_configuration_and_rank_0_says_so(
    rank_pools: RankPools,
) -> None:
    rank_pools(2).run(both)


SCHEDULES = {
    "step": lambda optimizer: torch_schedules.StepLR(optimizer, 2, gamma=0.5),
    "cosine": lambda optimizer: torch_schedules.CosineAnnealingLR(optimizer, 5),
    "one cycle": lambda optimizer: torch_schedules.OneCycleLR(optimizer, 0.3, total_steps=6),
    "sequence": lambda optimizer: torch_schedules.SequentialLR(
        optimizer,
        [
            torch_schedules.LinearLR(optimizer, 0.1, total_iters=2),
            torch_schedules.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[2],
    ),
    "chain": lambda optimizer: torch_schedules.ChainedScheduler(
        [
            torch_schedules.ConstantLR(optimizer, 0.5, total_iters=2),
            torch_schedules.ExponentialLR(optimizer, 0.9),
        ]
    ),
}


def rates_of(rank: int, name: str, *, made: bool) -> tuple[list[Any], list[Any]]:
    """An engine's rates and momenta, and those of the same schedule on a plain optimizer."""
    plain = torch.optim.AdamW(decay_groups(small_model(), lr=0.02), lr=0.1)
    schedule = SCHEDULES[name](plain)
    model = small_model()
    optimizer = torch.optim.AdamW(decay_groups(model, lr=0.02), lr=0.1)
    engine, *_ = plait.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=SCHEDULES[name] if made else SCHEDULES[name](optimizer),
        config=CONFIG,
    )
    got, expected = [], []
    for micro in range(5):
        got += [engine.get_lr(), engine.get_mom()]
        expected += [[group[key] for group in plain.param_groups] for key in ("lr", "betas")]
        update(engine, micro)
        plain.step()
        schedule.step()
    return got, expected


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_torch_goes_on_as_on_its_own_optimizer(
    rank_pools: RankPools, name: str, made: bool
) -> None:
    for got, expected in rank_pools(2).run(functools.partial(rates_of, name=name, made=made)):
        assert got == expected


def groups_kept(rank: int) -> None:
    model = small_model()
    model[0].weight.requires_grad_(requires_grad=False)
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": named[:3], "lr": 0.5, "betas": (0.8, 0.9)},
            {"params": named[3:], "weight_decay": 0.25},
        ],
        lr=0.125,
        amsgrad=True,
    )
    engine, made, *_ = plait.initialize(model=model, optimizer=optimizer, config=CONFIG)
    kept = ("lr", "betas", "weight_decay", "amsgrad", "eps")
    for group, original in zip(made.param_groups, optimizer.param_groups, strict=True):
        assert {key: group[key] for key in kept} == {key: original[key] for key in kept}
    assert made.defaults == optimizer.defaults
    frozen = model[0].weight
    before = engine.module_state_dict()
    update(engine)
    after = engine.module_state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == before.keys() - {"0.weight"}
    assert not frozen.requires_grad


def test_groups_keep_their_options_and_frozen_parameters_stay(rank_pools: RankPools) -> None:
    rank_pools(2).run(groups_kept)


def some_only(rank: int) -> None:
    model = small_model()
    config = CONFIG | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    last = list(model.parameters())[-2:]
    engine, made, *_ = plait.initialize(model=model, model_parameters=iter(last), config=config)
    before = engine.module_state_dict()
    for micro in range(3):
        update(engine, micro)
    after = engine.module_state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["2.weight", "2.bias"]
    assert len(made.param_groups) == 1


def test_only_model_parameters_are_trained(rank_pools: RankPools) -> None:
    rank_pools(2).run(some_only)


def made_of_a_class(rank: int) -> None:
    engine, made, *_ = plait.initialize(
        model=small_model(), optimizer=torch.optim.Adagrad, config=CONFIG
    )
    update(engine)
    assert isinstance(made, torch.optim.Adagrad)
    assert engine.was_step_applied()


def test_a_class_is_a_callable_that_makes_an_optimizer(rank_pools: RankPools) -> None:
    rank_pools(2).run(made_of_a_class)


class Odd(torch.optim.SGD):
    """Its argument is not among its defaults."""

    def __init__(self, params: Any, secret: float) -> None:
        super().__init__(params, lr=secret)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    square_loss(model, 0, 0).backward()
    optimizer.step()
    model.zero_grad()
    return optimizer


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


def foreign(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(small_model().parameters(), lr=0.1)


OPTIMIZERS: dict[str, tuple[Any, type[Exception], str]] = {
    "stepped": (stepped, ValueError, "has state of 12 parameters: it has stepped already"),
    "odd": (
        lambda model: Odd(model.parameters(), 0.1),
        ValueError,
        r"its arguments secret are not among its defaults \(lr, momentum",
    ),
    "lbfgs": (lbfgs, ValueError, "LBFGS"),
    "foreign": (foreign, ValueError, r"shape \(7, 3\), passed for .* is not one of the model's"),
    "text": (lambda _: "AdamW", TypeError, "a callable that makes one of parameters, got str"),
    "returns": (lambda _: lambda _: 3, TypeError, "it returned int"),
}


def refused_optimizer(rank: int, name: str) -> None:
    make, error, message = OPTIMIZERS[name]
    model = small_model()
    with pytest.raises(error, match=message):
        plait.initialize(model=model, optimizer=make(model), config=CONFIG)
    if name != "lbfgs":  # found out when it is made
        plait.initialize(model=model, config=CONFIG)  # nothing had been changed


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_that_cannot_be_sharded_are_refused(rank_pools: RankPools, name: str) -> None:
    rank_pools(2).run(refused_optimizer, name)


PARAMETERS: dict[str, tuple[Any, type[Exception], str]] = {
    "a tensor": (torch.zeros(1), TypeError, "parameters or dicts of groups in a list, got Tensor"),
    "numbers": ([1, 2], TypeError, "expected parameters or dicts of groups, got a int"),
    "nothing": ([], ValueError, "expected parameters, got none"),
    "no params": ([{"lr": 1.0}], ValueError, r'without "params": its keys are \[\'lr\'\]'),
    "a mixture": (
        [nn.Parameter(torch.zeros(1)), {"params": []}],
        TypeError,
        "parameters or groups, got some of each",
    ),
    "foreign": ([nn.Parameter(torch.zeros(1))], ValueError, "is not one of the model's"),
}


def refused_parameters(rank: int, name: str) -> None:
    given, error, message = PARAMETERS[name]
    config = CONFIG | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(error, match=message):
        plait.initialize(model=small_model(), model_parameters=given, config=config)


@pytest.mark.parametrize("name", PARAMETERS)
def test_model_parameters_that_are_none_are_refused(rank_pools: RankPools, name: str) -> None:
    rank_pools(1).run(refused_parameters, name)


def refused_schedules(rank: int) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)

    def start(scheduler: Any, optimizer: Any = optimizer) -> None:
        plait.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=CONFIG)

    with pytest.raises(ValueError, match="belongs to an optimizer that was not passed"):
        start(torch_schedules.ExponentialLR(other, 0.9))
    with pytest.raises(ValueError, match="belongs to an optimizer that was not passed"):
        start(torch_schedules.ExponentialLR(optimizer, 0.9), None)
    with pytest.raises(ValueError, match="ReduceLROnPlateau steps by a metric"):
        start(torch_schedules.ReduceLROnPlateau(optimizer))
    with pytest.raises(TypeError, match=r"expected a torch LRScheduler or a callable .* got str"):
        start("cosine")
    with pytest.raises(TypeError, match=r"a schedule with step\(\).* it returned int"):
        start(lambda _: 3)


def test_schedules_that_cannot_be_moved_are_refused(rank_pools: RankPools) -> None:
    rank_pools(2).run(refused_schedules)
