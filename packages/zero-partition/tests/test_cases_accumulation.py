"""Several backwards before a step: sums, denominators, messages, and when they end."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ranktest import RankPools
from reference import LossOf
from twin import STAGES, Twin, mlp, numbers, seeded, square_loss, stack
from zero_partition import OrderError, RanksDisagree, ZeroError, partition

# C05


def four_backwards(rank: int, denominator: float | None) -> None:
    for stage in STAGES:
        twin = Twin(mlp, stage=stage)
        for step in range(2):
            for micro in range(4):
                twin.backward(square_loss(10 * step + micro))
            twin.finish(denominator)
            twin.step()


@pytest.mark.parametrize(
    "denominator", [None, 1, 8, 2.5], ids=["mean of ranks", "sum", "mean", "other"]
)
def test_four_backwards_before_a_step_add_up_and_divide_once(
    rank_pools: RankPools, denominator: float | None
) -> None:
    rank_pools(2).run(four_backwards, denominator)
    rank_pools(3).run(four_backwards, denominator)


# C06, C07


def sixteen_bit(rank: int, dtype: torch.dtype) -> list[bytes]:
    twins = [Twin(mlp, stage=stage, param=dtype) for stage in STAGES]
    seen = []
    for twin in twins:
        for step in range(3):
            for micro in range(4):
                twin.backward(square_loss(10 * step + micro))
            twin.finish()
            gradients = twin.zero.gradients()
            assert {g.dtype for g in gradients.values() if g is not None} == {torch.float32}
            seen.append(b"".join(g.numpy().tobytes() for g in gradients.values() if g is not None))
            twin.step()
        twin.check_states()
    return seen


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradients_accumulate_in_float32_alike_on_all_ranks(
    rank_pools: RankPools, num_ranks: int, dtype: torch.dtype
) -> None:
    seen = rank_pools(num_ranks).run(sixteen_bit, dtype)
    assert all(each == seen[0] for each in seen)


def five_steps(
    rank: int, accumulation: int, param: torch.dtype | None
) -> list[tuple[float, float]]:
    curves = []
    for stage in STAGES:
        twin = Twin(mlp, stage=stage, param=param)
        curve = []
        for step in range(5):
            for micro in range(accumulation):
                value = twin.backward(square_loss(10 * step + micro))
            curve.append((value.item(), twin.clip(0.5).item()))
            twin.step()
        curves.append(curve)
    assert all(curve == curves[0] for curve in curves)
    return curves[0]


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("param", [None, torch.bfloat16])
def test_losses_and_norms_are_the_same_bits_at_every_stage(
    rank_pools: RankPools, accumulation: int, param: torch.dtype | None
) -> None:
    curves = rank_pools(2).run(five_steps, accumulation, param)
    assert [norm for _, norm in curves[0]] == [norm for _, norm in curves[1]]
    assert len({norm for _, norm in curves[0]}) == 5


# C08


def bucket_sizes(rank: int, stage: int) -> None:
    def make() -> nn.Module:
        return mlp().double()

    total = sum(p.numel() for p in make().parameters())
    for bucket_numel in (1, 7, 77, 78, total, 10 * total, 10**12):  # 77 is one weight
        twin = Twin(seeded(make), stage=stage, bucket_numel=bucket_numel)
        for step in range(2):
            twin.backward(square_loss(step))
            twin.finish()
            twin.step()


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_bucket_size_never_changes_a_bit_in_float64(
    rank_pools: RankPools, num_ranks: int, stage: int
) -> None:
    rank_pools(num_ranks).run(bucket_sizes, stage)


# C18


def token_loss(valid: dict[tuple[int, int], int], micro: int, reduction: str) -> LossOf:
    """Cross entropy over as many tokens as a rank's micro-batch has."""

    def loss_of(model: nn.Module, rank: int) -> Tensor:
        num_tokens = valid[micro, rank]
        x = numbers(8, 3, seed=10 * micro + rank)
        targets = torch.arange(8) % 2
        targets[num_tokens:] = -100
        logits = torch.cat([model(x), -model(x)], dim=1)
        return F.cross_entropy(logits, targets, reduction=reduction)

    return loss_of


def token_counts(rank: int, valid: dict[tuple[int, int], int]) -> None:
    total = sum(valid.values())
    for stage in STAGES:
        twin = Twin(mlp, stage=stage)
        for micro in range(2):
            twin.backward(token_loss(valid, micro, "sum"))
        mine = torch.tensor(sum(n for (_, r), n in valid.items() if r == rank))
        dist.all_reduce(mine)
        assert mine.item() == total
        twin.finish(mine.item())
        gradients = twin.zero.gradients()
        assert all(g is not None and bool(g.isfinite().all()) for g in gradients.values())
        if total == 0:
            assert all(not bool(g.any()) for g in gradients.values() if g is not None)
        else:
            one = mlp()
            whole = [token_loss(valid, m, "sum")(one, r) for m, r in valid]
            (torch.stack(whole).sum() / total).backward()
            for name, p in one.named_parameters():
                torch.testing.assert_close(gradients[name], p.grad, rtol=1e-5, atol=1e-7)
        twin.step()


