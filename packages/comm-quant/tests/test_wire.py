"""`QuantizedWire` between ranks, in one hop and in two."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import wires
from comm_quant import BlockQuant, Codec, QuantizedWire, dequantize, quantize
from comm_quant._message import Run
from ranktest import RankPools
from strategies import codecs

SHAPES = [(1, None), (2, None), (2, 1), (3, None), (3, 3), (4, None), (4, 2), (4, 1), (4, 4)]
NUMELS = (0, 1, 7, 64, 130)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def through(x: Tensor, spec: Codec) -> Tensor:
    """What arrives of `x`."""
    if spec.rounding == "stochastic":
        raise AssertionError("the tests cannot know the seed")
    return dequantize(*quantize(x, spec), spec, numel=x.numel(), dtype=x.dtype)


nearest = codecs().filter(lambda spec: spec.rounding == "nearest")


@given(
    shape=st.sampled_from(SHAPES),
    spec=st.none() | nearest,
    numel=st.sampled_from(NUMELS),
    dtype=st.sampled_from(DTYPES),
)
def test_every_rank_gathers_what_the_codes_say(
    rank_pools: RankPools,
    shape: tuple[int, int | None],
    spec: Codec | None,
    numel: int,
    dtype: torch.dtype,
) -> None:
    num_ranks, num_local = shape
    pool = rank_pools(num_ranks)
    shards = [wires.values(rank, numel, dtype) for rank in range(num_ranks)]
    expected = torch.cat(shards if spec is None else [through(each, spec) for each in shards])
    for out, sent in pool.run(wires.gather_once, spec, numel, dtype, num_local):
        assert torch.equal(out, expected)
        assert sum(sent.values()) == planned_gather_bytes(num_ranks, num_local, numel, spec, dtype)


def planned_gather_bytes(
    num_ranks: int, num_local: int | None, numel: int, spec: Codec | None, dtype: torch.dtype
) -> int:
    message = numel * dtype.itemsize if spec is None else Run(spec, numel).run_bytes
    local = num_ranks if num_local is None else num_local
    if local in (1, num_ranks):
        return message * (num_ranks - 1)
    nodes = num_ranks // local
    return message * (nodes - 1) + message * nodes * (local - 1)


def reduced(  # noqa: PLR0917  as the ranks are called
    num_ranks: int, num_local: int | None, numel: int, dtype: torch.dtype, spec: Codec, rank: int
) -> Tensor:
    """The algorithm in one process: what rank `rank` gets."""
    rows = [
        wires.values(r, numel * num_ranks, dtype).view(num_ranks, -1)[rank].float()
        for r in range(num_ranks)
    ]
    local = num_ranks if num_local is None else num_local
    if local in (1, num_ranks):
        parts = [row if r == rank else through(row, spec) for r, row in enumerate(rows)]
        return add_up(parts)
    # Hop 1 goes to the rank of the same node with the place of `rank`; hop 2 to `rank`.
    node, place = divmod(rank, local)
    partial = []
    for n in range(num_ranks // local):
        inside = [
            rows[n * local + i] if i == place else through(rows[n * local + i], spec)
            for i in range(local)
        ]
        total = add_up(inside)
        partial.append(total if n == node else through(total, spec))
    return add_up(partial)


def add_up(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


@given(
    shape=st.sampled_from(SHAPES),
    spec=nearest,
    numel=st.sampled_from(NUMELS),
    dtype=st.sampled_from(DTYPES),
    in_place=st.booleans(),
)
@example((4, 2), BlockQuant(bits=4, block_numel=3), 130, torch.float32, True)
@example((3, None), BlockQuant(bits=4, block_numel=128), 7, torch.bfloat16, False)
def test_every_rank_sums_its_slice_as_the_algorithm_says(  # noqa: PLR0917  drawn
    rank_pools: RankPools,
    shape: tuple[int, int | None],
    spec: Codec,
    numel: int,
    dtype: torch.dtype,
    in_place: bool,
) -> None:
    num_ranks, num_local = shape
    pool = rank_pools(num_ranks)
    found = pool.run(wires.reduce_once, spec, numel, dtype, num_local, in_place)
    for rank, (out, _) in enumerate(found):
        assert torch.equal(out, reduced(num_ranks, num_local, numel, dtype, spec, rank))


@pytest.mark.parametrize(("num_ranks", "dtype"), list(product([2, 3, 4], [*DTYPES, torch.float64])))
def test_without_a_codec_sums_are_exact_in_rank_order(
    rank_pools: RankPools, num_ranks: int, dtype: torch.dtype
) -> None:
    pool = rank_pools(num_ranks)
    found = pool.run(wires.reduce_once, None, 33, dtype, None, True)
    for rank, (out, _) in enumerate(found):
        rows = [
            wires.values(r, 33 * num_ranks, dtype).view(num_ranks, -1)[rank].to(out.dtype)
            for r in range(num_ranks)
        ]
        assert torch.equal(out, add_up(rows))


def test_float64_gradients_travel_as_they_are(rank_pools: RankPools) -> None:
    pool = rank_pools(2)
    spec = BlockQuant(bits=4)
    found = pool.run(wires.reduce_once, spec, 9, torch.float64, None, False)
    exact = pool.run(wires.reduce_once, None, 9, torch.float64, None, False)
    for (out, _), (expected, _) in zip(found, exact, strict=True):
        assert torch.equal(out, expected)


@pytest.mark.parametrize("num_local", [None, 2])
def test_the_error_does_not_grow_with_the_ranks(
    rank_pools: RankPools, num_local: int | None
) -> None:
    """C74: of equal gradients each rank's message has the same error; it is averaged, not added."""
    spec = BlockQuant(bits=4, block_numel=128)
    errors = {}
    for num_ranks in (2, 4):
        pool = rank_pools(num_ranks)
        local = num_local if num_ranks == 4 else None
        found = pool.run(wires.reduce_once, spec, 256, torch.float32, local, False, True)
        mean = torch.cat([out for out, _ in found]) / num_ranks
        exact = wires.values(0, 256 * num_ranks, torch.float32)
        errors[num_ranks] = float((mean - exact).norm() / exact.norm())
    assert 0 < errors[4] < errors[2] * (1.6 if num_local is None else 2.0)
    one_message = float((exact - through(exact, spec)).norm() / exact.norm())
    assert errors[4] <= one_message * (1 if num_local is None else 1.5)


