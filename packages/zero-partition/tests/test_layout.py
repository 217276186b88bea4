"""Where elements lie and who owns them: facts about integers, without torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_partition._layout import (
    SLICE_MULTIPLE,
    SegmentLayout,
    alignment_numel,
    plan_segment,
)
from zero_partition._residence import plan_segment_bytes, residence_of


@st.composite
def layouts(draw: st.DrawFn) -> SegmentLayout:
    """Anything legal: empty parameters, none at all, more ranks than elements, tiny buckets."""
    return plan_segment(
        draw(st.lists(st.integers(0, 200), max_size=8)),
        num_ranks=draw(st.integers(1, 7)),
        alignment=draw(st.sampled_from([16, 32, 64])),
        bucket_numel=draw(st.none() | st.integers(1, 3000)),
    )


@given(layouts())
def test_every_element_of_every_parameter_has_exactly_one_owner(layout: SegmentLayout) -> None:
    owned = sorted(
        (piece.slot, element)
        for rank in range(layout.num_ranks)
        for piece in layout.pieces(rank)
        for element in range(piece.param_start, piece.param_start + piece.numel)
    )
    assert owned == [(i, e) for i, slot in enumerate(layout.slots) for e in range(slot.numel)]


@given(layouts())
def test_an_empty_parameter_is_rank_0s(layout: SegmentLayout) -> None:
    empty = {i for i, slot in enumerate(layout.slots) if slot.numel == 0}
    for rank in range(layout.num_ranks):
        found = {piece.slot for piece in layout.pieces(rank) if piece.numel == 0}
        assert found == (empty if rank == 0 else set())


@given(layouts())
def test_the_flat_and_the_shard_position_of_a_piece_are_the_same_element(
    layout: SegmentLayout,
) -> None:
    for rank in range(layout.num_ranks):
        where = {}
        for bucket in layout.buckets:
            for offset in range(bucket.slice_numel):
                flat = bucket.start + rank * bucket.slice_numel + offset
                where[flat] = bucket.shard_start + offset
        for piece in layout.pieces(rank):
            for step in range(piece.numel):
                assert where[piece.flat_start + step] == piece.shard_start + step
                slot = layout.slots[piece.slot]
                assert slot.start + piece.param_start + step == piece.flat_start + step


@given(layouts())
def test_slices_and_pieces_start_at_multiples_of_the_vector_length(layout: SegmentLayout) -> None:
    for bucket in layout.buckets:
        assert bucket.slice_numel % SLICE_MULTIPLE == 0
        assert bucket.slice_numel > 0
    for rank in range(layout.num_ranks):
        for piece in layout.pieces(rank):
            assert piece.param_start % SLICE_MULTIPLE == 0


@given(layouts())
def test_buckets_tile_the_buffer_and_their_slices_the_shard(layout: SegmentLayout) -> None:
    start = shard_start = 0
    for bucket in layout.buckets:
        assert (bucket.start, bucket.shard_start) == (start, shard_start)
        start += bucket.slice_numel * layout.num_ranks
        shard_start += bucket.slice_numel
    assert (layout.numel, layout.shard_numel) == (start, shard_start)


@given(layouts())
def test_gaps_and_parameters_together_are_the_whole_buffer(layout: SegmentLayout) -> None:
    covered = [0] * layout.numel
    for start, stop in layout.gaps():
        for element in range(start, stop):
            covered[element] += 1
    for slot in layout.slots:
        for element in range(slot.start, slot.start + slot.numel):
            covered[element] += 1
    assert covered == [1] * layout.numel


@given(layouts())
def test_padding_is_less_than_an_alignment_a_parameter_and_a_slice_a_rank(
    layout: SegmentLayout,
) -> None:
    allowed = 64 * len(layout.slots) + SLICE_MULTIPLE * layout.num_ranks
    assert layout.numel - layout.logical_numel <= allowed


@given(st.lists(st.integers(0, 400), min_size=1), st.integers(1, 5), st.integers(1, 4000))
def test_a_message_is_no_longer_than_asked_unless_slices_would_be_too_short(
    numels: list[int], num_ranks: int, bucket_numel: int
) -> None:
    layout = plan_segment(numels, num_ranks=num_ranks, alignment=16, bucket_numel=bucket_numel)
    for bucket in layout.buckets:
        message = bucket.slice_numel * num_ranks
        assert message <= max(bucket_numel, SLICE_MULTIPLE * num_ranks)


@pytest.mark.parametrize(("itemsize", "numel"), [(1, 64), (2, 32), (4, 16), (8, 16)])
def test_parameters_start_on_64_byte_boundaries(itemsize: int, numel: int) -> None:
    assert alignment_numel(itemsize) == numel


@pytest.mark.parametrize("bad", [0, -1])
def test_a_bucket_without_elements_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_numel must be at least 1, got {bad}"):
        plan_segment([4], num_ranks=2, alignment=16, bucket_numel=bad)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a parameter cannot have -1 elements"):
        plan_segment([3, -1], num_ranks=2, alignment=16)


def test_ranks_and_alignment_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be positive, got 0 and 16"):
        plan_segment([3], num_ranks=0, alignment=16)


@pytest.mark.parametrize("stage", [-1, 4, True, "3", None])
def test_a_stage_that_does_not_exist_is_refused(stage: object) -> None:
    with pytest.raises(ValueError, match="stage must be 0, 1, 2 or 3"):
        residence_of(stage)  # type: ignore[arg-type]  # the wrong type is the point


FP32 = {0: (8, 0), 1: (8, 0), 2: (4, 4), 3: (0, 8)}
"""Parameters, masters and gradients in bytes an element: (whole, sharded); Adam is not counted."""
BF16 = {0: (2 + 4 + 4, 0), 1: (2 + 2, 4 + 4), 2: (2, 4 + 4), 3: (0, 2 + 4 + 4)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("table", "param_bytes"), [(FP32, 4), (BF16, 2)])
def test_planned_bytes_are_the_papers_where_slices_are_even(
    stage: int, num_ranks: int, table: dict[int, tuple[int, int]], param_bytes: int
) -> None:
    numel = 64 * 4
    planned = plan_segment_bytes(
        plan_segment([numel], num_ranks=num_ranks, alignment=32),
        residence_of(stage),
        rank=num_ranks - 1,
        param_bytes=param_bytes,
        sum_bytes=4,
        has_master=param_bytes == 2,
        trainable=True,
    )
    whole, sharded = table[stage]
    total = planned.parameters + planned.masters + planned.gradients
    assert total == whole * numel + sharded * numel // num_ranks
    assert planned.padding == 0
