"""Ranks that are at different places learn of it, and ranks further on take part."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ranktest import RankPools
from zero_partition import RanksDisagree, partition
from zero_partition._lanes import lend_lane
from zero_partition._order import RunOrder
from zero_partition._rendezvous import Place, Rendezvous
from zero_partition._tensors_in import tensors_in


def meet(rank: int, places: dict[int, list[Place]]) -> list[str]:
    """Meet at this rank's places, joining whoever is behind, and tell what was done."""
    lane = lend_lane(dist.group.WORLD, torch.device("cpu"))
    rendezvous = Rendezvous(lane, payload_words=2)
    done = []
    try:
        for place in places[rank]:
            while True:
                reports = rendezvous.meet(place, [rank])
                assert [r.payload[0] for r in reports] == list(range(dist.get_world_size()))
                lead = min(report.place for report in reports)
                if lead == place:
                    done.append(place.name)
                    break
                done.append(f"joins {lead.name}")
    except RanksDisagree as error:
        done.append(str(error))
    lane.is_lent = False
    return done


def test_ranks_at_one_place_go_on(rank_pools: RankPools) -> None:
    places = [Place.FLUSH, Place.FINISH]
    for done in rank_pools(3).run(meet, dict.fromkeys(range(3), places)):
        assert done == ["FLUSH", "FINISH"]


def test_a_rank_without_a_backward_joins_those_that_have_one(rank_pools: RankPools) -> None:
    busy, idle = [Place.BACKWARD, Place.FLUSH, Place.FINISH], [Place.FINISH]
    results = rank_pools(3).run(meet, {0: busy, 1: idle, 2: busy})
    assert results[0] == results[2] == ["BACKWARD", "FLUSH", "FINISH"]
    assert results[1] == ["joins BACKWARD", "joins FLUSH", "FINISH"]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_place_that_nobody_may_join_is_an_error_on_every_rank_with_ranks_and_counts(
    rank_pools: RankPools, num_ranks: int
) -> None:
    evaluations = [Place.EVALUATION] * 4
    places = dict.fromkeys(range(num_ranks), evaluations)
    places[0] = [*evaluations[:3], Place.SAVE]
    for done in rank_pools(num_ranks).run(meet, places):
        assert done[:3] == ["EVALUATION"] * 3
        assert "in an evaluation forward (its number 4)" in done[3]
        assert "rank 0 is in save() (its number 1)" in done[3]
        assert "zero.sync()" in done[3]


def wait_alone(rank: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=2))
    lane = lend_lane(group, torch.device("cpu"))
    rendezvous = Rendezvous(lane, payload_words=1)
    rendezvous.meet(Place.EVALUATION)
    if rank == 1:
        time.sleep(4)
        return ""
    try:
        rendezvous.meet(Place.EVALUATION)
    except RanksDisagree as error:
        return str(error)
    return "went on"


def test_a_rank_that_does_not_come_is_named_at_the_groups_time_out(rank_pools: RankPools) -> None:
    waited, _, also = rank_pools(3).run(wait_alone, retire=True)
    for message in (waited, also):
        assert "rank 1 did not come" in message
        assert "in an evaluation forward (its number 2)" in message


def lanes_lent(rank: int) -> tuple[bool, bool, bool]:
    group, device = dist.group.WORLD, torch.device("cpu")
    first = lend_lane(group, device)
    second = lend_lane(group, device)
    first.is_lent = False
    third = lend_lane(group, device)
    first.is_lent = rank == 1  # not free everywhere
    fourth = lend_lane(group, device)
    broken = second
    broken.is_lent, broken.is_broken = False, True
    fifth = lend_lane(group, device)
    for lane in (first, second, third, fourth, fifth):
        lane.is_lent = False
    return third is first, fourth is first, fifth is broken


def test_groups_are_lent_again_only_where_every_rank_has_them_back_unbroken(
    rank_pools: RankPools,
) -> None:
    for again, too_early, broken in rank_pools(2).run(lanes_lent, retire=True):
        assert (again, too_early, broken) == (True, False, False)


def train_in_uneven_groups(rank: int) -> list[float]:
    """Ranks 0 and 1 shard a model while rank 2 is in fewer groups, then all three do."""
    if rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    seen = []
    pair = dist.new_group([1, 2])
    for group in (pair, None):
        if group is pair and rank == 0:
            continue
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        zero = partition(model, stage=3, group=group)
        optimizer = zero.optimizer(torch.optim.SGD, lr=1.0)
        model(torch.full((1, 2), float(rank))).sum().backward()
        optimizer.step()
        seen.append(zero.state_dict()["weight"].mean().item())
    return seen


def test_ranks_that_are_in_different_numbers_of_groups_still_find_each_other(
    rank_pools: RankPools,
) -> None:
    first, second, third = rank_pools(3).run(train_in_uneven_groups, retire=True)
    assert first == [-1.0]  # the mean of 0, 1 and 2
    assert second == third == [-1.5, -1.0]


def test_an_order_is_adopted_once_and_only_if_all_ranks_recorded_the_same() -> None:
    order = RunOrder(3)
    order.begin()
    for unit in (0, 2, 1, 2):
        order.record(unit)
    order.end()
    order.record(1)  # outside the recorded pass
    order.adopt([order.digest(), order.digest() + 1])
    assert (order.forward, order.backward) == ([0, 1, 2], [2, 1, 0])
    order.adopt([order.digest()] * 2)  # too late: it is settled
    assert order.forward == [0, 1, 2]


def test_a_unit_that_runs_twice_is_gathered_twice_and_reduced_once() -> None:
    order = RunOrder(3)
    order.begin()
    for unit in (0, 2, 1, 2):
        order.record(unit)
    order.end()
    order.adopt([order.digest()] * 2)
    assert (order.forward, order.backward) == ([0, 2, 1, 2], [1, 2, 0])


def test_a_record_that_misses_a_unit_is_not_adopted() -> None:
    order = RunOrder(2)
    order.begin()
    order.record(0)
    order.adopt([order.digest()])
    assert order.forward == [0, 1]


class Slotted:
    """Holds a tensor where `vars` does not look."""

    __slots__ = ("cache", "unset")

    def __init__(self, cache: object) -> None:
        self.cache = cache


def test_tensors_are_found_in_containers_objects_and_slots_each_once() -> None:
    a, b, c = torch.ones(1), torch.ones(1), torch.ones(1)
    cycle: list[object] = [a]
    cycle.append(cycle)
    found = tensors_in({"x": [a, (b,)], "y": Slotted({"z": c}), "again": a, "cycle": cycle})
    assert sorted(map(id, found)) == sorted(map(id, (a, b, c)))
    assert tensors_in("text") == tensors_in(None) == tensors_in(3) == []