@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, None), (3, None), (4, 2), (4, None)])
def test_reductions_under_way_together_do_not_mix(
    rank_pools: RankPools, num_ranks: int, num_local: int | None
) -> None:
    pool = rank_pools(num_ranks)
    spec = BlockQuant(bits=8, block_numel=16)
    found = pool.run(wires.reduce_many_at_once, spec, num_local)
    for index in range(6):
        rows = [
            wires.values(r, 16 * num_ranks, torch.float32, seed=index) for r in range(num_ranks)
        ]
        total = add_up(rows)
        got = torch.cat([outs[index] for outs in found])
        assert float((got - total).abs().max()) < 0.1 * num_ranks


@pytest.mark.parametrize("seed", [0, 100, 200])
@pytest.mark.parametrize("spec", [None, BlockQuant(bits=8, block_numel=64)])
def test_gathers_may_be_waited_for_in_different_orders(
    rank_pools: RankPools, spec: Codec | None, seed: int
) -> None:
    assert all(rank_pools(4).run(wires.gathers_in_any_order, spec, seed))


def test_groups_that_do_not_hold_everyone_work(rank_pools: RankPools) -> None:
    pool = rank_pools(4)
    found = pool.run(wires.reduce_in_subgroups, BlockQuant(bits=8, block_numel=4))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0], found[3])
    assert found[0].numel() == 15
    assert found[1].numel() == 5


def test_bytes_leaving_a_node_are_those_of_the_closed_form(rank_pools: RankPools) -> None:
    """2 x 2 ranks: each sends its neighbour a run for either node, then one run across."""
    pool = rank_pools(4)
    spec = BlockQuant(bits=4, block_numel=128)
    numel = 1280
    run = Run(spec, numel).run_bytes
    for _, sent in pool.run(wires.reduce_once, spec, numel, torch.bfloat16, 2, False):
        assert sent == {("reduce", "local"): 2 * run, ("reduce", "cross"): run}