@pytest.mark.parametrize(
    "counts", [(7, 3, 2, 5), (0, 3, 0, 5), (0, 0, 1, 0), (0, 0, 0, 0)], ids=str
)
def test_the_denominator_makes_a_mean_over_all_tokens(
    rank_pools: RankPools, counts: tuple[int, ...]
) -> None:
    valid = {(micro, rank): counts[2 * micro + rank] for micro in range(2) for rank in range(2)}
    rank_pools(2).run(token_counts, valid)


def mean_of_means(rank: int) -> None:
    valid = {(0, 0): 7, (0, 1): 3}
    twin = Twin(mlp, stage=3)
    twin.backward(token_loss(valid, 0, "mean"))
    twin.finish()
    one = mlp()
    means = torch.stack([token_loss(valid, 0, "mean")(one, r) for r in range(2)])
    means.mean().backward()
    for name, p in one.named_parameters():
        torch.testing.assert_close(twin.zero.gradients()[name], p.grad, rtol=1e-5, atol=1e-7)


def test_the_default_denominator_is_a_mean_of_the_ranks_losses(rank_pools: RankPools) -> None:
    rank_pools(2).run(mean_of_means)


def unequal_denominators(rank: int, by_rank: tuple[float | None, ...], stage: int) -> str:
    model = stack()
    zero = partition(model, stage=stage)
    square_loss(0, 5)(model, rank).backward()
    with pytest.raises(ZeroError) as caught:
        zero.finish(by_rank[rank])
    assert isinstance(caught.value, RanksDisagree)
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("by_rank", [(7, 3), (None, 5), (0, 2), (4, 4, 4.5)], ids=str)
def test_unequal_denominators_are_refused_on_all_ranks_and_named(
    rank_pools: RankPools, by_rank: tuple[float | None, ...], stage: int
) -> None:
    for message in rank_pools(len(by_rank)).run(unequal_denominators, by_rank, stage):
        assert "denominator" in message
        for value in by_rank:
            assert f"{len(by_rank) if value is None else value:g}" in message


@pytest.mark.parametrize("denominator", [-1, math.nan, math.inf])
def test_a_denominator_that_is_no_count_is_refused(denominator: float) -> None:
    model = nn.Linear(2, 1)
    zero = partition(model, stage=3)
    model(torch.ones(2)).sum().backward()
    with pytest.raises(ValueError, match="denominator"):
        zero.finish(denominator)


# C19


def cleared_every_micro_batch(rank: int, who: str) -> None:
    for stage in STAGES:
        twin = Twin(mlp, stage=stage)
        for step in range(2):
            for micro in range(3):
                clear = {
                    "optimizer": twin.optimizer.zero_grad,
                    "model": twin.model.zero_grad,
                    "zero": twin.zero.zero_grad,
                }[who]
                clear()
                twin.reference.zero_grad()
                twin.backward(square_loss(10 * step + micro))
            twin.finish()
            twin.step()


@pytest.mark.parametrize("who", ["optimizer", "model", "zero"])
def test_zero_grad_drops_what_was_accumulated_whoever_calls_it(
    rank_pools: RankPools, who: str
) -> None:
    rank_pools(2).run(cleared_every_micro_batch, who)


def cleared_gradients(rank: int) -> None:
    for stage in STAGES:
        twin = Twin(stack, stage=stage)
        twin.backward(square_loss(0, 5))
        for clear in (twin.model.zero_grad, twin.optimizer.zero_grad):
            clear(set_to_none=False)
            twin.reference.sums = {n: torch.zeros_like(g) for n, g in twin.reference.sums.items()}
            twin.backward(square_loss(1, 5))
        twin.finish()
        twin.step()


def test_gradients_may_be_zeroed_in_place(rank_pools: RankPools) -> None:
    rank_pools(2).run(cleared_gradients)


# The end of an accumulation.


def backward_after_finish(rank: int, how: str) -> None:
    for stage in STAGES:
        twin = Twin(stack, stage=stage)
        twin.backward(square_loss(0, 5))
        twin.finish()
        if how == "clip":
            twin.clip(0.1)
        late = square_loss(1, 5)(twin.model, rank)
        with pytest.raises(OrderError, match=r"backward.*finish.*zero_grad"):
            late.backward()
        twin.check_gradients()  # the error cost nothing
        if how == "zero_grad":
            twin.optimizer.zero_grad()
            twin.reference.zero_grad()
            twin.backward(square_loss(1, 5))
            twin.finish()
        twin.step()
        twin.backward(square_loss(2, 5))
        twin.finish()
        twin.step()


@pytest.mark.parametrize("how", ["finish", "clip", "zero_grad"])
def test_backward_on_divided_gradients_is_an_error(rank_pools: RankPools, how: str) -> None:
    rank_pools(2).run(backward_after_finish, how)


def finish_twice(rank: int) -> None:
    for stage in STAGES:
        twin = Twin(stack, stage=stage)
        twin.backward(square_loss(0, 5))
        twin.finish(3)
        twin.finish()  # nothing left to do
        with pytest.raises(OrderError, match="denominator"):
            twin.zero.finish(5)
        twin.clip(0.1)
        twin.step()


def test_gradients_are_divided_once_however_often_finish_is_called(rank_pools: RankPools) -> None:
    rank_pools(2).run(finish_twice)
