"""Checkpoints of an engine that are damaged: said as such, and nothing is loaded of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from engine_reference import small_model, square_loss
from ranktest import RankPools
from zero_partition import CheckpointError

TAG = "global_step1"
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}
ONE_CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}
RATES = {"num_steps": 1, "base_lrs": [0.1]}


def start(scheduler: dict[str, Any] | None = WARMUP) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "scheduler": scheduler,
    }
    return plait.initialize(model=small_model(), config=config)[0]


def saved(folder: Path) -> None:
    engine = start()
    engine.backward(square_loss(engine, 0, engine.global_rank))
    engine.step()
    engine.save_checkpoint(folder)


def check_refused(engine: Any, folder: Path, match: str, **options: Any) -> None:
    """Loading is an error on every rank, and changes nothing."""
    before = engine.module_state_dict()
    rates = engine.get_lr()
    with pytest.raises(CheckpointError, match=match):
        engine.load_checkpoint(folder, **options)
    after = engine.module_state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert (engine.global_steps, engine.get_lr()) == (0, rates)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the state within the index, as a careless editor of it does."""
    path = folder / TAG / "index.json"
    index = json.loads(path.read_text())
    change(index["state"])
    path.write_text(json.dumps(index))


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no counts": lambda state: state.update(engine=None),
    "a count is missing": lambda state: state["engine"].pop("micro_steps"),
    "a count is text": lambda state: state["engine"].update(global_steps="7"),
    "no schedule's name": lambda state: state.update(lr_scheduler=[]),
    "an empty schedule": lambda state: state.update(lr_scheduler=["WarmupLR", {}]),
    "rates are text": lambda state: state["lr_scheduler"][1].update(base_lrs=["a"]),
    "other groups": lambda state: state["lr_scheduler"][1].update(base_lrs=[1.0, 2.0]),
}


def damaged(rank: int, folder: str) -> None:
    for name, change in DAMAGE.items():
        path = Path(folder) / name
        saved(path)
        if rank == 0:
            rewrite(path, change)
        match = "not the state of|the schedule had 2 parameter groups, this one has 1"
        check_refused(start(), path, match)


def test_a_damaged_state_is_refused_before_anything_is_loaded(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools(2).run(damaged, str(tmp_path))


def other_rules(rank: int, folder: str) -> None:
    path = Path(folder)
    saved(path)
    engine = start(ONE_CYCLE)
    check_refused(engine, path, "holds the schedule of a WarmupLR, this engine has a OneCycle")
    engine.load_checkpoint(path, load_lr_scheduler_states=False)
    assert engine.global_steps == 1


def test_a_schedule_of_the_configuration_is_known_by_its_type(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools(2).run(other_rules, str(tmp_path))


def no_rule(rank: int, folder: str) -> None:
    path = Path(folder)
    saved(path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = start(None)
        engine.load_checkpoint(path)
    assert len(told) == (rank == 0)
    for warning in told:
        assert "holds the schedule of a WarmupLR, this engine has none: its" in str(warning.message)
        assert f"stay at {engine.get_lr()}" in str(warning.message)


def test_rates_that_stand_still_for_want_of_a_schedule_are_said(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools(2).run(no_rule, str(tmp_path))


def names(rank: int, folder: str) -> None:
    engine, path = start(), Path(folder)
    for tag in ("", ".", "..", "../x", "/x", "latest", "latest/x", " a", "a\n", "a\0b"):
        with pytest.raises(ValueError, match="tag: expected a folder's name below save_dir"):
            engine.save_checkpoint(path, tag=tag)
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(ValueError, match="client_state: it holds itself"):
        engine.save_checkpoint(path, client_state=endless)
    engine.save_checkpoint(path, tag="epoch 1/best")
    assert engine.load_checkpoint(path)[0] == str(path / "epoch 1/best")
    for content, match in ((b"\xff\xfe", "latest cannot be read: 'utf-8' codec"), (b"", "empty")):
        (path / "latest").write_bytes(content)
        check_refused(start(), path, match)


def test_a_tag_is_a_name_that_latest_can_hold(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools(1).run(names, str(tmp_path))


def universal(rank: int, folder: str) -> None:
    inside = Path(folder) / "step1_universal" / "zero" / "weight"
    inside.mkdir(parents=True)
    (inside / "fp32.pt").touch()
    (Path(folder) / "latest").write_text("step1_universal")
    match = r"is a checkpoint that DeepSpeed wrote \(zero/weight/fp32\.pt\)"
    check_refused(start(), Path(folder), match)


def test_a_universal_checkpoint_of_deepspeeds_is_named_as_such(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools(1).run(universal, str(tmp_path))
