"""The five schedules, value by value, against those of DeepSpeed's own classes.

`data/deepspeed_schedules.json` was written by running the classes of DeepSpeed 0.19.8
(``deepspeed/runtime/lr_schedules.py``) on an AdamW with two parameter groups, lr 0.5 and 0.05,
betas 0.7 and 0.95. A row is what the optimizer holds before each call of ``step()``: for each group
the learning rate and the first of its betas. With that DeepSpeed's engine runs update 0, 1, ...

Its warm-ups spend update 0 on the state before they begin, so there row k + 1 is the schedule at k.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait._config import SchedulerConfig
from plait._schedule import Schedule
from plait._schedule_cycles import LRRangeTest, OneCycle
from plait._schedule_warmups import WarmupLR
from plait._schedulers import SCHEDULERS, check_scheduler, scheduler_rate

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "deepspeed_schedules.json").read_text(encoding="utf-8")
)
LRS = (0.5, 0.05)


def adamw() -> torch.optim.AdamW:
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in LRS]
    return torch.optim.AdamW(groups, betas=(0.7, 0.95))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["type"])
def test_every_update_runs_with_deepspeed_s_rates_and_momenta(case: dict[str, Any]) -> None:
    checked = check_scheduler(case["type"], case["params"], {})
    assert not checked.problems
    optimizer = adamw()
    config = SchedulerConfig(type=case["type"], params=checked.params)
    schedule = Schedule(optimizer, scheduler_rate(config))
    first = 1 if case["type"].startswith("Warmup") else 0
    for row in case["rows"][first:]:
        rates = [rate for rate, _ in row]
        assert schedule.get_last_lr() == pytest.approx(rates, rel=1e-12, abs=1e-15)
        momenta = [group["betas"][0] for group in optimizer.param_groups]
        assert momenta == pytest.approx([momentum for _, momentum in row], rel=1e-12)
        schedule.step()


def test_the_table_has_all_schedules() -> None:
    assert {case["type"] for case in CASES} == set(SCHEDULERS)


def test_the_second_beta_stays_the_optimizer_s() -> None:
    optimizer = adamw()
    schedule = Schedule(optimizer, OneCycle(cycle_min_lr=0.1, cycle_max_lr=1.0))
    schedule.step()
    assert [group["betas"][1] for group in optimizer.param_groups] == [0.95, 0.95]


def test_an_optimizer_without_betas_keeps_its_momentum() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.5)
    Schedule(optimizer, OneCycle(cycle_min_lr=0.1, cycle_max_lr=1.0)).step()
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_a_momentum_that_reaches_one_stops_the_schedule_by_name() -> None:
    rate = OneCycle(
        cycle_min_lr=0.1,
        cycle_max_lr=1.0,
        cycle_first_step_size=5,
        decay_step_size=10,
        decay_mom_rate=0.1,
    )
    assert rate.last_step() == 21
    schedule = Schedule(adamw(), rate)
    schedule.seek(21)
    with pytest.raises(ValueError, match="decay_mom_rate: at update 22 the momentum would"):
        schedule.step()
    assert OneCycle(cycle_min_lr=0.1, cycle_max_lr=1.0).last_step() is None


def test_a_list_for_another_count_of_groups_is_refused_with_its_name() -> None:
    with pytest.raises(ValueError, match="warmup_max_lr: expected 2 numbers, one for each para"):
        Schedule(adamw(), WarmupLR(warmup_max_lr=(1.0, 2.0, 3.0)))


def test_a_schedule_goes_on_from_its_state() -> None:
    rate = LRRangeTest(lr_range_test_step_size=5)
    before, after = Schedule(adamw(), rate), Schedule(adamw(), rate)
    for _ in range(7):
        before.step()
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.get_last_lr() == before.get_last_lr()
    after.step()
    before.step()
    assert after.get_last_lr() == before.get_last_lr()


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"num_steps": "7", "base_lrs": []}, TypeError),
        ({"num_steps": 7, "base_lrs": []}, ValueError),
    ],
)
def test_a_state_that_is_not_this_schedule_s_is_refused(
    state: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Schedule(adamw(), None).load_state_dict(state)


@given(
    first=st.integers(1, 20),
    second=st.none() | st.integers(0, 20),
    stairs=st.integers(0, 5),
    decay=st.integers(0, 5),
    step=st.integers(0, 60),
)
def test_one_cycle_stays_between_its_bounds_and_ends_where_it_began(
    first: int, second: int | None, stairs: int, decay: int, step: int
) -> None:
    rate = OneCycle(
        cycle_min_lr=0.1,
        cycle_max_lr=0.9,
        cycle_first_step_size=first,
        cycle_second_step_size=second,
        cycle_first_stair_count=stairs,
        decay_step_size=decay,
        decay_lr_rate=0.5,
    )
    end = first + (first if second is None else second)
    assert 0.0 < rate(step, 7.0) <= 0.9 + 1e-12
    assert rate(0, 7.0) == rate(end, 7.0) == pytest.approx(0.1)
    if second != 0:
        assert rate(first, 7.0) == pytest.approx(0.9)
    momentum = rate.momentum(step)
    assert momentum is not None
    assert 0.8 - 1e-12 <= momentum <= 0.9 + 1e-12
