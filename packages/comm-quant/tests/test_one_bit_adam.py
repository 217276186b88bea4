"""1-bit Adam: the algorithm in one process, what all ranks share, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from comm_quant import BlockQuant, OneBitAdam, Payload
from comm_quant._kernels.dequantize_ref import dequantize_ref
from comm_quant._kernels.quantize_ref import quantize_ref
from ranktest import RankPools

Shapes: TypeAlias = Sequence[tuple[int, ...]]

SHAPES: st.SearchStrategy[Shapes] = st.sampled_from(
    [[(5, 3), (), (7,)], [(1,)], [(64, 3), (2,)], [(0,), (33,)]]
)
LR, WEIGHT_DECAY = 0.05, 0.1
BETAS = (0.9, 0.95)


def parameters(shapes: Shapes) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(rank: int, step: int, shapes: Shapes) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def optimizer_of(params: list[nn.Parameter], **options: Any) -> OneBitAdam:
    """Two groups where there are parameters for two."""
    groups: list[dict[str, Any]] = [{"params": params[:1]}]
    if params[1:]:
        groups.append({"params": params[1:], "lr": LR / 2, "betas": (0.8, 0.9)})
    return OneBitAdam(groups, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, **options)


def run_steps(
    optimizer: OneBitAdam, params: list[nn.Parameter], rank: int, steps: Sequence[int]
) -> list[bool]:
    done = []
    for step in steps:
        found = gradients(rank, step, shapes_of(params))
        for parameter, gradient in zip(params, found, strict=True):
            parameter.grad = gradient
        done.append(optimizer.step())
    return done


def shapes_of(params: list[nn.Parameter]) -> Shapes:
    return [tuple(p.shape) for p in params]


def train(
    rank: int, shapes: Shapes, num_steps: int, freeze_step: int, block_numel: int
) -> list[Tensor]:
    params = parameters(shapes)
    optimizer = optimizer_of(params, freeze_step=freeze_step, block_numel=block_numel)
    assert all(run_steps(optimizer, params, rank, range(num_steps)))
    return [p.detach() for p in params]


@given(num_ranks=st.integers(1, 4), shapes=SHAPES)
def test_the_warm_up_is_adamw_on_the_mean_of_the_gradients(
    rank_pools: RankPools, num_ranks: int, shapes: Shapes
) -> None:
    params = parameters(shapes)
    groups: list[dict[str, Any]] = [{"params": params[:1]}]
    if params[1:]:
        groups.append({"params": params[1:], "lr": LR / 2, "betas": (0.8, 0.9)})
    adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY)
    for step in range(4):
        for index, parameter in enumerate(params):
            rows = [gradients(rank, step, shapes)[index] for rank in range(num_ranks)]
            total = rows[0].clone()
            for row in rows[1:]:
                total += row
            parameter.grad = total / num_ranks
        adamw.step()
    for found in rank_pools(num_ranks).run(train, shapes, 4, 10, 8):
        for mine, expected in zip(found, params, strict=True):
            assert torch.equal(mine, expected)


def through(x: Tensor, spec: BlockQuant) -> Tensor:
    return dequantize_ref(*quantize_ref(x, spec, seed=0), spec, numel=x.numel())


def simulate(
    shapes: Shapes, *, num_ranks: int, num_steps: int, freeze_step: int, block_numel: int
) -> Tensor:
    """All parameters in one run, after the algorithm of the docstring, rank by rank."""
    params = parameters(shapes)
    numels = [p.numel() for p in params]
    numel = sum(numels)
    spec = BlockQuant(bits=1, block_numel=block_numel)
    slice_numel = -(-spec.num_blocks(numel) // num_ranks) * block_numel
    size = slice_numel * num_ranks
    first = numels[0]
    beta1, beta2, rate = torch.full((3, size), 0.8)
    beta1[:first], beta2[:], beta2[:first] = BETAS[0], 0.9, BETAS[1]
    if not params[1:]:
        beta1[:], beta2[:] = BETAS
    rate[:], rate[:first] = LR / 2, LR
    x = torch.zeros(size)
    x[:numel] = torch.cat([p.detach().flatten() for p in params])
    m, v, moving = torch.zeros(size), torch.zeros(size), torch.ones(size)
    worker = torch.zeros(num_ranks, size)
    server = torch.zeros(size)
    for step in range(num_steps):
        g = torch.zeros(num_ranks, size)
        for rank in range(num_ranks):
            g[rank, :numel] = torch.cat([y.flatten() for y in gradients(rank, step, shapes)])
        if step < freeze_step:
            mean = g.mean(0)
            m, v = beta1 * m + (1 - beta1) * mean, beta2 * v + (1 - beta2) * mean**2
            moving = (v > 0).float()
        else:
            h = (beta1 * m + (1 - beta1) * g + worker) * moving
            sent = torch.stack([through(row, spec) for row in h])
            worker = (h - sent) * moving
            average = sent.mean(0) * moving + server
            m = through(average, spec) * moving
            server = (average - m) * moving
        t, frozen_at = step + 1, min(step + 1, freeze_step)
        root = (v / (1 - beta2**frozen_at)).sqrt() + 1e-8
        x = x * (1 - rate * WEIGHT_DECAY) - rate * (m / (1 - beta1**t)) / root
    return x[:numel]


@given(
    num_ranks=st.integers(1, 4),
    shapes=SHAPES,
    freeze_step=st.integers(1, 4),
    block_numel=st.sampled_from([1, 5, 8, 64]),
)
def test_after_the_freeze_it_is_the_algorithm_of_the_paper(
    rank_pools: RankPools, num_ranks: int, shapes: Shapes, freeze_step: int, block_numel: int
) -> None:
    """Within rounding: the simulation adds in another order. A wrong sign is off by far more."""
    expected = simulate(
        shapes, num_ranks=num_ranks, num_steps=8, freeze_step=freeze_step, block_numel=block_numel
    )
    found = rank_pools(num_ranks).run(train, shapes, 8, freeze_step, block_numel)
    for row in found:
        flat = torch.cat([each.flatten() for each in row])
        torch.testing.assert_close(flat, expected, rtol=1e-4, atol=1e-5)
        for mine, first in zip(row, found[0], strict=True):
            assert torch.equal(mine, first)  # all ranks bitwise


def steps_with_an_overflow(rank: int, freeze_step: int, at: int) -> tuple[list[bool], list[Tensor]]:
    """One rank's gradient is not finite in an extra step."""
    params = parameters([(40,), (3,)])
    optimizer = optimizer_of(params, freeze_step=freeze_step, block_numel=8)
    done = []
    for step in range(6):
        if step == at:
            for parameter in params:
                parameter.grad = torch.ones_like(parameter)
            if rank == 1:
                params[1].grad = torch.full((3,), torch.inf)
            done.append(optimizer.step())
        run_steps(optimizer, params, rank, [step])
    return done, [p.detach() for p in params]


