"""Wires that keep something from step to step: it goes into checkpoints and comes back."""

from __future__ import annotations

import json
import warnings
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranktest import RankPools
from zero_partition import KeepingWire, Pending, TorchWire, partition


class CountingWire(TorchWire):
    """Keeps how often each buffer was reduced, and what this rank's number is, by group."""

    def __init__(self) -> None:
        self.kept: dict[dist.ProcessGroup, dict[str, Tensor]] = {}
        self.refuses = False

    def open(self, group: dist.ProcessGroup) -> None:
        self.kept.setdefault(group, {})

    @property
    def counts(self) -> dict[str, list[int]]:
        return {name: count.tolist() for each in self.kept.values() for name, count in each.items()}

    def reduce_scatter(
        self,
        out: Tensor,
        contributions: Tensor,
        *,
        group: dist.ProcessGroup,
        key: Hashable = None,
    ) -> Pending:
        count = self.kept[group].setdefault(str(key), torch.tensor([0, dist.get_rank(group)]))
        count[0] += 1
        return super().reduce_scatter(out, contributions, group=group)

    def state_dict(self, *, group: dist.ProcessGroup) -> Mapping[str, Tensor]:
        if self.refuses and dist.get_rank(group) == 1:
            raise TypeError("this cannot be saved")
        return self.kept[group]

    def load_state_dict(self, state: Mapping[str, Tensor], *, group: dist.ProcessGroup) -> None:
        self.kept[group] = dict(state)


KEEPS: KeepingWire = CountingWire()  # checked by mypy


def build(width: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def save(rank: int, folder: str, num_steps: int) -> dict[str, list[int]]:
    model, wire = build(), CountingWire()
    zero = partition(model, stage=2, wire=wire)
    for _ in range(num_steps):
        model(torch.ones(2, 5)).sum().backward()
    zero.save(folder)
    rows = {row.state: row.measured_bytes for row in zero.memory.rows}
    assert rows.get("kept by the wire", 0) == 16 * len(wire.counts)
    return wire.counts


def load(rank: int, folder: str, options: dict[str, Any]) -> tuple[dict[str, list[int]], list[str]]:
    """What the wire keeps afterwards, and what was warned of."""
    wire = CountingWire()
    zero = partition(build(), **({"stage": 2, "wire": wire} | options))
    for kept in wire.kept.values():
        kept["left over"] = torch.tensor([1])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        zero.load(folder)
    return wire.counts, [str(each.message) for each in said]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_rank_gets_its_own_back_at_any_stage(
    rank_pools: RankPools, tmp_path: Path, stage: int
) -> None:
    folder = str(tmp_path / "saved")
    saved = rank_pools(3).run(save, folder, 4)
    found = rank_pools(3).run(load, folder, {"stage": stage})
    for rank, (expected, (counts, said)) in enumerate(zip(saved, found, strict=True)):
        assert counts == expected
        assert counts
        assert {tuple(each) for each in counts.values()} == {(4, rank)}
        assert not said


@pytest.mark.parametrize(
    ("num_ranks", "options", "reason"),
    [
        (2, {}, "that of 3 ranks, and these are 2"),
        (1, {}, "that of 3 ranks, and these are 1"),
        (3, {"bucket_numel": 16}, "that of other units, buckets"),
    ],
)
def test_what_fits_no_more_begins_anew_and_rank_0_says_so(
    rank_pools: RankPools, tmp_path: Path, num_ranks: int, options: dict[str, Any], reason: str
) -> None:
    folder = str(tmp_path / "saved")
    rank_pools(3).run(save, folder, 2)
    found = rank_pools(num_ranks).run(load, folder, options)
    assert [len(said) for _, said in found] == [1, *[0] * (num_ranks - 1)]
    assert reason in found[0][1][0]
    assert all(counts == {} for counts, _ in found)


def test_a_checkpoint_without_it_lets_the_wire_begin_anew(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    rank_pools(2).run(save, folder, 0)
    assert not (tmp_path / "saved" / "wire.safetensors").exists()
    assert rank_pools(2).run(load, folder, {}) == [({}, [])] * 2


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_wire_that_keeps_nothing_passes_it_over(
    rank_pools: RankPools, tmp_path: Path, num_ranks: int
) -> None:
    folder = str(tmp_path / "saved")
    rank_pools(2).run(save, folder, 2)
    found = rank_pools(num_ranks).run(load, folder, {"wire": TorchWire()})
    assert not any(said for _, said in found)


def test_a_damaged_record_is_named(rank_pools: RankPools, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    rank_pools(2).run(save, str(folder), 2)
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"wire": 5}))
    for text in rank_pools(2).run(failed_load, str(folder)):
        assert "damaged: wire is 5" in text


def failed_load(rank: int, folder: str) -> str:
    zero = partition(build(), stage=2, wire=CountingWire())
    with pytest.raises(Exception, match=r".") as caught:
        zero.load(folder)
    return str(caught.value)


def failed_save(rank: int, folder: str) -> str:
    model, wire = build(), CountingWire()
    zero = partition(model, stage=2, wire=wire)
    model(torch.ones(2, 5)).sum().backward()
    wire.refuses = True
    with pytest.raises(Exception, match=r".") as caught:
        zero.save(folder)
    return str(caught.value)


def test_a_state_that_cannot_be_saved_is_everyones_error(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    found = rank_pools(2).run(failed_save, str(tmp_path / "saved"))
    assert all("this cannot be saved" in text for text in found)
    assert not (tmp_path / "saved").exists()
