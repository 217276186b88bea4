"""Whatever is drawn, an engine's ranks leave the bits of one process that plays them all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import plait
from engine_reference import ReferenceLoop, check_same, decay_groups, small_model, square_loss
from ranktest import RankPools

WARMUP_STEPS = 3
LR = 0.05


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The ranks have one thread each; the reference must sum in the same order."""
    torch.set_num_threads(1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A drawn training run."""

    num_ranks: int
    stage: int
    accumulation_steps: int
    micro_steps: int
    clipping: float
    optimizer: str  # "json", "json groups", "passed", "made"
    scheduler: str  # "none", "json", "passed", "made"
    bf16: bool

    @property
    def config(self) -> dict[str, Any]:
        """As a user of DeepSpeed has it."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation_steps,
            "gradient_clipping": self.clipping,
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": self.bf16},
        }
        if self.optimizer.startswith("json"):
            config["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.02}}
        if self.scheduler == "json":
            params = {"warmup_num_steps": WARMUP_STEPS, "warmup_type": "linear"}
            config["scheduler"] = {"type": "WarmupLR", "params": params}
        return config


@st.composite
def runs(draw: st.DrawFn) -> Run:
    optimizer = draw(st.sampled_from(["json", "json groups", "passed", "made"]))
    schedulers = ["none", "json", "made", *(["passed"] if optimizer == "passed" else [])]
    return Run(
        num_ranks=draw(st.integers(1, 3)),
        stage=draw(st.integers(0, 3)),
        accumulation_steps=draw(st.integers(1, 3)),
        micro_steps=draw(st.integers(1, 7)),
        clipping=draw(st.sampled_from([0.0, 0.01, 1.0, 100.0])),
        optimizer=optimizer,
        scheduler=draw(st.sampled_from(schedulers)),
        bf16=draw(st.booleans()),
    )


def warm_up(update: int) -> float:
    return min(1.0, update / WARMUP_STEPS)


def made_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)


def made_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def initialize(run: Run) -> Any:
    model = small_model()
    optimizer: Any = None
    if run.optimizer == "passed":
        optimizer = torch.optim.AdamW(decay_groups(model, lr=0.01), lr=LR)
    elif run.optimizer == "made":
        optimizer = made_optimizer
    scheduler: Any = None
    if run.scheduler == "passed":
        scheduler = made_scheduler(optimizer)
    elif run.scheduler == "made":
        scheduler = made_scheduler
    parameters = decay_groups(model, lr=0.01) if run.optimizer == "json groups" else None
    engine, *_ = plait.initialize(
        model=model,
        optimizer=optimizer,
        model_parameters=parameters,
        lr_scheduler=scheduler,
        config=run.config,
    )
    return engine


def train(
    rank: int, run: Run
) -> tuple[dict[str, Tensor], list[list[float]], list[float | None], int]:
    engine = initialize(run)
    rates, norms = [], []
    for micro in range(run.micro_steps):
        loss = square_loss(engine, micro, rank)
        rate = engine.get_lr()
        boundary = engine.is_gradient_accumulation_boundary()
        assert engine.backward(loss) is loss
        engine.step()
        assert engine.was_step_applied() is boundary
        if boundary:
            rates.append(rate)
            norms.append(engine.get_global_grad_norm())
    assert engine.micro_steps == run.micro_steps
    return engine.module_state_dict(), rates, norms, engine.global_steps


def reference(run: Run) -> ReferenceLoop:
    model = small_model()
    loop = ReferenceLoop(
        model,
        num_ranks=run.num_ranks,
        accumulation_steps=run.accumulation_steps,
        clipping=run.clipping,
        bf16=run.bf16,
    )
    grouped = loop.groups(decay_groups(model, lr=0.01))
    if run.optimizer == "made":
        loop.optimizer = made_optimizer(loop.masters)
    elif run.optimizer == "passed":
        loop.optimizer = torch.optim.AdamW(grouped, lr=LR)
    else:
        groups = grouped if run.optimizer == "json groups" else loop.masters
        loop.optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=0.02)
    if run.scheduler != "none":
        loop.scheduler = made_scheduler(loop.optimizer)
    loop.run(range(run.micro_steps), square_loss)
    return loop


