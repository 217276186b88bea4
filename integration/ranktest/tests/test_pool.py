"""A pool runs functions on ranks, and says what happened on each of them when one fails."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ranktest import RankError, RankPool, RankPools, subgroup


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks for the tests in which one fails."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def impatient_pair() -> Iterator[RankPool]:
    """Two ranks whose collectives soon give up."""
    with RankPool(2, collective_timeout_s=3.0) as pool:
        yield pool


def rank_and_count(rank: int) -> tuple[int, int, int]:
    return rank, dist.get_rank(), dist.get_world_size()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_results_come_in_rank_order(rank_pools: RankPools, num_ranks: int) -> None:
    results = rank_pools(num_ranks).run(rank_and_count)
    assert results == [(rank, rank, num_ranks) for rank in range(num_ranks)]


def slowest_first(rank: int, names: list[str]) -> str:
    time.sleep(0.2 * (len(names) - rank))
    return names[rank]


def test_the_order_of_results_is_not_the_order_of_arrival(rank_pools: RankPools) -> None:
    assert rank_pools(3).run(slowest_first, ["a", "b", "c"]) == ["a", "b", "c"]


def process_id(_rank: int) -> int:
    return os.getpid()


def test_a_pool_keeps_its_processes(rank_pools: RankPools) -> None:
    first = rank_pools(2).run(process_id)
    assert rank_pools(2).run(process_id) == first
    assert len({*first, os.getpid()}) == 3


def total(rank: int, x: Tensor) -> Tensor:
    x = x * (rank + 1)
    dist.all_reduce(x)
    return x


@given(values=st.lists(st.integers(-1000, 1000)), num_ranks=st.integers(1, 4))
def test_tensors_travel_both_ways(rank_pools: RankPools, values: list[int], num_ranks: int) -> None:
    x = torch.tensor(values, dtype=torch.int64)
    for result in rank_pools(num_ranks).run(total, x):
        assert torch.equal(result, x * (num_ranks * (num_ranks + 1) // 2))


OPEN_FILES = Path("/proc/self/fd")


def open_files(_rank: int, x: Tensor) -> tuple[Tensor, int]:
    return x, len(list(OPEN_FILES.iterdir()))


@pytest.mark.skipif(not OPEN_FILES.exists(), reason="counts open files in /proc")
def test_tensors_travel_by_value_and_hold_no_file_open(rank_pools: RankPools) -> None:
    x = torch.arange(5)
    kept = [rank_pools(2).run(open_files, x) for _ in range(20)]
    assert {num_files for results in kept for _, num_files in results[:1]} == {kept[0][0][1]}
    kept[0][0][0].zero_()
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert not any(result.is_shared() for results in kept for result, _ in results)


def settings(_rank: int) -> tuple[int, str, bool]:
    return (
        torch.get_num_threads(),
        os.environ["OMP_NUM_THREADS"],
        torch.distributed.is_initialized(),
    )


def test_a_rank_has_one_thread(rank_pools: RankPools) -> None:
    assert rank_pools(2).run(settings) == [(1, "1", True)] * 2


def draw(_rank: int) -> tuple[float, float]:
    return random.random(), float(torch.rand(()))


def test_random_numbers_differ_by_rank_and_not_by_run(rank_pools: RankPools) -> None:
    first = rank_pools(2).run(draw)
    assert rank_pools(2).run(draw) == first
    assert first[0] != first[1]


def sums_of_parts(rank: int) -> tuple[float, int]:
    low, high = subgroup(0, 1), subgroup(2)
    group = high if low is None else low
    x = torch.tensor(float(rank + 1))
    dist.all_reduce(x, group=group)
    return float(x), id(group)


def test_a_subgroup_reduces_over_its_members_and_is_made_once(rank_pools: RankPools) -> None:
    first = rank_pools(3).run(sums_of_parts)
    assert [value for value, _ in first] == [3.0, 3.0, 3.0]
    assert rank_pools(3).run(sums_of_parts) == first


def fail_on(rank: int, ranks: tuple[int, ...]) -> int:
    if rank in ranks:
        message = f"no luck on {rank}"
        raise ValueError(message)
    return rank


def test_a_raise_carries_the_rank_and_its_traceback(pair: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 raised ValueError: no luck on 1") as caught:
        pair.run(fail_on, (1,))
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (1, "raised")
    assert "in fail_on" in failure.detail
    assert "no luck on 1" in str(caught.value)


def test_every_rank_that_raised_is_reported(pair: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        pair.run(fail_on, (0, 1))
    assert [failure.rank for failure in caught.value.failures] == [0, 1]
    assert "no luck on 0" in str(caught.value)
    assert "no luck on 1" in str(caught.value)


def test_ranks_that_answered_live_on_in_a_new_group(pair: RankPool) -> None:
    before = pair.run(process_id)
    with pytest.raises(RankError):
        pair.run(fail_on, (0,))
    assert pair.run(total, torch.tensor(1))[0].item() == 3
    assert pair.run(process_id) == before


def leave_group_then_fail(_rank: int) -> None:
    dist.destroy_process_group()
    raise ValueError("left")


def test_a_failed_run_leaves_no_group_behind(pair: RankPool) -> None:
    with pytest.raises(RankError, match="left"):
        pair.run(leave_group_then_fail)
    assert pair.run(total, torch.tensor(1))[0].item() == 3


def hang_on(rank: int, ranks: tuple[int, ...]) -> None:
    if rank in ranks:
        wait_for_godot()


def wait_for_godot() -> None:
    time.sleep(3600)


def test_a_hang_names_the_silent_ranks_and_where_they_are(pair: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank 1 was silent for 3 s") as caught:
        pair.run(hang_on, (1,), limit_s=3.0)
    (failure,) = caught.value.failures
    assert (failure.rank, failure.kind) == (1, "silent")
    assert "wait_for_godot" in failure.detail
    assert pair.run(rank_and_count) == [(0, 0, 2), (1, 1, 2)]


def raise_or_hang(rank: int) -> None:
    if rank == 0:
        wait_for_godot()
    raise ValueError("first")


def test_the_rank_that_raised_comes_before_the_one_that_waits(pair: RankPool) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 raised ValueError: first; rank 0 was") as caught:
        pair.run(raise_or_hang)
    assert time.monotonic() - start_s < pair.limit_s
    assert [failure.kind for failure in caught.value.failures] == ["silent", "raised"]
    assert "wait_for_godot" in caught.value.failures[0].detail


def leave_on(rank: int, exit_code: int) -> int:
    if rank == 1:
        os._exit(exit_code)
    return rank


def test_a_rank_that_exits_is_reported_with_its_code(pair: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 3") as caught:
        pair.run(leave_on, 3)
    assert [failure.kind for failure in caught.value.failures] == ["died"]
    assert pair.run(rank_and_count) == [(0, 0, 2), (1, 1, 2)]


def kill_self(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_rank_that_crashes_is_reported_with_its_stack(pair: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 died of SIGSEGV") as caught:
        pair.run(kill_self)
    assert "kill_self" in caught.value.failures[0].detail


def reduce_without_peer(rank: int) -> str:
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(3))
    return "noticed"


def test_peers_of_a_dead_rank_get_an_error(pair: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code 0") as caught:
        pair.run(reduce_without_peer)
    assert [failure.rank for failure in caught.value.failures] == [1]


def reduce_on(rank: int, ranks: tuple[int, ...]) -> None:
    if rank in ranks:
        dist.all_reduce(torch.ones(3))


def test_a_collective_that_hangs_raises_before_the_limit(impatient_pair: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 raised RuntimeError") as caught:
        impatient_pair.run(reduce_on, (0,))
    assert "in reduce_on" in caught.value.failures[0].detail


def reduce_and_forget(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True)


def test_a_collective_that_one_rank_left_behind_fails_its_own_run(impatient_pair: RankPool) -> None:
    with pytest.raises(RankError, match="the barrier after reduce_and_forget"):
        impatient_pair.run(reduce_and_forget)
    assert impatient_pair.run(total, torch.tensor(1))[0].item() == 3


def time_out(rank: int) -> str:
    if rank == 0:
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(3))
    return "caught"


def test_a_group_that_is_broken_on_purpose_is_retired(impatient_pair: RankPool) -> None:
    before = impatient_pair.run(process_id)
    assert impatient_pair.run(time_out, retire=True) == ["caught", "caught"]
    assert not set(impatient_pair.run(process_id)) & set(before)


def warn(_rank: int) -> None:
    warnings.warn("careful", stacklevel=1)


def test_a_warning_on_a_rank_is_an_error(pair: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 raised UserWarning: careful"):
        pair.run(warn)


def unpicklable(_rank: int) -> object:
    return lambda: None


def test_a_result_that_cannot_travel_is_reported(pair: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 raised AttributeError: Can't pickle local object"):
        pair.run(unpicklable)


def test_a_function_that_cannot_travel_is_refused(rank_pools: RankPools) -> None:
    with pytest.raises(TypeError, match="define the function at module level"):
        rank_pools(2).run(lambda rank: rank)


def test_a_slow_start_has_a_limit_of_its_own() -> None:
    with (
        RankPool(2, start_limit_s=0.0) as pool,
        pytest.raises(RankError, match=r"starting 2 ranks: rank 0 was silent for 0 s"),
    ):
        pool.run(process_id)


def test_a_pool_has_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        RankPool(0)


def test_a_closed_pool_starts_again(pair: RankPool) -> None:
    before = pair.run(process_id)
    pair.close()
    assert not set(pair.run(process_id)) & set(before)
