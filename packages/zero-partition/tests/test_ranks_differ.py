"""Ranks on different paths (R1): units skipped, branches taken, no backward at all."""

from __future__ import annotations

import pytest
from torch import nn

from models import BlockSpec, ModelSpec, When, build
from ranktest import RankPools
from twin import STAGES, Twin, spec_loss, square_loss, stack
from zero_partition import ZeroError, partition


def skipped_units(rank: int, spec: ModelSpec, overlap: bool) -> None:
    for stage in STAGES:
        twin = Twin(lambda: build(spec), stage=stage, overlap=overlap)
        for step in range(3):
            for micro in range(2):
                twin.backward(spec_loss(spec, step, micro))
            twin.finish()
            twin.step()
        twin.check_states()


@pytest.mark.parametrize(
    ("num_ranks", "skipped", "overlap"),
    [
        (2, (0,), True),
        (2, (2,), False),
        (2, (0, 1, 2), True),
        (3, (1,), True),
        (3, (0, 1), False),
        (4, (0, 2), True),
    ],
)
def test_one_rank_may_skip_whole_units(
    rank_pools: RankPools, num_ranks: int, skipped: tuple[int, ...], overlap: bool
) -> None:
    others = When(ranks=tuple(range(1, num_ranks)))
    blocks = [BlockSpec(used=others) if i in skipped else BlockSpec() for i in range(3)]
    rank_pools(num_ranks).run(skipped_units, ModelSpec(blocks=tuple(blocks)), overlap)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_rank_may_take_a_path_of_its_own(rank_pools: RankPools, num_ranks: int) -> None:
    whens = [When(ranks=(r % num_ranks, (r + 1) % num_ranks)) for r in range(4)]
    blocks = tuple(BlockSpec(used=when, branch=whens[i - 1]) for i, when in enumerate(whens))
    rank_pools(num_ranks).run(skipped_units, ModelSpec(blocks=blocks), True)


def branch_on_some_ranks(rank: int, spec: ModelSpec) -> None:
    for stage in STAGES:
        twin = Twin(lambda: build(spec), stage=stage)
        for step in range(3):
            twin.backward(spec_loss(spec, step))
            twin.finish()
            twin.step()
        twin.check_states()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_branch_that_one_rank_takes_trains_like_one_process(
    rank_pools: RankPools, num_ranks: int
) -> None:
    blocks = (BlockSpec(branch=When(ranks=(0,))), BlockSpec(branch=When(ranks=(1,), steps=(1,))))
    rank_pools(num_ranks).run(branch_on_some_ranks, ModelSpec(blocks=blocks))


def without_backward(rank: int, idle: tuple[int, ...], call: str) -> None:
    for stage in STAGES:
        twin = Twin(stack, stage=stage)
        busy = [r for r in range(twin.zero.num_ranks) if r not in idle]
        for step in range(3):
            for micro in range(2):
                # In the second step the idle ranks miss one micro-batch of two.
                who = busy if step == 0 or (step == 1 and micro == 1) else None
                twin.backward(square_loss(2 * step + micro, 5), who)
            if call == "finish":
                twin.finish()
            elif call == "clip":
                twin.clip(0.1)
            twin.step()
        twin.check_states()


@pytest.mark.parametrize("call", ["finish", "clip", "step"])
@pytest.mark.parametrize(("num_ranks", "idle"), [(2, (0,)), (2, (1,)), (3, (0, 2)), (4, (1,))])
def test_a_rank_without_a_backward_takes_part_when_it_steps(
    rank_pools: RankPools, num_ranks: int, idle: tuple[int, ...], call: str
) -> None:
    rank_pools(num_ranks).run(without_backward, idle, call)


def other_models(rank: int, fault: str, stage: int) -> str:
    width = 7 if fault == "shape" and rank == 1 else 5
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 1))
    if rank == 1:
        if fault == "dtype":
            model.double()
        elif fault == "frozen":
            model[0].requires_grad_(False)
        elif fault == "name":
            model = nn.ModuleDict({"a": model[0], "b": model[1]})
    chosen = 3 - stage if fault == "stage" and rank == 1 else stage
    bucket_numel = 64 if fault == "bucket_numel" and rank == 1 else None
    with pytest.raises(ZeroError) as caught:
        partition(model, stage=chosen, bucket_numel=bucket_numel)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("fault", ["shape", "dtype", "frozen", "name", "stage", "bucket_numel"])
def test_ranks_that_bring_different_models_are_refused_on_all_ranks(
    rank_pools: RankPools, fault: str, stage: int
) -> None:
    for message in rank_pools(2).run(other_models, fault, stage, retire=True):
        assert "rank" in message
