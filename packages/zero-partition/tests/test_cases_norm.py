"""The norm, clipping, and steps that are skipped because a gradient is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from models import BlockSpec, ModelSpec, build
from ranktest import RankPools
from twin import STAGES, Twin, numbers, seeded, spec_loss
from zero_partition import OrderError, RestingError, partition


class Experts(nn.Module):
    """Four parameters; each one's gradient is its own coefficient."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.experts = nn.ParameterList(torch.zeros(numel) for _ in range(4))

    def forward(self, which: list[int], coefficients: list[float]) -> Tensor:
        picked = [self.experts[i].sum() * coefficients[i] for i in which]
        return torch.stack(picked).sum()


# C39


def expert_norm(rank: int, numel: int) -> tuple[float, float]:
    squares = (10.0, 10.0, 50.0, 50.0)
    coefficients = [math.sqrt(square / numel) for square in squares]
    seen = set()
    for stage in STAGES:
        for units_of in (None, lambda m: [m.experts]):
            model = Experts(numel)
            units = None if units_of is None else [model]
            zero = partition(model, stage=stage, units=units)
            optimizer = zero.optimizer(torch.optim.SGD, lr=1.0)
            mine = [i for i in range(4) if i * zero.num_ranks // 4 == rank]
            model(mine, coefficients).backward()
            zero.finish(1)
            norm = zero.clip_grad_norm_(1.0)
            assert norm.dtype == torch.float32
            assert norm.shape == ()
            optimizer.step()
            update = torch.cat([t.flatten() for t in zero.state_dict().values()]).double().norm()
            seen.add((norm.item(), update.item()))
    assert len(seen) == 1
    return seen.pop()


@pytest.mark.parametrize("numel", [1, 64])
def test_the_norm_of_four_experts_does_not_depend_on_who_holds_them(
    rank_pools: RankPools, numel: int
) -> None:
    seen = {each for n in (1, 2, 4) for each in rank_pools(n).run(expert_norm, numel)}
    assert len(seen) == 1
    norm, update = seen.pop()
    assert norm == pytest.approx(math.sqrt(120), rel=1e-6)
    assert update == pytest.approx(1.0, rel=1e-5)


# C42


def clip_tied(rank: int, max_norm: float, num_micro: int) -> None:
    spec = ModelSpec(blocks=(BlockSpec(), BlockSpec(tied_to=0)), tied_head=True, vocab=11)
    for stage in STAGES:
        twin = Twin(lambda: build(spec), stage=stage, cls=torch.optim.SGD, options={"lr": 1.0})
        for step in range(2):
            for micro in range(num_micro):
                twin.backward(spec_loss(spec, step, micro))
            twin.reference.finish()
            for name, p in twin.reference.model.named_parameters():
                grad = twin.reference.sums.get(name)
                p.grad = None if grad is None else grad.clone()
            torch_norm = torch.nn.utils.clip_grad_norm_(twin.reference.model.parameters(), max_norm)
            clipped = {n: p.grad for n, p in twin.reference.model.named_parameters()}
            norm = twin.clip(max_norm)
            torch.testing.assert_close(norm, torch_norm, rtol=1e-5, atol=0)
            twin.check_gradients()
            for name, grad in twin.zero.gradients().items():
                torch.testing.assert_close(grad, clipped[name], rtol=1e-5, atol=1e-9)
            twin.step()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("max_norm", [0.1, 1e-9, math.inf])
def test_clipping_with_ties_is_torchs_clipping(
    rank_pools: RankPools, num_ranks: int, max_norm: float
) -> None:
    rank_pools(num_ranks).run(clip_tied, max_norm, 2)


def torch_clip(rank: int) -> None:
    for stage in (1, 2, 3):
        model = nn.Linear(3, 2)
        zero = partition(model, stage=stage)
        model(torch.ones(3)).sum().backward()
        zero.finish()
        for parameters in (model.parameters(), list(model.parameters()), model.weight):
            with pytest.raises(RestingError, match=r"weight.*clip_grad_norm_|weight"):
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        with pytest.raises(RestingError, match="bias"):
            model.bias.grad.norm()
        assert model.bias.grad.shape == (2,)


def test_torchs_own_clipping_raises_by_name_where_gradients_are_sharded(
    rank_pools: RankPools,
) -> None:
    rank_pools(2).run(torch_clip)


def clip_nothing(rank: int) -> None:
    for stage in STAGES:
        model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
        zero = partition(model, stage=stage, units=list(model))
        optimizer = zero.optimizer(torch.optim.SGD, lr=1.0)
        with pytest.raises(OrderError, match="backward"):
            zero.clip_grad_norm_(1.0)
        assert optimizer.step() is False


def test_without_gradients_there_is_no_norm_and_no_step(rank_pools: RankPools) -> None:
    rank_pools(2).run(clip_nothing)


# C44


def make_wide() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 37), nn.Tanh(), nn.Linear(37, 1))


