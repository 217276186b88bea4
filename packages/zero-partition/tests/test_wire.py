"""What `TorchWire` moves and sums, against definitions of one line."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ranktest import RankPools, subgroup
from zero_partition import TorchWire, Wire
from zero_partition._wire import sum_rows

WIRE: Wire = TorchWire()
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def gather(rank: int, numel: int, dtype: torch.dtype, in_place: bool) -> Tensor:
    group = dist.group.WORLD
    out = torch.zeros(numel * dist.get_world_size(), dtype=dtype)
    shard = contribution(rank, numel, dtype)
    if in_place:
        own = out[rank * numel :][:numel]
        own.copy_(shard)
        shard = own
    pending = WIRE.all_gather(out, shard, group=group)
    pending.wait()
    pending.wait()  # a second wait does nothing
    assert pending.done()
    return out


def reduce(rank: int, numel: int, dtype: torch.dtype, wide: torch.dtype, in_place: bool) -> Tensor:
    num_ranks = dist.get_world_size()
    whole = contribution(rank, numel * num_ranks, dtype)
    out = whole[rank * numel :][:numel] if in_place else torch.zeros(numel, dtype=wide)
    WIRE.reduce_scatter(out, whole, group=dist.group.WORLD).wait()
    return out.clone()


@given(st.integers(1, 4), st.integers(0, 5000), st.sampled_from(DTYPES), st.booleans())
def test_a_gather_puts_every_ranks_bytes_in_rank_order(
    rank_pools: RankPools, num_ranks: int, numel: int, dtype: torch.dtype, in_place: bool
) -> None:
    expected = torch.cat([contribution(r, numel, dtype) for r in range(num_ranks)])
    for out in rank_pools(num_ranks).run(gather, numel, dtype, in_place):
        assert torch.equal(out, expected)


@given(
    st.integers(1, 4),
    st.integers(0, 5000),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.booleans(),
)
def test_a_reduction_is_the_sum_in_rank_order_in_the_wider_dtype(
    rank_pools: RankPools, num_ranks: int, numel: int, dtype: torch.dtype, in_place: bool
) -> None:
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    in_place = in_place and wide == dtype
    parts = [contribution(r, numel * num_ranks, dtype).to(wide) for r in range(num_ranks)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    results = rank_pools(num_ranks).run(reduce, numel, dtype, wide, in_place)
    assert torch.equal(torch.cat(results), total)


def reduce_on_subgroup(rank: int) -> Tensor | None:
    group = subgroup(0, 2)
    if rank == 1:
        return None
    out = torch.zeros(2)
    WIRE.reduce_scatter(out, torch.full((4,), float(rank + 1)), group=group).wait()
    return out


def test_a_wire_works_on_any_subgroup(rank_pools: RankPools) -> None:
    first, middle, last = rank_pools(3).run(reduce_on_subgroup)
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
