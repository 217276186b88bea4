"""`HierarchicalWire`: what it keeps of a gather, sums of nodes, and what is refused.

That it moves and sums as every wire does is in test_wire; that models train over it to the same
bits, with a secondary shard at stage 3, in test_parity.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ranktest import RankPools, subgroup
from zero_partition import HierarchicalWire, Pending, TorchWire, partition
from zero_partition._nodes_wire import Nodes

GRIDS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 1), (4, 2), (4, 4)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).to(dtype)


@given(num_nodes=st.integers(1, 9), num_local=st.integers(1, 9))
def test_every_pair_of_ranks_meets_in_two_hops(num_nodes: int, num_local: int) -> None:
    nodes = Nodes(num_nodes * num_local, num_local)
    for rank in range(nodes.num_ranks):
        near, far = nodes.neighbours(rank), nodes.counterparts(rank)
        assert all(rank in nodes.neighbours(other) for other in near)
        assert all(rank in nodes.counterparts(other) for other in far)
        reached = {rank, *near, *far} | {r for other in far for r in nodes.neighbours(other)}
        assert reached == set(range(nodes.num_ranks))
        assert len(near) == num_local - 1
        assert len(far) == num_nodes - 1


def gather_twice(rank: int, num_local: int, numel: int) -> tuple[bool, int, int]:
    wire, num_ranks = HierarchicalWire(num_local=num_local), dist.get_world_size()
    shard = values(rank, numel, torch.float32)
    expected = torch.cat([values(r, numel, torch.float32) for r in range(num_ranks)])
    out, again = torch.zeros(2, num_ranks * numel)
    wire.all_gather(out, shard, group=world(), keep="a name").wait()
    wire.all_gather_kept(again, group=world(), key="a name").wait()
    held = wire.kept_bytes(group=world())
    wire.forget_kept(group=world())
    with pytest.raises(KeyError):
        wire.all_gather_kept(again, group=world(), key="a name")
    same = torch.equal(out, expected) and torch.equal(again, expected)
    return same, held, wire.kept_bytes(group=world())


@given(grid=st.sampled_from(GRIDS), numel=st.sampled_from([0, 1, 7, 1000]))
def test_what_a_gather_keeps_gives_it_again(
    rank_pools: RankPools, grid: tuple[int, int], numel: int
) -> None:
    num_ranks, num_local = grid
    for same, held, left in rank_pools(num_ranks).run(gather_twice, num_local, numel):
        assert same
        assert held == 4 * numel * num_ranks // num_local
        assert left == 0


def sum_nodes(rank: int, num_local: int, numel: int, dtype: torch.dtype) -> Tensor:
    wire = HierarchicalWire(num_local=num_local, round_node_sums=True)
    out = torch.full((numel,), torch.nan)
    given = values(rank, numel * dist.get_world_size(), dtype)
    wire.reduce_scatter(out, given, group=world()).wait()
    return out


@given(
    grid=st.sampled_from(GRIDS),
    numel=st.sampled_from([0, 1, 7, 1000]),
    dtype=st.sampled_from(DTYPES),
)
def test_rounded_node_sums_are_those_of_the_definition(
    rank_pools: RankPools, grid: tuple[int, int], numel: int, dtype: torch.dtype
) -> None:
    num_ranks, num_local = grid
    num_nodes = num_ranks // num_local
    given = torch.stack([values(r, numel * num_ranks, dtype).float() for r in range(num_ranks)])
    for rank, found in enumerate(rank_pools(num_ranks).run(sum_nodes, num_local, numel, dtype)):
        rows = given[:, rank * numel :][:, :numel].view(num_nodes, num_local, numel)
        if 1 in (num_local, num_nodes):
            sums = list(given[:, rank * numel :][:, :numel])  # nothing is to be summed first
        else:
            sums = []
            for node, members in enumerate(rows):
                total = members[0].clone()
                for row in members[1:]:
                    total += row
                is_own = node == rank // num_local
                sums.append(total if is_own else total.to(dtype).float())
        expected = sums[0].clone()
        for each in sums[1:]:
            expected += each
        assert torch.equal(found, expected)


def many_at_once(rank: int, seed: int) -> bool:
    """Every rank begins the same transfers, and waits for some of them, when it likes."""
    wire, group = HierarchicalWire(num_local=2, round_node_sums=True), world()
    shards = [values(10 * rank + i, 100, torch.float32) for i in range(6)]
    outs, sums = torch.zeros(6, 400), torch.zeros(6, 100)
    draws = torch.Generator().manual_seed(seed + rank)
    pending: list[Pending] = []
    for shard, out, total in zip(shards, outs, sums, strict=True):
        pending.append(wire.all_gather(out, shard, group=group))
        if torch.rand((), generator=draws) < 0.5:
            pending[-1].wait()
        pending.append(wire.reduce_scatter(total, shard.repeat(4), group=group))
    for index in torch.randperm(12, generator=draws).tolist():
        pending[(index + 3) % 12].done()
        pending[index].wait()
        assert pending[index].done()
    given = [[values(10 * r + i, 100, torch.float32) for r in range(4)] for i in range(6)]
    gathered = torch.stack([torch.cat(rows) for rows in given])
    summed = torch.stack([(rows[0] + rows[1]) + (rows[2] + rows[3]) for rows in given])
    return torch.equal(outs, gathered) and torch.equal(sums, summed)


@pytest.mark.parametrize("seed", [0, 100, 200])
def test_ranks_may_wait_in_different_orders(rank_pools: RankPools, seed: int) -> None:
    assert all(rank_pools(4).run(many_at_once, seed))


def train(rank: int, num_local: int | None) -> tuple[list[float], dict[str, Tensor], str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    if num_local is None:
        zero = partition(model, stage=3, wire=TorchWire())
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // num_local, num_local))
        zero = partition(model, stage=3, mesh=mesh, secondary="local")
    optimizer = zero.optimizer(torch.optim.AdamW, lr=0.1)
    losses, rows = [], ""
    for step in range(3):
        x = values(100 * step + rank, 20, torch.float32).view(4, 5)
        (loss := model(x).square().mean()).backward()
        rows = str(zero.memory)
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, zero.state_dict(), rows


@pytest.mark.parametrize("grid", [(2, 1), (3, 3), (4, 2)])
def test_a_mesh_brings_its_wire_and_trains_to_the_same_bits(
    rank_pools: RankPools, grid: tuple[int, int]
) -> None:
    num_ranks, num_local = grid
    ours = rank_pools(num_ranks).run(train, num_local)
    for (losses, state, rows), (expected, wanted, others) in zip(
        ours, rank_pools(num_ranks).run(train, None), strict=True
    ):
        assert losses == expected
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)
        assert "secondary shards" in rows
        assert "secondary shards" not in others


def over_part_of_the_world(rank: int) -> bool:
    """Two ranks of three, which are their own node."""
    group = subgroup(0, 2)
    if group is None:
        return True
    wire, out = HierarchicalWire(num_local=2), torch.zeros(6)
    wire.all_gather(out, values(rank, 3, torch.float32), group=group).wait()
    return torch.equal(out, torch.cat([values(r, 3, torch.float32) for r in (0, 2)]))


def test_a_group_of_some_ranks(rank_pools: RankPools) -> None:
    assert all(rank_pools(3).run(over_part_of_the_world))


def refusals(rank: int) -> list[str]:
    told = []
    for make in (
        lambda: HierarchicalWire(num_local=0),
        lambda: HierarchicalWire(num_local=True),
        lambda: HierarchicalWire(num_local=2).open(world()),
        lambda: HierarchicalWire(num_local=1, round_node_sums=rank == 1).open(world()),
        lambda: HierarchicalWire(num_local=3).spread_over(1),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the texts are looked at below
            make()
        told.append(str(caught.value))
    return told


def test_what_does_not_fit_is_refused_on_all_ranks(rank_pools: RankPools) -> None:
    for told in rank_pools(3).run(refusals):
        for text, said in zip(
            told,
            [
                "num_local must be at least 1, got 0",
                "num_local must be at least 1, got True",
                "nodes of num_local=2 ranks do not cover a group of 3; choose a divisor",
                "rank 0 has num_local=1, round_node_sums=False, rank 1 has num_local=1, round_node",
                "made for num_local=3, and the mesh has nodes of 1 ranks",
            ],
            strict=True,
        ):
            assert said in text
