"""Memory that a backward's buffers lend each other."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from ranktest import RankPools
from wires import wire
from zero_partition import _reductions, partition
from zero_partition._slots import Slots

CPU = torch.device("cpu")


def test_memory_goes_on_to_the_next_buffer_of_its_kind() -> None:
    slots = Slots()
    first = slots.lend(8, torch.float32, CPU)
    slots.take_back(first)
    assert slots.lend(8, torch.float32, CPU).data_ptr() == first.data_ptr()


def test_memory_in_use_or_of_another_kind_is_not_lent() -> None:
    slots = Slots()
    first = slots.lend(8, torch.float32, CPU)
    lent = [first, slots.lend(8, torch.float32, CPU)]
    slots.take_back(first)
    lent += [slots.lend(8, torch.bfloat16, CPU), slots.lend(9, torch.float32, CPU)]
    assert len({buffer.data_ptr() for buffer in lent}) == 4


def test_emptied_slots_hold_nothing() -> None:
    slots = Slots()
    buffer = slots.lend(8, torch.float32, CPU)
    buffer.fill_(1.0)
    slots.take_back(buffer)
    slots.empty()
    assert slots.lend(8, torch.float32, CPU).data_ptr() != buffer.data_ptr()


def test_no_arrivals_are_held_between_backward_and_update() -> None:
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
    partition(model, stage=3)
    before = _bytes_in_tensors()
    for _ in range(2):
        model(torch.ones(2, 40)).sum().backward()
        held = _bytes_in_tensors() - before
        assert held == 4 * 3 * (40 * 40 + 48)  # the sums: one fp32 gradient of everything
        model.zero_grad()


def lent_at_once(rank: int, kind: str, stage: int) -> tuple[int, int]:
    """How many buffers of one length a backward of twelve equal layers uses, and the last one's."""
    _reductions._PATIENCE_S = 20.0  # on a machine that is busy with other things
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
    zero = partition(model, stage=stage, wire=wire(kind))
    slots, seen = zero._reductions._slots, set[int]()
    lend = slots.lend

    def noted(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = lend(numel, dtype, device)
        seen.add(buffer.data_ptr())
        kept.append(buffer)  # or another one might get its address
        return buffer

    kept: list[Tensor] = []
    slots.lend = noted  # type: ignore[method-assign]
    counts = []
    for _ in range(2):
        seen.clear()
        model(torch.ones(2, 64)).sum().backward()
        counts.append(len(seen))
        zero.zero_grad()
    return counts[0], counts[1]


@pytest.mark.parametrize("kind", ["torch", "shared", "small", "nodes"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_holds_the_gradients_of_three_units_and_not_of_all(
    rank_pools: RankPools, kind: str, stage: int
) -> None:
    for first, second in rank_pools(2).run(lent_at_once, kind, stage):
        assert max(first, second) <= 3


def _bytes_in_tensors() -> int:
    gc.collect()
    storages = {
        found.untyped_storage().data_ptr(): found.untyped_storage().nbytes()
        for found in gc.get_objects()
        if type(found) is torch.Tensor
    }
    return sum(storages.values())
