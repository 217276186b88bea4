"""Memory that ranks share: it is reserved, leaves nothing behind, and no rank hangs in it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ranktest import RankPools
from zero_partition import (
    Hosts,
    HostsWire,
    OrderError,
    RanksDisagree,
    RestingError,
    SharedMemoryWire,
    TorchWire,
    partition,
)
from zero_partition._choose_wire import plan_hosts
from zero_partition._host_memory import HostMemory, NoRegion, map_region, this_host_memory
from zero_partition._shared_wire import plan_slot_bytes

MORE_THAN_THERE_IS = 2**46


def model_of(rank: int) -> nn.Sequential:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


# Which wire.


def chosen(_: int, stage: int) -> tuple[str, bool]:
    zero = partition(model_of(0), stage=stage)
    return type(zero._transport.wire).__name__, zero._segments[0].is_shared


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_of_one_host_share_memory_without_being_asked(
    rank_pools: RankPools, stage: int
) -> None:
    for name, is_shared in rank_pools(3).run(chosen, stage):
        assert (name, is_shared) == ("SharedMemoryWire", stage == 3)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_ranks_are_put_together_by_the_memory_they_see(places: list[int]) -> None:
    found = [
        HostMemory(None, "none") if place == 3 else HostMemory(("boot", place, 0))
        for place in places
    ]
    hosts = plan_hosts(found)
    assert sorted(rank for members in hosts.members for rank in members) == list(range(len(places)))
    for rank, place in enumerate(places):
        together = hosts.of(rank)
        assert list(together) == sorted(together)
        alone = place == 3
        assert together == (rank,) if alone else {places[r] for r in together} == {place}
        assert alone or len(together) == places.count(place)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_every_row_enters_every_host_once(places: list[int]) -> None:
    hosts = plan_hosts([HostMemory(("boot", place, 0)) for place in places])
    for members in hosts.members:
        held = [row for member in members for row in hosts.held(member)]
        assert sorted(held) == list(range(len(places)))


@pytest.mark.parametrize(
    ("machine", "folder", "reason"),
    [
        ("aarch64", "/dev/shm", "the memory order of x86, this is aarch64"),
        ("x86_64", "/dev/no-such-folder", "there is no /dev/no-such-folder here"),
    ],
)
def test_a_host_without_usable_memory_says_why(machine: str, folder: str, reason: str) -> None:
    found = this_host_memory(machine=machine, folder=Path(folder))
    assert found.identity is None
    assert reason in found.reason


@pytest.mark.parametrize("parameter_bytes", [0, 1, 40_000_000, 10**15])
def test_rings_are_small_beside_the_model(parameter_bytes: int) -> None:
    slot_bytes = plan_slot_bytes(parameter_bytes)
    assert slot_bytes % 64 == 0
    assert 2 * slot_bytes <= max(parameter_bytes / 300, 2**16)
    SharedMemoryWire(slot_bytes=slot_bytes)


@pytest.mark.parametrize("slot_bytes", [0, -64, 63, 100])
def test_slots_that_no_message_fits_are_refused(slot_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"positive multiple of 64, got {slot_bytes}"):
        SharedMemoryWire(slot_bytes=slot_bytes)


def with_hosts(_: int, members: tuple[tuple[int, ...], ...]) -> str:
    with pytest.raises(ValueError, match="each rank of 0 to 2 once") as caught:
        partition(model_of(0), stage=1, wire=HostsWire(Hosts(members)))
    return str(caught.value)


def test_hosts_that_leave_ranks_out_are_refused(rank_pools: RankPools) -> None:
    rank_pools(3).run(with_hosts, ((0, 1),), retire=True)


# Too little of it.


def without_rings(rank: int) -> float:
    wire = SharedMemoryWire(slot_bytes=MORE_THAN_THERE_IS)
    if rank == 0:
        with pytest.warns(RuntimeWarning, match=r"through gloo .* in /dev/shm, of .*--shm-size"):
            wire.open(dist.group.WORLD)
    else:
        wire.open(dist.group.WORLD)
    out = torch.zeros(2)
    given = torch.full((4,), float(rank + 1))
    wire.reduce_scatter(out, given, group=dist.group.WORLD).wait()
    return float(out.sum())


def test_too_little_memory_for_rings_is_said_and_gloo_used(rank_pools: RankPools) -> None:
    assert rank_pools(2).run(without_rings) == [6.0, 6.0]


def without_shared_parameters(rank: int) -> bool:
    wire = SharedMemoryWire()
    if rank == 0:
        with pytest.warns(RuntimeWarning, match=r"copied between ranks .* in /dev/shm"):
            found = wire.shared_buffer(MORE_THAN_THERE_IS, torch.float32, group=dist.group.WORLD)
    else:
        found = wire.shared_buffer(MORE_THAN_THERE_IS, torch.float32, group=dist.group.WORLD)
    again = wire.exposed_buffer(8, torch.float32, group=dist.group.WORLD)  # said once is enough
    return found is None and again is None


def test_too_little_memory_for_buffers_is_said_once(rank_pools: RankPools) -> None:
    assert rank_pools(2).run(without_shared_parameters) == [True, True]


class Copying(SharedMemoryWire):
    """Rings, but no memory for buffers."""

    def shared_buffer(self, numel: int, dtype: torch.dtype, *, group: dist.ProcessGroup) -> None:
        """None."""

    exposed_buffer = shared_buffer


def three_steps(rank: int, kind: str, stage: int) -> list[torch.Tensor]:
    model = model_of(0)
    wire = {"shared": SharedMemoryWire(), "torch": TorchWire(), "copying": Copying()}[kind]
    zero = partition(model, stage=stage, wire=wire)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=0.1)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(zero.state_dict().values())


def ask_for_most(_: int) -> str:
    found = os.statvfs("/dev/shm")
    with pytest.raises(NoRegion) as caught:
        map_region(found.f_bavail * found.f_frsize * 6 // 10, dist.group.WORLD)
    return str(caught.value)


def test_more_than_half_of_what_is_free_is_not_taken(rank_pools: RankPools) -> None:
    for said in rank_pools(2).run(ask_for_most):
        assert "is more than half of what is free there" in said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_buffers_of_ones_own_leave_the_same_bits(rank_pools: RankPools, stage: int) -> None:
    kinds = ("shared", "torch", "copying")
    found = {kind: rank_pools(3).run(three_steps, kind, stage) for kind in kinds}
    for kind in ("torch", "copying"):
        for mine, theirs in zip(found["shared"], found[kind], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


# Nothing stays behind, nobody hangs.


def region_on_disk(_: int) -> tuple[int, int, bool]:
    region = map_region(500_000, dist.group.WORLD)
    found = os.fstat(region.file)
    os.close(region.file)
    return found.st_nlink, found.st_size, found.st_blocks * 512 >= found.st_size


def test_a_region_is_reserved_and_has_no_name_that_a_killed_rank_could_leave(
    rank_pools: RankPools,
) -> None:
    assert rank_pools(3).run(region_on_disk) == [(0, 500_000, True)] * 3


def wait_for_a_dead_rank(rank: int) -> str:
    wire = SharedMemoryWire()
    wire.open(dist.group.WORLD)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out = torch.zeros(3)
    pending = wire.all_gather(out, out[rank : rank + 1].clone(), group=dist.group.WORLD)
    start = time.monotonic()
    with pytest.raises(RanksDisagree, match="rank 1 ended during a transfer") as caught:
        pending.wait()
    assert time.monotonic() - start < 5
    return str(caught.value)


def test_a_rank_that_dies_in_a_transfer_is_named_at_once(rank_pools: RankPools) -> None:
    with pytest.raises(Exception, match="rank 1") as caught:
        rank_pools(3).run(wait_for_a_dead_rank)
    assert "rank 0" not in str(caught.value)
    assert "rank 2" not in str(caught.value)


def wait_for_a_late_rank(rank: int) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    wire = SharedMemoryWire()
    wire.open(group)
    if rank == 1:
        time.sleep(3)
        return ""
    out = torch.zeros(2)
    with pytest.raises(RanksDisagree) as caught:
        wire.all_gather(out, out[:1], group=group).wait()
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named_at_the_time_out(rank_pools: RankPools) -> None:
    said, _ = rank_pools(2).run(wait_for_a_late_rank, retire=True)
    assert said.startswith("rank 0 has waited 1 s in a transfer for rank 1;")


# Buffers that others read where they are.


def overwrite_when_waited(rank: int, late: int, numels: list[int]) -> list[torch.Tensor]:
    """Transfers in place and through rings; what was handed over is overwritten at once."""
    wire, group, num_ranks = SharedMemoryWire(slot_bytes=256), dist.group.WORLD, 3
    buffers = [wire.exposed_buffer(n * num_ranks, torch.float32, group=group) for n in numels]
    found = []
    for step in range(3):
        for numel, exposed in zip(numels, buffers, strict=True):
            if exposed is None:  # nothing to expose
                continue
            half = numel // 2
            exposed[: half * num_ranks].fill_(rank + step)
            exposed[half * num_ranks :].fill_(10 * rank + step)
            summed = torch.zeros(half)
            out = exposed[half * num_ranks :]
            plain = torch.full((num_ranks * 5,), float(rank))
            plain_sum = torch.zeros(5)
            if rank == late:
                time.sleep(0.02)
            pending = [
                wire.reduce_scatter(summed, exposed[: half * num_ranks], group=group),
                wire.reduce_scatter(plain_sum, plain, group=group),
                wire.all_gather(out, out.view(num_ranks, -1)[rank], group=group),
            ]
            pending[0].wait()
            exposed[: half * num_ranks].fill_(float("nan"))
            pending[2].wait()
            found.append(torch.cat([summed, out.clone(), plain_sum]))
            out.fill_(float("nan"))
            pending[1].wait()
            found[-1][-5:] = plain_sum
    return found


@given(st.integers(0, 2), st.lists(st.integers(0, 700), min_size=1, max_size=3))
def test_a_buffer_may_be_overwritten_when_its_transfer_has_been_waited_for(
    rank_pools: RankPools, late: int, numels: list[int]
) -> None:
    for found in rank_pools(3).run(overwrite_when_waited, late, numels):
        numbers = [(step, n) for step in range(3) for n in numels if n]
        for (step, numel), got in zip(numbers, found, strict=True):
            half, rest = numel // 2, numel - numel // 2
            gathered = [torch.full((rest,), 10.0 * r + step) for r in range(3)]
            expected = [torch.full((half,), 3.0 + 3 * step), *gathered, torch.full((5,), 3.0)]
            assert torch.equal(got, torch.cat(expected))


def exposures(_: int, stage: int) -> tuple[bool, bool]:
    model = model_of(0)
    zero = partition(model, stage=stage)
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
    for _step in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    known = zero._transport.wire._exposed
    segment, buffers = zero._segments[0], zero._reductions.all_buffers[0]
    return (
        segment.full.untyped_storage().data_ptr() in known,
        buffers.sums.untyped_storage().data_ptr() in known,
    )


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(0, (False, True)), (1, (True, True)), (2, (True, False)), (3, (False, False))],
)
def test_what_is_kept_and_travels_is_exposed(
    rank_pools: RankPools, stage: int, expected: tuple[bool, bool]
) -> None:
    assert rank_pools(2).run(exposures, stage) == [expected, expected]


# Parameters that all ranks see.


def edit_in_gathered(rank: int, modify: bool) -> list[float]:
    model = model_of(0)
    zero = partition(model, stage=3)
    before = zero.state_dict()["0.weight"]
    try:
        with zero.gathered(modify=modify):
            dist.barrier()
            if rank == 1 or modify:
                with torch.no_grad():
                    model[0].weight.fill_(rank + 1)
            dist.barrier()
            own = float(model[0].weight.detach().mean())
    except RestingError:
        own = -1.0
    after = zero.state_dict()["0.weight"]
    return [own, float((after - before).abs().max()), float(after.mean())]


def test_edits_are_seen_by_nobody_else_before_they_count(rank_pools: RankPools) -> None:
    first, second = rank_pools(2).run(edit_in_gathered, True)
    assert (first[0], second[0]) == (1.0, 2.0)
    assert first[2] == second[2] == 1.0  # rank 0's are everyone's


def test_edits_without_modify_leave_the_model_as_it_was(rank_pools: RankPools) -> None:
    first, second = rank_pools(2).run(edit_in_gathered, False)
    assert second[0] == -1.0
    assert first[1] == second[1] == 0.0


def load_ones_own(rank: int, kind: str) -> list[torch.Tensor]:
    zero = partition(model_of(0), stage=3, wire=TorchWire() if kind == "torch" else None)
    zero.model.load_state_dict(model_of(rank).state_dict())
    return list(zero.state_dict().values())


def test_each_rank_loads_the_slices_it_owns(rank_pools: RankPools) -> None:
    """Nobody should load unlike tensors; who does gets the same bits over any wire."""
    for mine, theirs in zip(
        rank_pools(3).run(load_ones_own, "torch"),
        rank_pools(3).run(load_ones_own, "chosen"),
        strict=True,
    ):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


class Clamping(nn.Module):
    """Changes its own weight when it runs, as some recipes do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.clamp_(-0.01, 0.01)
        return self.inner(x)


