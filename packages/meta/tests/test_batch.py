"""The batch sizes: any two determine the third, and nothing given is changed."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plait._batch import BatchSizes, BatchSizesError, Given, plan_batch_sizes
from strategies import batch_sizes_list


def plan(ranks: int, train: int | None, micro: int | None, steps: int | None) -> BatchSizes:
    return plan_batch_sizes(
        ranks=Given(ranks, "--ranks"),
        train=None if train is None else Given(train, "a.json"),
        micro=None if micro is None else Given(micro, "b.json"),
        accumulation=None if steps is None else Given(steps, "--set"),
    )


@given(sizes=batch_sizes_list(), left_out=st.integers(0, 3))
def test_any_two_sizes_determine_the_third(sizes: BatchSizes, left_out: int) -> None:
    names = ("train_batch_size", "micro_batch_size", "accumulation_steps")
    given = [getattr(sizes, name) for name in names]
    if left_out < 3:
        given[left_out] = None
    assert plan(sizes.num_ranks, *given) == sizes


@given(
    ranks=st.integers(1, 9),
    train=st.none() | st.integers(1, 100),
    micro=st.none() | st.integers(1, 20),
    steps=st.none() | st.integers(1, 6),
)
@example(ranks=3, train=10, micro=None, steps=None)
@example(ranks=2, train=None, micro=None, steps=5)
def test_sizes_multiply_up_and_given_ones_stay_or_the_numbers_and_origins_are_said(
    ranks: int, train: int | None, micro: int | None, steps: int | None
) -> None:
    given = {"a.json": train, "b.json": micro, "--set": steps}
    try:
        sizes = plan(ranks, train, micro, steps)
    except BatchSizesError as error:
        said = str(error)
    else:
        product = sizes.micro_batch_size * sizes.accumulation_steps * sizes.num_ranks
        assert sizes.train_batch_size == product
        assert sizes.num_ranks == ranks
        assert train in (None, sizes.train_batch_size)
        assert micro in (None, sizes.micro_batch_size)
        assert steps in (None, sizes.accumulation_steps)
        return
    for origin, value in given.items():
        assert value is None or f"{value} ({origin})" in said
    assert f"{ranks} rank{'s' * (ranks != 1)} (--ranks)" in said


def test_a_contradiction_names_the_three_numbers_their_origins_and_the_product() -> None:
    with pytest.raises(BatchSizesError) as caught:
        plan(2, 64, 8, 2)
    assert str(caught.value) == (
        "train_batch_size 64 (a.json) is not train_micro_batch_size_per_gpu 8 (b.json) x "
        "gradient_accumulation_steps 2 (--set) x 2 ranks (--ranks) = 32; leave one of them out"
    )


def test_a_batch_that_the_ranks_cannot_share_names_the_numbers() -> None:
    with pytest.raises(BatchSizesError) as caught:
        plan(3, 10, None, None)
    assert str(caught.value) == (
        "train_batch_size 10 (a.json) is not a multiple of "
        "gradient_accumulation_steps 1 (default) x 3 ranks (--ranks) = 3"
    )


def test_one_size_alone_means_no_accumulation() -> None:
    assert plan(2, 64, None, None).accumulation_steps == 1
    assert plan(2, None, 8, None).train_batch_size == 16


def test_the_default_batch_is_shared_by_any_usual_number_of_ranks() -> None:
    for ranks in (1, 2, 3, 4, 6, 8):
        assert plan(ranks, None, None, None).train_batch_size == 24