@pytest.mark.parametrize("at", [1, 4])
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any(
    rank_pools: RankPools, at: int
) -> None:
    expected = rank_pools(3).run(train, [(40,), (3,)], 6, 3, 8)
    for rank, (done, found) in enumerate(rank_pools(3).run(steps_with_an_overflow, 3, at)):
        assert done == [False]
        for mine, wanted in zip(found, expected[rank], strict=True):
            assert torch.equal(mine, wanted)


def resumed(rank: int, at: int) -> list[Tensor]:
    params = parameters([(40,), (3,)])
    optimizer = optimizer_of(params, freeze_step=3, block_numel=8)
    run_steps(optimizer, params, rank, range(at))
    saved = optimizer.state_dict()
    run_steps(optimizer, params, rank, [17])  # must leave no trace in what was saved
    values = parameters([(40,), (3,)])
    again = optimizer_of(values, freeze_step=3, block_numel=8)
    run_steps(again, values, rank, [18])
    reference = parameters([(40,), (3,)])
    run_steps(optimizer_of(reference, freeze_step=3, block_numel=8), reference, rank, range(at))
    for mine, wanted in zip(values, reference, strict=True):
        mine.data.copy_(wanted)
    again.load_state_dict(saved)
    run_steps(again, values, rank, range(at, 8))
    return [p.detach() for p in values]


@pytest.mark.parametrize("at", [2, 3, 5])
def test_a_saved_state_goes_on_bit_by_bit(rank_pools: RankPools, at: int) -> None:
    expected = rank_pools(2).run(train, [(40,), (3,)], 8, 3, 8)
    for found, wanted in zip(rank_pools(2).run(resumed, at), expected, strict=True):
        for mine, each in zip(found, wanted, strict=True):
            assert torch.equal(mine, each)


def state_after(rank: int, num_steps: int) -> dict[str, Any]:
    params = parameters([(40,), (3,)])
    optimizer = optimizer_of(params, freeze_step=2, block_numel=8)
    run_steps(optimizer, params, rank, range(num_steps))
    return optimizer.state_dict()


