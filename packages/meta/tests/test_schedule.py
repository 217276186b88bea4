"""Learning rates update by update, against DeepSpeed's values written out here."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait._schedule import Schedule
from plait._schedule_warmups import Rate, WarmupCosineLR, WarmupDecayLR, WarmupLR, WarmupType

KINDS: list[WarmupType] = ["log", "linear"]


def rates(rate: Rate, count: int, lr: float = 1.0) -> list[float]:
    return [rate(step, lr) for step in range(count)]


def test_a_linear_warm_up_rises_by_equal_steps_from_the_minimum_and_then_stays() -> None:
    rate = WarmupLR(warmup_min_lr=0.2, warmup_num_steps=4, warmup_type="linear")
    assert rates(rate, 7) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0])


def test_a_log_warm_up_rises_with_the_logarithm() -> None:
    rate = WarmupLR(warmup_num_steps=5)
    expected = [math.log(step + 1) / math.log(5) for step in range(5)] + [1.0]
    assert rates(rate, 6) == pytest.approx(expected)
    assert rate(0, 1.0) == 0.0


def test_the_optimizer_s_rate_is_the_top_unless_one_is_given() -> None:
    assert WarmupLR(warmup_num_steps=2)(9, 0.3) == 0.3
    assert WarmupLR(warmup_num_steps=2, warmup_max_lr=0.7)(9, 0.3) == 0.7
    assert WarmupDecayLR(total_num_steps=9, warmup_num_steps=2)(2, 0.3) == 0.3


def test_one_update_of_warm_up_counts_as_two() -> None:
    one, two = (WarmupLR(warmup_num_steps=n, warmup_type="linear") for n in (1, 2))
    assert rates(one, 4) == rates(two, 4) == [0.0, 0.5, 1.0, 1.0]


def test_the_decay_falls_by_equal_steps_to_the_minimum_at_the_total_and_stays() -> None:
    rate = WarmupDecayLR(total_num_steps=6, warmup_num_steps=2, warmup_type="linear")
    assert rates(rate, 9) == pytest.approx([0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0])
    rate = WarmupDecayLR(
        total_num_steps=4, warmup_min_lr=0.2, warmup_num_steps=2, warmup_type="linear"
    )
    assert rates(rate, 6) == pytest.approx([0.2, 0.6, 1.0, 0.6, 0.2, 0.2])


def test_the_cosine_begins_one_step_down_and_ends_at_its_share() -> None:
    rate = WarmupCosineLR(
        total_num_steps=6, warmup_num_steps=2, warmup_type="linear", cos_min_ratio=0.1
    )
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    assert rates(rate, 8, lr=2.0) == pytest.approx([0.0, 1.0, *(2 * c for c in cosine), 0.2, 0.2])


def test_the_cosine_s_warm_up_begins_at_its_share() -> None:
    rate = WarmupCosineLR(
        total_num_steps=9, warmup_num_steps=4, warmup_type="linear", warmup_min_ratio=0.5
    )
    assert rates(rate, 4) == pytest.approx([0.5, 0.625, 0.75, 0.875])


def test_a_total_within_the_warm_up_divides_by_nothing() -> None:
    assert WarmupCosineLR(total_num_steps=2, warmup_num_steps=8)(8, 1.0) == pytest.approx(1e-4)
    assert WarmupDecayLR(total_num_steps=2, warmup_num_steps=8)(8, 1.0) == 0.0


@given(
    total=st.integers(1, 60),
    warmup=st.integers(1, 60),
    kind=st.sampled_from(KINDS),
    step=st.integers(0, 90),
)
def test_rates_stay_between_zero_and_the_optimizer_s(
    total: int, warmup: int, kind: WarmupType, step: int
) -> None:
    drawn: list[Rate] = [
        cls(total_num_steps=total, warmup_num_steps=warmup, warmup_type=kind)
        for cls in (WarmupDecayLR, WarmupCosineLR)
    ]
    drawn.append(WarmupLR(warmup_num_steps=warmup, warmup_type=kind))
    for rate in drawn:
        assert 0.0 <= rate(step, 0.5) <= 0.5 + 1e-12


def test_update_k_runs_with_the_rate_of_k() -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    rate = WarmupLR(warmup_num_steps=10, warmup_type="linear")
    schedule = Schedule(optimizer, rate)
    for step in range(12):
        before = weight.item()
        weight.grad = torch.ones(1)
        optimizer.step()
        assert before - weight.item() == pytest.approx(rate(step, 0.5), rel=1e-4, abs=1e-6)
        schedule.step()
        assert schedule.get_last_lr() == [rate(step + 1, 0.5)]


def test_every_group_keeps_its_own_base() -> None:
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (1.0, 0.1)]
    schedule = Schedule(torch.optim.SGD(groups), WarmupLR(warmup_num_steps=2, warmup_type="linear"))
    schedule.step()
    assert schedule.get_last_lr() == [0.5, 0.05]


def test_seeking_equals_stepping_and_no_rate_is_a_constant() -> None:
    rate = WarmupCosineLR(total_num_steps=20, warmup_num_steps=3)
    stepped, sought = (Schedule(torch.optim.SGD([torch.zeros(1)], lr=0.1), rate) for _ in range(2))
    for _ in range(7):
        stepped.step()
    sought.seek(7)
    assert sought.get_last_lr() == stepped.get_last_lr()
    constant = Schedule(torch.optim.SGD([torch.zeros(1)], lr=0.1), None)
    constant.step()
    assert constant.get_last_lr() == [0.1]
