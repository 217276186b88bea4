"""The reference itself: against torch's own data parallelism, and against hand-computed sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models import ALWAYS, When, build
from ranktest import RankPools
from reference import Reference
from strategies import TrainingRun, training_runs
from training import Outcome, differences, gather_losses, grouped, run_loss, train_reference


def train_ddp(rank: int, run: TrainingRun) -> Outcome:
    """The run by torch's own DDP, reducing every micro-batch on its own, added up by hand.

    (Left to itself DDP adds a local gradient to the mean so far and averages that: another order.)
    """
    model = build(run.model)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    cls = getattr(torch.optim, run.optimizer.name)
    optimizer = cls(grouped(run.optimizer.groups, named), **dict(run.optimizer.options))
    outcome = Outcome()
    for step in range(run.steps):
        losses = []
        sums: dict[str, Tensor | None] = {name: None for name, _ in named}
        for micro in range(run.accumulation):
            value = run_loss(run, step, micro)(ddp, rank)
            value.backward()
            losses.append(value.detach())
            for name, p in named:
                if p.grad is not None:
                    before = sums[name]
                    sums[name] = p.grad.clone() if before is None else before + p.grad
                p.grad = None
        outcome.losses.append(gather_losses(losses))
        for name, p in named:
            p.grad = sums[name]
        outcome.gradients = {n: None if g is None else g.clone() for n, g in sums.items()}
        optimizer.step()
        outcome.stepped.append(True)
        model.zero_grad()
    outcome.parameters = {n: t.detach().clone() for n, t in model.state_dict().items()}
    for name, p in named:
        for key, value in optimizer.state.get(p, {}).items():
            if value is not None:
                tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
                outcome.states.setdefault(key, {})[name] = tensor.detach().clone()
    return outcome


def plain(run: TrainingRun) -> TrainingRun:
    """The same run on 2 ranks, with only what DDP supports too."""
    blocks = []
    for block in run.model.blocks:
        used = block.used if block.used == ALWAYS else When(steps=block.used.steps)
        plainer = replace(block, output="tensor", used=used)
        if block.checkpoint not in (None, "inner") or block.dtype == "bfloat16":
            plainer = replace(plainer, checkpoint=None, dtype="float32")
        blocks.append(plainer)
    model = replace(run.model, blocks=tuple(blocks))
    return replace(run, model=model, num_ranks=2, max_norm=None, denominator=None)


@settings(max_examples=settings.default.max_examples // 2)
@given(training_runs().map(plain))
def test_reference_is_ddp_bitwise_on_two_ranks(rank_pools: RankPools, run: TrainingRun) -> None:
    for got in rank_pools(2).run(train_ddp, run):
        assert differences(train_reference(run), got) == []


def test_reference_adds_in_rank_order_and_divides_once() -> None:
    model = nn.Linear(1, 1, bias=False)
    grads = [torch.tensor(x) for x in (1e8, 1.0, -1e8)]  # (1e8 + 1) - 1e8 is 0 in float32
    reference = Reference(model, 3)
    for _ in range(2):
        reference.backward(lambda m, rank: (m.weight * grads[rank]).sum())
    reference.backward(lambda m, rank: (m.weight * (0.5, 0.25, 0.0)[rank]).sum())
    reference.finish()
    assert reference.sums["weight"].item() == torch.tensor(0.75).div(3).item()


def test_reference_steps_float32_masters_of_bfloat16_parameters() -> None:
    model = nn.Linear(1, 1, bias=False)
    start = model.weight.detach().clone()
    reference = Reference(model, 1, param=torch.bfloat16)
    reference.make_optimizer(torch.optim.SGD, lr=2.0**-12)
    for _ in range(4):  # each step alone is lost in bfloat16
        reference.backward(lambda m, _: m.weight.sum())
        reference.step()
    master = reference.masters["weight"]
    assert master.item() == pytest.approx(start.item() - 4 * 2.0**-12, abs=1e-7)
    assert torch.equal(model.weight, master.bfloat16())


def test_reference_leaves_unused_parameters_without_gradient_and_state() -> None:
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    reference = Reference(model, 2)
    reference.make_optimizer(torch.optim.AdamW, weight_decay=0.5)
    before = model[1].weight.detach().clone()
    reference.backward(lambda m, _: m[0](torch.ones(2)).sum())
    assert reference.gradients()["1.weight"] is None
    reference.step()
    assert torch.equal(model[1].weight, before)
    assert "1.weight" not in reference.states()["exp_avg"]
