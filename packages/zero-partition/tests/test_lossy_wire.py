"""Wires that deliver other values than were sent: where partition lets them, and where not."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranktest import RankPools
from zero_partition import LossyWire, Pending, TorchWire, Wire, partition


class HalvingWire(TorchWire):
    """Delivers parameters with one bit less; keeps the keys of reductions."""

    def __init__(self) -> None:
        self.exact: Wire = TorchWire()
        self.lossy_gathers = True
        self.keys: list[Hashable] = []

    def all_gather(self, out: Tensor, shard: Tensor, *, group: dist.ProcessGroup) -> Pending:
        return super().all_gather(out, shard.to(torch.bfloat16).to(shard.dtype), group=group)

    def reduce_scatter(
        self,
        out: Tensor,
        contributions: Tensor,
        *,
        group: dist.ProcessGroup,
        key: Hashable = None,
    ) -> Pending:
        self.keys.append(key)
        return super().reduce_scatter(out, contributions, group=group)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def rounded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.bfloat16().float() for name, value in state.items()}


def inspect(rank: int, folder: str) -> tuple[bool, bool, bool, bool]:
    model, exact = build(), build().state_dict()
    coarse = build()
    coarse.load_state_dict(rounded(exact))
    zero = partition(model, stage=3, wire=HalvingWire())
    x = torch.linspace(-1, 1, 10).view(2, 5)
    forward_is_lossy = torch.equal(model(x), coarse(x))
    whole = zero.state_dict()
    state_is_exact = all(torch.equal(whole[name], exact[name]) for name in exact)
    with zero.gathered(modify=True):
        edit_sees_exact = all(
            torch.equal(parameter, exact[name]) for name, parameter in model.named_parameters()
        )
    zero.save(folder)
    again = build()
    nn.init.zeros_(again[0].weight)
    loaded = partition(again, stage=3)
    loaded.load(folder)
    back = loaded.state_dict()
    file_is_exact = all(torch.equal(back[name], exact[name]) for name in exact)
    return forward_is_lossy, state_is_exact, edit_sees_exact, file_is_exact


def test_only_forward_and_backward_see_what_a_lossy_wire_delivers(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    for found in rank_pools(2).run(inspect, str(tmp_path / "saved")):
        assert found == (True, True, True, True)


def steps(rank: int, num_steps: int) -> list[list[Hashable]]:
    model, wire = build(), HalvingWire()
    zero = partition(model, stage=3, wire=wire, bucket_numel=32)
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
    seen = []
    for _ in range(num_steps):
        model(torch.ones(2, 5) * (rank + 1)).sum().backward()
        optimizer.step()
        seen.append(sorted(map(str, wire.keys)))
        wire.keys.clear()
    return seen


def test_every_message_of_a_reduction_has_a_name_that_stays(rank_pools: RankPools) -> None:
    first, second = rank_pools(2).run(steps, 3)
    assert first == second
    assert first[0] == first[1] == first[2]
    assert len(first[0]) == len(set(first[0])) > 2  # several buckets a unit
    assert "None" not in first[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_wire_that_changes_parameters_needs_stage_3(stage: int) -> None:
    model = build()
    with pytest.raises(ValueError, match=f"HalvingWire changes the parameters.*got stage={stage}"):
        partition(model, stage=stage, wire=HalvingWire())
    assert isinstance(HalvingWire(), LossyWire)
    assert model(torch.ones(1, 5)).isfinite().all()  # nothing has been changed
