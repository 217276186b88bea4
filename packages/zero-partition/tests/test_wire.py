"""What the wires move and sum, against definitions of one line."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from ranktest import RankPools, subgroup
from wires import WIRES, wire
from zero_partition import SharedMemoryWire, TorchWire
from zero_partition._wire import sum_rows

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


@dataclass(frozen=True)
class Message:
    """What a rank sends: elements a rank, their type, and whether the result overwrites it."""

    numel: int
    dtype: torch.dtype
    in_place: bool


def messages(dtypes: list[torch.dtype]) -> SearchStrategy[Message]:
    """Any length, empty included."""
    return st.builds(Message, st.integers(0, 5000), st.sampled_from(dtypes), st.booleans())


def gather(rank: int, kind: str, message: Message) -> Tensor:
    numel, group = message.numel, dist.group.WORLD
    out = torch.zeros(numel * dist.get_world_size(), dtype=message.dtype)
    shard = contribution(rank, numel, message.dtype)
    if message.in_place:
        own = out[rank * numel :][:numel]
        own.copy_(shard)
        shard = own
    pending = wire(kind).all_gather(out, shard, group=group)
    pending.wait()
    pending.wait()  # a second wait does nothing
    assert pending.done()
    return out


def reduce(rank: int, kind: str, message: Message, wide: torch.dtype) -> Tensor:
    numel, num_ranks = message.numel, dist.get_world_size()
    whole = contribution(rank, numel * num_ranks, message.dtype)
    in_place = message.in_place and wide == message.dtype
    out = whole[rank * numel :][:numel] if in_place else torch.zeros(numel, dtype=wide)
    wire(kind).reduce_scatter(out, whole, group=dist.group.WORLD).wait()
    return out.clone()


@given(st.sampled_from(WIRES), st.integers(1, 4), messages(DTYPES))
def test_a_gather_puts_every_ranks_bytes_in_rank_order(
    rank_pools: RankPools, kind: str, num_ranks: int, message: Message
) -> None:
    expected = torch.cat([contribution(r, message.numel, message.dtype) for r in range(num_ranks)])
    for out in rank_pools(num_ranks).run(gather, kind, message):
        assert torch.equal(out, expected)


@given(st.sampled_from(WIRES), st.integers(1, 4), messages(DTYPES[:4]))
def test_a_reduction_is_the_sum_in_rank_order_in_the_wider_dtype(
    rank_pools: RankPools, kind: str, num_ranks: int, message: Message
) -> None:
    wide = torch.float32 if message.dtype.itemsize == 2 else message.dtype
    whole = message.numel * num_ranks
    parts = [contribution(r, whole, message.dtype).to(wide) for r in range(num_ranks)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    results = rank_pools(num_ranks).run(reduce, kind, message, wide)
    assert torch.equal(torch.cat(results), total)


def reduce_on_subgroup(rank: int, kind: str) -> Tensor | None:
    group = subgroup(0, 2)
    if rank == 1:
        return None
    out = torch.zeros(2)
    given = torch.full((4,), float(rank + 1))
    (TorchWire() if kind == "torch" else SharedMemoryWire()).reduce_scatter(
        out, given, group=group
    ).wait()
    return out


@pytest.mark.parametrize("kind", ["torch", "shared"])
def test_a_wire_works_on_any_subgroup(rank_pools: RankPools, kind: str) -> None:
    first, middle, last = rank_pools(3).run(reduce_on_subgroup, kind)
    assert middle is None
    assert first.tolist() == last.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
def test_rows_are_summed_from_left_to_right(num_rows: int) -> None:
    rows = torch.tensor([[1e8], [1.0], [-1e8], [1.0], [3.0]])[:num_rows]
    out = torch.empty(1)
    sum_rows(out, rows)
    expected = rows[0].clone()
    for row in rows[1:]:
        expected = expected + row
    assert torch.equal(out, expected)


def transfers_at_once(rank: int, kind: str, numels: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Begin everything, poll now and then, wait in another order on every other rank."""
    num_ranks, group, one = dist.get_world_size(), dist.group.WORLD, wire(kind)
    begun = []
    for i, numel in enumerate(numels):
        whole = contribution(rank + 7 * i, numel * num_ranks, torch.float32)
        gathered, summed = torch.empty(numel * num_ranks), torch.empty(numel)
        first = one.reduce_scatter(summed, whole, group=group)
        second = one.all_gather(gathered, whole[:numel], group=group)
        first.done()
        begun.append((first, second, gathered, summed))
    for first, second, _, _ in begun if rank % 2 else reversed(begun):
        second.wait()
        first.wait()
    return [(gathered, summed) for _, _, gathered, summed in begun]


@given(
    st.sampled_from(WIRES), st.integers(2, 4), st.lists(st.integers(0, 999), min_size=1, max_size=5)
)
def test_many_transfers_may_be_under_way_at_once(
    rank_pools: RankPools, kind: str, num_ranks: int, numels: list[int]
) -> None:
    found = rank_pools(num_ranks).run(transfers_at_once, kind, numels)
    for i, numel in enumerate(numels):
        sent = [contribution(r + 7 * i, numel * num_ranks, torch.float32) for r in range(num_ranks)]
        total = sent[0]
        for each in sent[1:]:
            total = total + each
        for gathered, _ in (rank[i] for rank in found):
            assert torch.equal(gathered, torch.cat([each[:numel] for each in sent]))
        assert torch.equal(torch.cat([rank[i][1] for rank in found]), total)