def clamp_in_forward(_: int, kind: str) -> str:
    model = nn.ModuleList([Clamping(), Clamping()])
    wire = TorchWire() if kind == "torch" else None
    zero = partition(model, stage=3, units=list(model), wire=wire)
    with pytest.raises(OrderError, match="changed in place") as caught, torch.no_grad():
        model[0](torch.ones(1, 3))
    assert zero.stage == 3
    return str(caught.value)


@pytest.mark.parametrize("kind", ["torch", "chosen"])
def test_a_change_in_the_middle_of_a_forward_is_an_error(rank_pools: RankPools, kind: str) -> None:
    said, _ = rank_pools(2).run(clamp_in_forward, kind, retire=True)
    assert "with zero.gathered(modify=True)" in said


def step_while_another_reads(rank: int) -> bool:
    """Rank 0 is ready to step long before rank 1 has read what the step overwrites."""
    model = model_of(0)
    zero = partition(model, stage=3)
    optimizer = zero.optimizer(torch.optim.SGD, lr=1.0)
    expected = zero.state_dict()
    model(torch.ones(2, 5)).sum().backward()
    zero.finish()
    with torch.no_grad():
        if rank == 1:
            model[2].register_forward_pre_hook(lambda *_: time.sleep(0.3))
        seen = model(torch.ones(2, 5))
    optimizer.step()
    plain = model_of(0)
    plain.load_state_dict(expected)
    return torch.equal(seen, plain(torch.ones(2, 5)).detach())


def test_no_rank_steps_while_another_still_reads(rank_pools: RankPools) -> None:
    assert rank_pools(2).run(step_while_another_reads) == [True, True]


def average_shards(rank: int) -> bool:
    model = model_of(0)
    zero = partition(model, stage=3)
    with torch.no_grad():
        if rank == 1:
            model[2].register_forward_pre_hook(lambda *_: time.sleep(0.3))
        seen = model(torch.ones(2, 5))
        for _, _, values in zero.shards():
            values.zero_()
    with torch.no_grad():
        now = model(torch.ones(2, 5))
    plain = model_of(0)(torch.ones(2, 5))
    return torch.equal(seen, plain) and not now.any()


def test_shards_may_be_written_while_another_rank_is_late(rank_pools: RankPools) -> None:
    assert rank_pools(3).run(average_shards) == [True, True, True]
