"""Error feedback: what messages lose comes later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wires
from comm_quant import BlockQuant, ErrorFeedback, QuantizedWire, quantize
from ranktest import RankPools

INT4 = BlockQuant(bits=4, block_numel=128)


@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, None), (4, 2)])
def test_what_is_accumulated_over_many_steps_is_right(
    rank_pools: RankPools, num_ranks: int, num_local: int | None
) -> None:
    """Small elements beside large ones round to zero every time; with feedback they get through."""
    pool = rank_pools(num_ranks)
    errors = {}
    for beta in (None, 0.0, 0.8):
        found = pool.run(wires.accumulate, INT4, num_local, beta, 60)
        came, should = (torch.cat(parts) for parts in zip(*found, strict=True))
        errors[beta] = float((came - should).norm() / should.norm())
    assert errors[0.0] < errors[None] / 8
    assert errors[0.8] < errors[None] / 4


def test_a_state_begins_again_after_so_many_steps() -> None:
    feedback, x = ErrorFeedback(beta=0.0, reset_steps=3), torch.tensor([1.0, 0.4])
    spec = BlockQuant(bits=2, block_numel=2)
    corrected = []
    for _ in range(4):
        given = feedback.corrected("g", x)
        corrected.append(given[1].item())
        feedback.note("g", given, *quantize(given, spec), spec)
    assert corrected[0] == corrected[3] == pytest.approx(0.4)  # the third note forgot
    assert corrected[1] == pytest.approx(0.8, abs=0.01)


def test_states_of_different_keys_do_not_mix() -> None:
    feedback, spec = ErrorFeedback(), BlockQuant(bits=2, block_numel=2)
    x = torch.tensor([1.0, 0.4])
    feedback.note("a", x, *quantize(x, spec), spec)
    assert torch.equal(feedback.corrected("b", x), x)
    assert not torch.equal(feedback.corrected("a", x), x)


def test_an_overflow_does_not_stay_in_the_state() -> None:
    feedback, spec = ErrorFeedback(), BlockQuant(bits=4, block_numel=2)
    x = torch.tensor([float("inf"), 1.0])
    feedback.note("g", x, *quantize(x, spec), spec)
    assert feedback.corrected("g", torch.ones(2)).isfinite().all()


def test_states_are_saved_and_go_on() -> None:
    feedback, spec = ErrorFeedback(), BlockQuant(bits=4, block_numel=2)
    x = torch.tensor([1.0, 0.1, 0.7])
    feedback.note(("g", 0), x, *quantize(x, spec), spec)
    again = ErrorFeedback()
    again.load_state_dict(feedback.state_dict(num_ranks=2), num_ranks=2)
    assert torch.equal(again.corrected(("g", 0), x), feedback.corrected(("g", 0), x))
    assert again.num_bytes == feedback.num_bytes > 0


def test_states_of_another_number_of_ranks_begin_at_zero_and_it_is_said() -> None:
    feedback, spec = ErrorFeedback(), BlockQuant(bits=4, block_numel=2)
    x = torch.tensor([1.0, 0.1])
    feedback.note("g", x, *quantize(x, spec), spec)
    again = ErrorFeedback()
    with pytest.warns(RuntimeWarning, match="errors are those of 2 ranks, this group has 3"):
        again.load_state_dict(feedback.state_dict(num_ranks=2), num_ranks=3)
    assert torch.equal(again.corrected("g", x), x)


def with_states(*keys: tuple[object, ...]) -> tuple[ErrorFeedback, Tensor]:
    feedback, spec = ErrorFeedback(), BlockQuant(bits=4, block_numel=2)
    x = torch.tensor([1.0, 0.1, 0.7])
    for key in keys:
        feedback.note(key, x, *quantize(x, spec), spec)
    return feedback, x


def test_the_states_of_one_owner_become_tensors_and_come_back() -> None:
    feedback, x = with_states((0, (3, 1), "all", 2), (1, None, "all", 2))
    saved = feedback.tensors(0)
    assert all(tensor.dim() == 1 for tensor in saved.values())
    again, _ = with_states((5, "old"), (6, "other"))
    again.load_tensors(saved, 5)
    expected = feedback.corrected((0, (3, 1), "all", 2), x)
    assert torch.equal(again.corrected((5, (3, 1), "all", 2), x), expected)
    assert torch.equal(again.corrected((5, "old"), x), x)
    assert not torch.equal(again.corrected((6, "other"), x), x)
    assert len(again.tensors(5)) == len(saved) == 3


def test_keys_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(TypeError, match=r"key \(<object object.*cannot be saved"):
        with_states((0, object()))[0].tensors(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"(1,).codes": None}, r"state \(1,\) is not whole"),
        ({"(1,).scales": torch.ones(7)}, r"state \(1,\) is not of 3 elements"),
        ({"(1,).counts": torch.tensor([3])}, r"state \(1,\) is not whole"),
        ({"1 +.codes": torch.ones(1)}, r"no state is called '1 \+\.codes'"),
        ({"(1,).others": torch.ones(1)}, r"no state is called"),
    ],
)
def test_states_that_are_damaged_are_refused_and_nothing_changes(
    changes: dict[str, Tensor | None], message: str
) -> None:
    feedback, x = with_states((0, 1))
    before = feedback.corrected((0, 1), x)
    changed = {**feedback.tensors(0), **changes}
    with pytest.raises(ValueError, match=message):
        feedback.load_tensors({k: v for k, v in changed.items() if v is not None}, 0)
    assert torch.equal(feedback.corrected((0, 1), x), before)


@pytest.mark.parametrize("beta", [-0.1, 1.0, float("nan")])
def test_weights_of_the_past_that_cannot_be_are_refused(beta: float) -> None:
    with pytest.raises(ValueError, match="beta must be at least 0 and below 1, got"):
        ErrorFeedback(beta=beta)


@pytest.mark.parametrize("reset_steps", [0, -1, 2.5, True])
def test_resets_that_cannot_be_are_refused(reset_steps: int) -> None:
    with pytest.raises(ValueError, match="reset_steps must be a whole number from 1 on, got"):
        ErrorFeedback(reset_steps=reset_steps)


def test_feedback_without_codes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"feedback corrects quantized gradients; give grads="):
        QuantizedWire(feedback=ErrorFeedback())


def test_feedback_without_a_key_is_refused(rank_pools: RankPools) -> None:
    pool = rank_pools(1)
    assert "error feedback needs a key" in pool.run(reduce_without_key)[0]


def reduce_without_key(rank: int) -> str:
    wire = QuantizedWire(grads=INT4, feedback=ErrorFeedback())
    try:
        wire.reduce_scatter(torch.empty(4), torch.ones(4), group=wires.world())
    except ValueError as error:
        return str(error)
    return ""