@given(
    shape=st.sampled_from(SHAPES),
    spec=st.none() | codecs(),
    numel=st.sampled_from(NUMELS),
    dtype=st.sampled_from(DTYPES),
)
def test_what_is_kept_gives_the_same_bits_and_nothing_crosses(
    rank_pools: RankPools,
    shape: tuple[int, int | None],
    spec: Codec | None,
    numel: int,
    dtype: torch.dtype,
) -> None:
    num_ranks, num_local = shape
    local = 1 if num_local is None else num_local
    message = numel * dtype.itemsize if spec is None else Run(spec, numel).run_bytes
    nodes = num_ranks // local
    for first, second, sent, kept in rank_pools(num_ranks).run(
        wires.gather_twice, spec, numel, dtype, num_local
    ):
        assert torch.equal(first, second)
        within = message * nodes * (local - 1)
        assert sent == ({("gather", "local"): within} if within else {})
        assert kept == (message * nodes, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_node_sums_are_rounded_once_and_cross_once(
    rank_pools: RankPools, dtype: torch.dtype
) -> None:
    found = rank_pools(4).run(wires.reduce_once, None, 33, dtype, 2, False, False, True)
    for rank, (out, sent) in enumerate(found):
        rows = [wires.values(r, 33 * 4, dtype).view(4, -1)[rank].float() for r in range(4)]
        nodes = [rows[0] + rows[1], rows[2] + rows[3]]
        other = 1 - rank // 2
        nodes[other] = nodes[other].to(dtype).float()
        assert torch.equal(out, nodes[0] + nodes[1])
        size = 33 * dtype.itemsize
        assert sent == {("reduce", "local"): 2 * size, ("reduce", "cross"): size}


class TestRefusals:
    """What does not fit is refused, on every rank."""

    def test_ranks_of_other_settings(self, rank_pools: RankPools) -> None:
        pool = rank_pools(2)
        options = [{"grads": BlockQuant(bits=4)}, {"grads": BlockQuant(bits=8)}]
        for text in pool.run(wires.open_with, options):
            assert "all ranks need the same settings; rank 0 has" in text
            assert "bits=4" in text
            assert "rank 1 has" in text
            assert "bits=8" in text

    def test_nodes_that_do_not_cover_the_group(self, rank_pools: RankPools) -> None:
        pool = rank_pools(3)
        for text in pool.run(wires.open_with, [{"num_local": 2}] * 3):
            assert "num_local=2 ranks do not cover a group of 3; choose a divisor" in text

    def test_what_is_no_codec(self) -> None:
        with pytest.raises(
            TypeError, match="grads must be BlockQuant, Float8Quant or None, got int"
        ):
            QuantizedWire(grads=4)  # type: ignore[arg-type]

    @pytest.mark.parametrize("num_local", [0, -1, True])
    def test_nodes_without_ranks(self, num_local: int) -> None:
        with pytest.raises(ValueError, match="num_local must be at least 1, got"):
            QuantizedWire(num_local=num_local)

    def test_a_shard_that_its_codes_would_overwrite(self, rank_pools: RankPools) -> None:
        pool = rank_pools(1)
        assert "would lose its exact values" in pool.run(overwrite)[0]


def overwrite(rank: int) -> str:
    wire = QuantizedWire(weights=BlockQuant())
    out = torch.zeros(4)
    try:
        wire.all_gather(out, out, group=wires.world())
    except ValueError as error:
        return str(error)
    return ""


def test_rounded_node_sums_beside_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="round_node_sums is for gradients that travel as they"):
        QuantizedWire(grads=BlockQuant(), round_node_sums=True)


def test_a_mesh_of_other_nodes_than_the_wire_was_made_for_is_refused() -> None:
    wire = QuantizedWire(num_local=2)
    wire.spread_over(2)
    with pytest.raises(ValueError, match="made for num_local=2, and the mesh has nodes of 4"):
        wire.spread_over(4)
