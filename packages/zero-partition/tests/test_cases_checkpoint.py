"""Saving on some ranks, resuming on others: numbers, names, ties, types, and saves that fail."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from models import BlockSpec, ModelSpec, Moment, build, loss
from ranktest import RankPools, subgroup
from reference import Reference
from training import check_same, whole_states
from twin import STAGES, Twin, numbers, seeded
from zero_partition import CheckpointError, Precision, ZeroError, partition, read_tensor

SPEC = ModelSpec(
    vocab=11,
    dim=5,
    blocks=(BlockSpec(hidden=7), BlockSpec(hidden=7, tied_to=0), BlockSpec(hidden=13)),
    tied_head=True,
)


def spec_loss(step: int, rank: int) -> Callable[[nn.Module, int], Tensor]:
    """The loss of one of four ranks' batches, whoever computes it."""
    return lambda model, _: loss(model, SPEC, Moment(step, 0, rank))


def schedule_of(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    """A rate that every step changes."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


OPTIONS = {"lr": 0.05, "weight_decay": 0.1}


def four_ranks(steps: range, reference: Reference, schedule: Any) -> list[float]:
    """The reference's mean losses over global batches of four."""
    losses = []
    for step in steps:
        found = reference.backward(lambda m, r, s=step: loss(m, SPEC, Moment(s, 0, r)))
        losses.append(float(torch.stack(found).double().mean()))
        reference.clip_grad_norm_(1.0)
        reference.step()
        schedule.step()
    return losses


def uninterrupted(param: torch.dtype | None) -> tuple[Reference, list[float]]:
    """Ten steps in one process."""
    reference = Reference(build(SPEC), 4, param=param)
    optimizer = reference.make_optimizer(torch.optim.AdamW, **OPTIONS)
    return reference, four_ranks(range(10), reference, schedule_of(optimizer))


def train(steps: range, zero: Any, model: nn.Module, optimizer: Any, schedule: Any) -> list[float]:
    """Global batches of four, dealt to however many ranks there are."""
    losses = []
    for step in steps:
        total = torch.zeros((), dtype=torch.float64)
        for index in range(zero.rank, 4, zero.num_ranks):
            value = spec_loss(step, index)(model, zero.rank)
            value.backward()
            total += value.detach()
        zero.finish(4)
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if zero.num_ranks > 1:
            torch.distributed.all_reduce(total)
        losses.append(total.item() / 4)
    return losses


def save_at_5(rank: int, folder: str, stage: int, param: torch.dtype | None) -> list[float]:
    model = build(SPEC)
    zero = partition(model, stage=stage, precision=Precision(param=param))
    optimizer = zero.optimizer(torch.optim.AdamW, **OPTIONS)
    schedule = schedule_of(optimizer)
    losses = train(range(5), zero, model, optimizer, schedule)
    state = {"step": 5, "schedule": schedule.state_dict(), "rank": rank}
    zero.save(f"{folder}/step-5", optimizer, state=state)
    return losses + train(range(5, 10), zero, model, optimizer, schedule)


def resume_at_5(
    rank: int, folder: str, stage: int, param: torch.dtype | None
) -> tuple[list[float], dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    torch.manual_seed(77 + rank)
    model = build(ModelSpec(**{**vars(SPEC), "seed": 5 + rank}))
    zero = partition(model, stage=stage, precision=Precision(param=param), bucket_numel=64)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=9.0)
    schedule = schedule_of(optimizer)
    state = zero.load(f"{folder}/step-5", optimizer)
    schedule.load_state_dict(state["schedule"])
    assert (state["step"], state["rank"]) == (5, 0)
    moments = whole_states(zero, optimizer)
    for name, kept in moments.items():
        check_same(name, load_file(f"{folder}/step-5/optimizer.{name}.safetensors"), kept)
    assert model.head.weight is model.embed.weight
    assert optimizer.param_groups[0]["weight_decay"] == OPTIONS["weight_decay"]
    losses = train(range(5, 10), zero, model, optimizer, schedule)
    return losses, zero.state_dict(), whole_states(zero, optimizer)


# C50, C55


@pytest.mark.parametrize("param", [None, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_four_ranks_resumes_on_any_number_at_any_stage(
    rank_pools: RankPools, tmp_path: Path, stage: int, param: torch.dtype | None
) -> None:
    reference, curve = uninterrupted(param)
    for losses in rank_pools(4).run(save_at_5, str(tmp_path), stage, param):
        assert losses == pytest.approx(curve, rel=1e-12)
    for num_ranks in (4, 3, 2, 1):
        other = (stage + num_ranks) % 4
        found = rank_pools(num_ranks).run(resume_at_5, str(tmp_path), other, param)
        for losses, parameters, states in found:
            if num_ranks == 4:
                assert losses == pytest.approx(curve[5:], rel=1e-12)
                check_same("parameter", reference.parameters(), parameters)
                for key, expected in reference.states().items():
                    check_same(key, expected, states[key])
            elif param is None:
                assert losses == pytest.approx(curve[5:], rel=1e-5)
            else:
                assert losses == pytest.approx(curve[5:], rel=2e-2)


# C52


class Ties(nn.Module):
    """Two unrelated tied pairs, neither first nor last; one across units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)
        self.blocks[2].weight = self.blocks[0].weight
        self.outer.weight = self.inner.weight
        self.last = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in [self.first, *self.blocks, self.inner, self.outer, self.last]:
            x = layer(x).tanh()
        return x


def tied_pairs(rank: int, folder: str) -> None:
    for stage in STAGES:
        path = Path(folder) / f"stage{stage}"
        twin = Twin(seeded(Ties), stage=stage)
        for step in range(2):
            twin.backward(lambda m, r, s=step: m(numbers(2, 5, seed=r + s)).square().sum())
            twin.finish()
            twin.step()
        twin.zero.save(path, twin.optimizer)
        stored = load_file(path / "model.safetensors")
        index = json.loads((path / "index.json").read_text())["tensors"]
        assert not {"blocks.2.weight", "outer.weight"} & set(stored)
        assert index["blocks.0.weight"]["aliases"] == ["blocks.2.weight"]
        assert index["inner.weight"]["aliases"] == ["outer.weight"]
        plain = Ties()
        whole = {n: stored[n] for n in stored}
        whole |= {a: stored[n] for n, entry in index.items() for a in entry["aliases"]}
        plain.load_state_dict(whole, strict=True)
        plain.load_state_dict(twin.zero.state_dict(), strict=True)
        again = seeded(Ties, seed=4)()
        other = partition(again, stage=3 - stage)
        other.load(path)
        assert again.blocks[2].weight is again.blocks[0].weight
        assert again.outer.weight is again.inner.weight
        check_same("parameter", twin.reference.parameters(), other.state_dict())
        assert torch.equal(read_tensor(path, "outer.weight"), stored["inner.weight"])


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_tie_is_stored_once_under_one_name_and_is_a_tie_after_loading(
    rank_pools: RankPools, tmp_path: Path, num_ranks: int
) -> None:
    rank_pools(num_ranks).run(tied_pairs, str(tmp_path))


# C53


def mixed_and_frozen(rank: int, folder: str) -> None:
    parts = frozenset({"norm", "inner"})
    spec = ModelSpec(
        blocks=(
            BlockSpec(dtype="float64", frozen=parts),
            BlockSpec(dtype="bfloat16", hidden=7),
            BlockSpec(frozen=frozenset({"outer", "gain"}), empty=((0, 8),)),
        ),
        empty_last=(0,),
    )
    for stage in STAGES:
        path = Path(folder) / f"stage{stage}"
        twin = Twin(lambda: build(spec), stage=stage)
        twin.backward(lambda m, r: loss(m, spec, Moment(0, 0, r)))
        twin.step()
        twin.zero.save(path, twin.optimizer)
        check_same("stored", twin.reference.parameters(), load_file(path / "model.safetensors"))
        masters = {n for n, p in twin.model.named_parameters() if p.dtype == torch.bfloat16}
        assert set(load_file(path / "master.safetensors")) == masters
        again = build(ModelSpec(**{**vars(spec), "seed": 3}))
        zero = partition(again, stage=3 - stage)
        optimizer = zero.optimizer(torch.optim.AdamW, lr=0.05)
        zero.load(path, optimizer)
        check_same("loaded", twin.reference.parameters(), zero.state_dict())
        twin.model, twin.zero, twin.optimizer = again, zero, optimizer
        twin.backward(lambda m, r: loss(m, spec, Moment(1, 0, r)))
        twin.step()
        twin.check_states()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_frozen_and_trainable_parameters_of_any_type_are_stored_whole_in_their_own_type(
    rank_pools: RankPools, tmp_path: Path, num_ranks: int
) -> None:
    rank_pools(num_ranks).run(mixed_and_frozen, str(tmp_path))


# C57


def save_alone(rank: int, folder: str, other: str) -> str:
    group = subgroup(0, 1, timeout_s=4)
    model = seeded(lambda: nn.Linear(3, 2))()
    zero = partition(model, stage=3, group=group)
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
    try:
        if rank == 0:
            zero.save(f"{folder}/step-1", optimizer)
        elif other == "trains on":
            model(torch.ones(3)).sum().backward()
        elif other == "steps":
            optimizer.step()
    except ZeroError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("other", ["trains on", "steps", "leaves"])
def test_a_save_on_one_rank_alone_is_an_error_within_seconds(
    rank_pools: RankPools, tmp_path: Path, other: str
) -> None:
    messages = rank_pools(2).run(save_alone, str(tmp_path), other, limit_s=20, retire=True)
    assert "save" in messages[0]
    assert "rank 1" in messages[0]
    assert other == "leaves" or "save" in messages[1]
    assert not (tmp_path / "step-1").exists()


# C59, and a disk that is full on one rank


def full_disk(rank: int, folder: str, sick: int) -> str:
    twin = Twin(lambda: build(SPEC), stage=2)
    twin.backward(lambda m, r: loss(m, SPEC, Moment(0, 0, r)))
    twin.step()
    twin.zero.save(f"{folder}/step-1", twin.optimizer, state=1)
    kept = twin.zero.state_dict()
    twin.backward(lambda m, r: loss(m, SPEC, Moment(1, 0, r)))
    twin.step()
    write, count = os.pwrite, 0

    def fails(*args: Any) -> int:
        nonlocal count
        count += 1
        if count > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    writes = os.pwritev
    if rank == sick:
        os.pwrite = fails  # type: ignore[assignment]
        os.pwritev = fails  # type: ignore[assignment]
    try:
        with pytest.raises(CheckpointError) as caught:
            twin.zero.save(f"{folder}/step-2", twin.optimizer, state=2)
    finally:
        os.pwrite, os.pwritev = write, writes
    assert not Path(folder, "step-2").exists()
    assert twin.zero.load(f"{folder}/step-1", twin.optimizer) == 1
    check_same("parameter", kept, twin.zero.state_dict())
    twin.zero.save(f"{folder}/step-2", twin.optimizer, state=2)
    return str(caught.value)


@pytest.mark.parametrize("sick", [0, 1])
def test_a_save_that_fails_on_one_rank_is_an_error_on_all_and_keeps_the_previous_one(
    rank_pools: RankPools, tmp_path: Path, sick: int
) -> None:
    messages = rank_pools(2).run(full_disk, str(tmp_path), sick)
    for message in messages:
        assert "space" in message.lower() or "full" in message.lower(), message
    assert f"rank {sick}" in messages[1 - sick]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


# Checkpoints that do not fit.


def unfit(rank: int, folder: str, fault: str) -> str:
    path = f"{folder}/step-1"
    first = seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))()
    zero = partition(first, stage=3)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=0.1)
    first(torch.ones(3)).sum().backward()
    optimizer.step()
    zero.save(path, optimizer)
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW
    match fault:
        case "missing name":
            model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2))
        case "unexpected name":
            model = nn.Sequential(nn.Linear(3, 5))
        case "other shape":
            model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 2))
        case _:
            model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    if fault == "other optimizer":
        cls = torch.optim.SGD
    other = partition(model, stage=2)
    second = other.optimizer(cls, lr=0.1)
    before = other.state_dict()
    if fault == "exists":
        with pytest.raises(CheckpointError) as caught:
            other.save(path, second)
    else:
        with pytest.raises(CheckpointError) as caught:
            other.load(f"{folder}/nowhere" if fault == "nowhere" else path, second)
    check_same("parameter", before, other.state_dict())
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing name", "2.weight"),
        ("unexpected name", "1.weight"),
        ("other shape", "0.weight"),
        ("other optimizer", "AdamW"),
        ("nowhere", "nowhere"),
        ("exists", "overwrite=True"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing_and_is_named_on_all_ranks(
    rank_pools: RankPools, tmp_path: Path, fault: str, said: str
) -> None:
    for message in rank_pools(2).run(unfit, str(tmp_path), fault):
        assert said in message