@settings(max_examples=settings.default.max_examples)
@given(run=runs())
def test_training_leaves_the_bits_of_one_process(rank_pools: RankPools, run: Run) -> None:
    expected = reference(run)
    for state, rates, norms, updates in rank_pools(run.num_ranks).run(train, run):
        check_same(expected.state(), state)
        assert updates == run.micro_steps // run.accumulation_steps
        assert rates == [pytest.approx(each, rel=1e-15) for each in expected.rates]
        assert norms == (expected.norms if run.clipping else [None] * updates)


def warm_up_rates(rank: int) -> list[list[float]]:
    run = Run(
        num_ranks=1,
        stage=0,
        accumulation_steps=1,
        micro_steps=5,
        clipping=0.0,
        optimizer="json",
        scheduler="json",
        bf16=False,
    )
    return train(rank, run)[1]


def test_update_k_runs_with_the_schedule_at_k(rank_pools: RankPools) -> None:
    (rates,) = rank_pools(1).run(warm_up_rates)
    assert rates == [[LR * share] for share in (0.0, 1 / 3, 2 / 3, 1.0, 1.0)]


def two_backwards(rank: int, stage: int) -> dict[str, Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
    }
    engine, *_ = plait.initialize(model=small_model(), config=config)
    for micro in (0, 2):
        engine.backward(square_loss(engine, micro, rank))
        engine.backward(square_loss(engine, micro + 1, rank))
        engine.step()
    assert (engine.global_steps, engine.micro_steps) == (2, 2)
    return engine.module_state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_several_backwards_before_one_step_add_up(rank_pools: RankPools, stage: int) -> None:
    loop = ReferenceLoop(small_model(), num_ranks=2, accumulation_steps=1, clipping=0.0)
    loop.optimizer = torch.optim.SGD(loop.masters, lr=LR)
    for micro in range(4):
        loop.micro_batch(lambda model, rank, micro=micro: square_loss(model, micro, rank))
        if micro % 2:
            loop.update()
    for state in rank_pools(2).run(two_backwards, stage):
        check_same(loop.state(), state)


def forced_boundaries(rank: int) -> tuple[dict[str, Tensor], int]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = plait.initialize(model=small_model(), config=config)
    for micro in range(4):  # windows of one and of three
        engine.set_gradient_accumulation_boundary(micro in (0, 3))
        engine.backward(square_loss(engine, micro, rank))
        engine.step()
    engine.set_gradient_accumulation_boundary(None)
    assert not engine.is_gradient_accumulation_boundary()
    return engine.module_state_dict(), engine.global_steps


def test_a_boundary_said_by_hand_is_one(rank_pools: RankPools) -> None:
    loop = ReferenceLoop(small_model(), num_ranks=2, accumulation_steps=2, clipping=0.0)
    loop.optimizer = torch.optim.SGD(loop.masters, lr=LR)
    for micro in range(4):
        loop.micro_batch(lambda model, rank, micro=micro: square_loss(model, micro, rank))
        if micro in (0, 3):
            loop.update()
    for state, updates in rank_pools(2).run(forced_boundaries):
        check_same(loop.state(), state)
        assert updates == 2


def other_batch_size(rank: int) -> tuple[list[int], tuple[int, int, int], int]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = plait.initialize(model=small_model(), config=config)
    updates = []
    for micro in range(7):
        if micro == 1:
            engine.set_train_batch_size(12)
        engine.backward(square_loss(engine, micro, rank))
        engine.step()
        updates.append(engine.global_steps)
    return updates, engine.get_batch_info(), engine.global_samples


def test_a_new_batch_size_changes_the_micro_batches_of_an_update(rank_pools: RankPools) -> None:
    for updates, sizes, samples in rank_pools(2).run(other_batch_size):
        assert updates == [1, 1, 1, 2, 2, 2, 3]
        assert sizes == (12, 2, 3)
        assert samples == 4 + 12 + 12