@pytest.mark.parametrize("scale", [1e4, 1e18, 1e30])
@pytest.mark.parametrize("stage", STAGES)
def test_huge_bfloat16_gradients_are_clipped_without_a_scaler(stage: int, scale: float) -> None:
    twin = Twin(
        seeded(make_wide),
        stage=stage,
        cls=torch.optim.SGD,
        options={"lr": 1.0},
        param=torch.bfloat16,
    )
    before = {n: m.detach().clone() for n, m in twin.reference.masters.items()}
    twin.backward(lambda m, r: (m(numbers(4, 3, seed=r).bfloat16()).float() * scale).sum())
    norm = twin.clip(1.0)
    assert scale < norm.item() < math.inf
    twin.step()
    moved = {n: m.detach() - before[n] for n, m in twin.reference.masters.items()}
    update = torch.cat([d.flatten() for d in moved.values()]).double().norm()
    assert update.item() == pytest.approx(1.0, rel=1e-2)


# C45


def skip_one_step(rank: int, fault: str, param: torch.dtype | None) -> None:
    for stage in STAGES:
        twin = Twin(seeded(make_wide), stage=stage, skip_nonfinite=True, param=param)
        schedule = torch.optim.lr_scheduler.ExponentialLR(twin.optimizer, 0.5)
        twin_schedule = torch.optim.lr_scheduler.ExponentialLR(twin.reference.optimizer, 0.5)
        for step in range(4):
            factor = torch.ones(twin.zero.num_ranks)
            if step == 2:
                sick = twin.zero.num_ranks - 1
                factor[sick] = {"inf": math.inf, "nan": math.nan, "sum": 3e38}[fault]
                if fault == "sum":
                    factor[:] = 3e38  # each rank's gradient is finite, their sum is not

            def loss_of(m: nn.Module, r: int, step: int = step, f: Tensor = factor) -> Tensor:
                x = numbers(1, 3, seed=10 * step + r).to(param or torch.float32)
                return m(x).float().sum() * f[r]

            before = twin.zero.state_dict()
            expected_loss = twin.reference.backward(loss_of)
            loss_of(twin.model, rank).backward()
            assert len(expected_loss) == twin.zero.num_ranks
            if fault == "inf":
                twin.clip(1.0)
            stepped = twin.step(skip_nonfinite=True)
            assert stepped is (step != 2)
            if stepped:
                schedule.step()
                twin_schedule.step()
            else:
                after = twin.zero.state_dict()
                assert all(torch.equal(before[name], after[name]) for name in before)
        assert schedule.get_last_lr() == twin_schedule.get_last_lr()
        twin.check_states()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("fault", ["inf", "nan", "sum"])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(
    rank_pools: RankPools, num_ranks: int, fault: str
) -> None:
    if fault == "sum" and num_ranks == 1:
        pytest.skip("one rank has nothing to sum")
    rank_pools(num_ranks).run(skip_one_step, fault, None)


def test_a_skipped_step_leaves_masters_of_bfloat16_parameters(rank_pools: RankPools) -> None:
    rank_pools(2).run(skip_one_step, "inf", torch.bfloat16)


def huge_but_finite(rank: int, dtype: torch.dtype, size: float) -> None:
    for stage in STAGES:
        twin = Twin(
            seeded(lambda: nn.Linear(3, 2).to(dtype)),
            stage=stage,
            skip_nonfinite=True,
            cls=torch.optim.SGD,
            options={"lr": 1.0 / size},
        )
        twin.backward(lambda m, _: m(torch.ones(3, dtype=dtype)).sum() * size)
        assert twin.step(skip_nonfinite=True) is True


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e30), (torch.float32, 1.5e38), (torch.float64, 1e39), (torch.float64, 1e200)],
    ids=str,
)
def test_finite_gradients_whose_norm_overflows_are_no_reason_to_skip(
    rank_pools: RankPools, dtype: torch.dtype, size: float
) -> None:
    rank_pools(2).run(huge_but_finite, dtype, size)


def not_skipping(rank: int) -> None:
    for stage in STAGES:
        model = nn.Linear(2, 1)
        zero = partition(model, stage=stage)
        optimizer = zero.optimizer(torch.optim.SGD, lr=1.0)
        (model(torch.ones(2)).sum() * (math.inf if rank == 1 else 1.0)).backward()
        assert optimizer.step() is True
        assert not zero.state_dict()["bias"].isfinite().any()


def test_without_skip_nonfinite_a_step_is_a_step_as_in_torch(rank_pools: RankPools) -> None:
    rank_pools(2).run(not_skipping)
