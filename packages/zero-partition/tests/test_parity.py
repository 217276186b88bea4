"""Whatever is drawn: the library's ranks leave the bits that one process leaves."""

from __future__ import annotations

from hypothesis import given, settings

from ranktest import RankPools
from strategies import Partitioning, TrainingRun, partitionings, training_runs
from training import differences, train_library, train_reference

EXAMPLES = settings.default.max_examples  # of the profile


def check_run(rank_pools: RankPools, run: TrainingRun, how: Partitioning) -> None:
    """Run it both ways; every rank must report the reference's bits."""
    expected = train_reference(run)
    for rank, got in enumerate(rank_pools(run.num_ranks).run(train_library, run, how)):
        found = differences(expected, got)
        assert found == [], f"rank {rank}: " + "; ".join(found)


@settings(max_examples=EXAMPLES)
@given(training_runs(), partitionings())
def test_training_leaves_the_bits_of_one_process(
    rank_pools: RankPools, run: TrainingRun, how: Partitioning
) -> None:
    check_run(rank_pools, run, how)


@settings(max_examples=EXAMPLES // 3)
@given(training_runs(bf16=True), partitionings())
def test_bfloat16_training_with_float32_masters_leaves_the_bits_of_one_process(
    rank_pools: RankPools, run: TrainingRun, how: Partitioning
) -> None:
    check_run(rank_pools, run, how)
