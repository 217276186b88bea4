"""All-reduce and all-to-all as codes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import wires
from comm_quant import BlockQuant, Codec, Payload, all_reduce, all_to_all, dequantize, quantize
from ranktest import RankPools
from strategies import codecs

nearest = codecs().filter(lambda spec: spec.rounding == "nearest")
NUMELS = (0, 1, 7, 130, 1000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def through(x: Tensor, spec: Codec) -> Tensor:
    return dequantize(*quantize(x, spec), spec, numel=x.numel())


def sum_once(rank: int, spec: Codec, numel: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    tensor, payload = wires.values(rank, numel, dtype), Payload()
    all_reduce(tensor, spec, payload=payload).wait()
    return tensor, payload.total_bytes()


@given(
    num_ranks=st.integers(1, 4),
    spec=nearest,
    numel=st.sampled_from(NUMELS),
    dtype=st.sampled_from(DTYPES),
)
def test_every_rank_gets_the_sum_that_the_algorithm_says(
    rank_pools: RankPools, num_ranks: int, spec: Codec, numel: int, dtype: torch.dtype
) -> None:
    size = -(-spec.num_blocks(numel) // num_ranks) * spec.block_numel
    rows = []
    for rank in range(num_ranks):
        row = torch.zeros(num_ranks, size)
        row.view(-1)[:numel] = wires.values(rank, numel, dtype).float()
        rows.append(row)
    sums = []
    for owner in range(num_ranks):
        parts = [r[owner] if i == owner else through(r[owner], spec) for i, r in enumerate(rows)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        sums.append(through(total, spec))
    expected = torch.cat(sums)[:numel].to(dtype)
    for found, sent in rank_pools(num_ranks).run(sum_once, spec, numel, dtype):
        assert torch.equal(found, expected)
        assert (sent > 0) == (num_ranks > 1 and numel > 0)


def exchange_once(
    rank: int, spec: Codec, numel: int, dtype: torch.dtype, in_place: bool
) -> tuple[Tensor, int]:
    tensor = wires.values(rank, numel * dist.get_world_size(), dtype)
    tensor, payload = tensor.view(dist.get_world_size(), numel, 1), Payload()
    out = tensor if in_place else torch.full_like(tensor, torch.nan)
    all_to_all(out, tensor, spec, payload=payload).wait()
    return out, payload.total_bytes()


@given(
    num_ranks=st.integers(1, 4),
    spec=nearest,
    numel=st.sampled_from(NUMELS),
    dtype=st.sampled_from(DTYPES),
    in_place=st.booleans(),
)
def test_rows_arrive_as_the_codes_say_and_the_own_one_exactly(  # noqa: PLR0917  drawn
    rank_pools: RankPools,
    num_ranks: int,
    spec: Codec,
    numel: int,
    dtype: torch.dtype,
    in_place: bool,
) -> None:
    given = [
        wires.values(rank, numel * num_ranks, dtype).view(num_ranks, numel)
        for rank in range(num_ranks)
    ]
    found = rank_pools(num_ranks).run(exchange_once, spec, numel, dtype, in_place)
    for rank, (out, _) in enumerate(found):
        for peer in range(num_ranks):
            row = given[peer][rank]
            expected = row if peer == rank else through(row, spec).to(dtype)
            assert torch.equal(out[peer].view(-1), expected)


def refusals(rank: int) -> list[str]:
    spec, found = BlockQuant(), []
    tries = [
        lambda: all_reduce(torch.zeros(3, dtype=torch.float64), spec),
        lambda: all_reduce(torch.zeros(3, 2).t(), spec),
        lambda: all_to_all(torch.zeros(2, 3), torch.zeros(2, 4), spec),
        lambda: all_to_all(torch.zeros(3, 3), torch.zeros(3, 3), spec),
    ]
    for each in tries:
        try:
            each()
        except (TypeError, ValueError) as error:
            found.append(str(error))
    return found


def test_tensors_that_do_not_fit_are_refused_before_anything_is_sent(
    rank_pools: RankPools,
) -> None:
    for texts in rank_pools(2).run(refusals):
        assert "all_reduce must be float32, bfloat16 or float16, got torch.float64" in texts[0]
        assert "all_reduce must be contiguous, got strides (1, 2)" in texts[1]
        assert "one shape with 2 rows, got (2, 3) and (2, 4)" in texts[2]
        assert "one shape with 2 rows, got (3, 3) and (3, 3)" in texts[3]


def test_without_ranks_there_is_nothing_to_send_to() -> None:
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialised"):
        all_reduce(torch.zeros(3), BlockQuant())