def warnings_of_loading(rank: int, saved: dict[str, Any]) -> list[str]:
    params = parameters([(40,), (3,)])
    optimizer = optimizer_of(params, freeze_step=2, block_numel=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(saved)
    run_steps(optimizer, params, rank, [9])
    return [str(each.message) for each in caught]


def test_errors_of_another_number_of_ranks_begin_at_zero_and_it_is_said(
    rank_pools: RankPools,
) -> None:
    saved = rank_pools(2).run(state_after, 5)[0]
    for told in rank_pools(3).run(warnings_of_loading, saved):
        assert len(told) == 1
        assert "the saved errors are those of 2 ranks" in told[0]
        assert "this group has 3; they begin at zero again" in told[0]
    early = rank_pools(2).run(state_after, 1)[0]  # there are no errors yet
    assert rank_pools(3).run(warnings_of_loading, early) == [[], [], []]


def bytes_sent(rank: int, dtype: torch.dtype) -> tuple[int, int, int]:
    payload = Payload()
    params = [nn.Parameter(torch.randn(4096 * 6))]
    optimizer = OneBitAdam(params, freeze_step=1, warmup_dtype=dtype, payload=payload)
    run_steps(optimizer, params, rank, [0])
    warm = payload.total_bytes()
    run_steps(optimizer, params, rank, [1])
    return warm, payload.total_bytes() - warm, optimizer.state_bytes


def test_after_the_freeze_a_bit_an_element_travels_each_way(rank_pools: RankPools) -> None:
    numel = 4096 * 6
    for warm, after, held in rank_pools(3).run(bytes_sent, torch.bfloat16):
        assert warm == 2 * 2 * numel * 2 // 3  # two bytes, to and fro, to two thirds of the ranks
        blocks = numel // 2048
        assert after == 2 * (numel // 8 + 4 * blocks) * 2 // 3
        assert held == 4 * numel * 4 + 4 * numel // 3


def steps_without_gradient(rank: int) -> tuple[Tensor, Tensor]:
    """Half of a parameter gets its first gradient after the freeze."""
    parameter = nn.Parameter(torch.ones(16))
    optimizer = OneBitAdam([parameter], lr=0.1, freeze_step=2, block_numel=16)
    for step in range(6):
        gradient = torch.ones(16)
        if step < 3:
            gradient[8:] = 0.0
        parameter.grad = gradient * (rank + 1)
        optimizer.step()
    parameter.grad = None
    assert optimizer.step()  # counts as zero
    return parameter.detach()[:8], parameter.detach()[8:]


def test_what_had_no_gradient_before_the_freeze_stays_where_it_is(rank_pools: RankPools) -> None:
    for moved, still in rank_pools(2).run(steps_without_gradient):
        assert bool((moved < 0.7).all())
        assert torch.equal(still, torch.ones(8))


def other_settings(rank: int) -> str:
    with pytest.raises(ValueError, match="all ranks need the same settings") as caught:
        OneBitAdam(parameters([(3,)]), freeze_step=5 + rank)
    return str(caught.value)


def test_ranks_with_other_settings_are_refused_on_all(rank_pools: RankPools) -> None:
    for told in rank_pools(2).run(other_settings):
        assert "rank 0 has 3 parameters, freeze_step=5" in told
        assert "rank 1 has 3 parameters, freeze_step=6" in told


def refusals(rank: int) -> None:
    fine = parameters([(3,)])
    for options, words in (
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"eps": float("nan")}, "eps must be at least 0, got nan"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers from 0 to below 1"),
        ({"freeze_step": 0}, "freeze_step must be a whole number from 1 on, got 0"),
        ({"freeze_step": 0.5}, "freeze_step must be a whole number from 1 on, got 0.5"),
        ({"warmup_dtype": torch.int8}, "warmup_dtype must be float32, bfloat16 or float16"),
        ({"block_numel": 0}, "block_numel must be a whole number from 1 on, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            OneBitAdam(fine, **options)
    with pytest.raises(TypeError, match=r"must be float32, got torch.bfloat16 of shape \(2,\)"):
        OneBitAdam([nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])
    with pytest.raises(ValueError, match="no parameter is trainable"):
        OneBitAdam([nn.Parameter(torch.zeros(2), requires_grad=False)])
    optimizer = OneBitAdam(fine)
    with pytest.raises(ValueError, match="give all parameter groups at once"):
        optimizer.add_param_group({"params": parameters([(2,)])})
    with pytest.raises(TypeError, match="without a closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match='has no "one_bit"; it is another optimizer'):
        optimizer.load_state_dict(torch.optim.Adam(fine).state_dict())
    other = OneBitAdam(parameters([(4,)])).state_dict()
    with pytest.raises(ValueError, match="that of 4 parameters, here are 3"):
        optimizer.load_state_dict(other)


def test_what_does_not_fit_is_refused(rank_pools: RankPools) -> None:
    rank_pools(1).run(refusals)


def test_without_a_group_it_says_so() -> None:
    with pytest.raises(ValueError, match=r"torch.distributed is not initialised"):
        OneBitAdam(parameters([(3,)]))
