"""Forwards and backwards in any order and number: evaluation, recomputation, compilation."""

from __future__ import annotations

import warnings

import pytest
import torch

from models import BlockSpec, ModelSpec, Moment, build, loss
from ranktest import RankPools
from twin import STAGES, Twin, check_at_rest, spec_loss, square_loss, stack
from zero_partition import ZeroError, partition

# C21


def train_eval_train(rank: int, spec: ModelSpec, eval_backwards: bool) -> None:
    for stage in STAGES:
        twin = Twin(lambda: build(spec), stage=stage)
        tokens = torch.arange(6).view(2, 3) % spec.vocab
        for step in range(3):
            twin.backward(spec_loss(spec, step))
            twin.step()
            outs = []
            for model in (twin.model, twin.reference.model):
                model.eval()
                with torch.no_grad():
                    outs.append(model(tokens, Moment(0, 0, rank), backwards=eval_backwards))
                with torch.inference_mode():
                    model(tokens, Moment(0, 0, rank))
                model.train()
                if step == 1:
                    model.blocks[1].eval()  # and stays so in the next backward
            assert torch.equal(*outs)
            if stage == 3:
                check_at_rest(twin.model)
        if stage == 3:
            check_at_rest(twin.model)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("eval_backwards", [True, False])
def test_evaluation_in_another_order_between_steps_changes_nothing(
    rank_pools: RankPools, num_ranks: int, eval_backwards: bool
) -> None:
    spec = ModelSpec(blocks=tuple(BlockSpec(dropout=0.25) for _ in range(3)))
    rank_pools(num_ranks).run(train_eval_train, spec, eval_backwards)


def eval_between_forward_and_backward(rank: int, spec: ModelSpec) -> None:
    for stage in STAGES:
        twin = Twin(lambda: build(spec), stage=stage)
        for step in range(2):
            for reference_rank in range(twin.zero.num_ranks):
                assert reference_rank >= 0
            value = loss(twin.model, spec, Moment(step, 0, rank))
            with torch.no_grad():
                loss(twin.model, spec, Moment(7, 0, rank))
            value.backward()
            twin.reference.backward(spec_loss(spec, step))
            twin.finish()
            twin.step()


def test_evaluation_between_forward_and_backward_changes_nothing(rank_pools: RankPools) -> None:
    rank_pools(2).run(eval_between_forward_and_backward, ModelSpec())


# C23


def unequal_forwards(rank: int, counts: tuple[int, ...], sync: bool) -> str:
    spec = ModelSpec()
    model = build(spec)
    zero = partition(model, stage=3)
    zero.optimizer(torch.optim.SGD, lr=0.1)
    try:
        with torch.no_grad():
            for _ in range(counts[rank]):
                loss(model, spec, Moment(0, 0, rank))
        if sync:
            zero.sync()
        loss(model, spec, Moment(0, 0, rank)).backward()
        zero.finish()
    except ZeroError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("counts", [(3, 5), (0, 1), (2, 0, 4), (1, 1, 2)], ids=str)
def test_unequal_numbers_of_evaluation_forwards_complete_with_sync(
    rank_pools: RankPools, counts: tuple[int, ...]
) -> None:
    assert set(rank_pools(len(counts)).run(unequal_forwards, counts, True)) == {""}


@pytest.mark.parametrize("counts", [(3, 5), (0, 1), (2, 0, 4)], ids=str)
def test_unequal_numbers_of_evaluation_forwards_are_named_on_every_rank(
    rank_pools: RankPools, counts: tuple[int, ...]
) -> None:
    messages = rank_pools(len(counts)).run(unequal_forwards, counts, False, retire=True)
    for message in messages:
        assert all(word in message for word in ("evaluation", "training forward", "sync()"))
        assert f"its number {min(counts) + 1}" in message
        told = message.split("different places:")[1]
        assert all(str(rank) in told for rank in range(len(counts)))


# Forwards and backwards.


def forwards_and_backwards(rank: int, kind: str) -> None:
    for stage in STAGES:
        for overlap in (True, False):
            twin = Twin(stack, stage=stage, overlap=overlap)
            for step in range(2):
                first, second = square_loss(2 * step, 5), square_loss(2 * step + 1, 5)
                model, reference = twin.model, twin.reference
                if kind == "dropped":  # the first forward is thrown away
                    first(model, rank)
                    second(model, rank).backward()
                    reference.backward(second)
                elif kind == "two and two":
                    a, b = first(model, rank), second(model, rank)
                    a.backward()
                    b.backward()
                    reference.backward(first)
                    reference.backward(second)
                elif kind == "crossed":
                    a, b = first(model, rank), second(model, rank)
                    b.backward()
                    a.backward()
                    reference.backward(second)
                    reference.backward(first)
                else:  # one backward through two forwards
                    (first(model, rank) + second(model, rank)).backward()
                    reference.backward(lambda m, r, f=first, s=second: f(m, r) + s(m, r))
                twin.finish()
                twin.step()


@pytest.mark.parametrize("kind", ["dropped", "two and two", "crossed", "one for two"])
def test_forwards_and_backwards_may_come_in_any_number(rank_pools: RankPools, kind: str) -> None:
    rank_pools(2).run(forwards_and_backwards, kind)


def failed_forward(rank: int) -> None:
    for stage in STAGES:
        twin = Twin(stack, stage=stage)
        for step in range(2):
            with pytest.raises(RuntimeError, match="shapes"):
                twin.model(torch.ones(2, 4))
            twin.backward(square_loss(step, 5))
            twin.step()


def test_a_forward_that_raised_can_be_repeated(rank_pools: RankPools) -> None:
    rank_pools(2).run(failed_forward)


def stale_graph(rank: int) -> None:
    for stage in STAGES:
        model = stack()
        zero = partition(model, stage=stage)
        optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
        value = square_loss(0, 5)(model, rank)
        value.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|step"):
            value.backward()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_backward_through_a_graph_from_before_the_step_is_an_error(
    rank_pools: RankPools, num_ranks: int
) -> None:
    rank_pools(num_ranks).run(stale_graph, retire=True)


def compiled(rank: int, how: str) -> None:
    torch._dynamo.reset()
    # Dynamo reads .grad of the inputs of a block that has hooks, with this library or without.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    for stage in (0, 3):
        twin = Twin(stack, stage=stage)
        if how == "blocks":
            for block in twin.model:
                block.compile(backend="aot_eager")
        elif how == "model":
            twin.model.compile(backend="aot_eager")
        else:
            compiled_model = torch.compile(twin.model, backend="aot_eager")
        for step in range(2):
            model = compiled_model if how == "wrapper" else twin.model
            square_loss(step, 5)(model, rank).backward()
            twin.reference.backward(square_loss(step, 5))
            twin.finish()
            twin.step()


@pytest.mark.parametrize("how", ["blocks", "model", "wrapper"])
def test_compiled_models_train_like_one_process(rank_pools: RankPools, how: str) -> None:
    rank_pools(2).run(compiled, how, limit_s=120)
