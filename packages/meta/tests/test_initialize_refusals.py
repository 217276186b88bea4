"""What `plait.initialize` refuses in its arguments, and that nothing has been changed then."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import nn

import plait
from engine_reference import decay_groups, small_model
from ranktest import RankPools

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
}


def start(model: nn.Module | None = None, **arguments: Any) -> Any:
    config = CONFIG | arguments.pop("config", {})
    model = small_model() if model is None else model
    return plait.initialize(model=model, config=config, **arguments)


def models(rank: int) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="'weight' is on the meta device"):
        start(nn.Linear(3, 1))
    with pytest.raises(ValueError, match="the model has no parameters"):
        start(nn.ReLU(), config={"optimizer": None})
    frozen = nn.Linear(3, 1).requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match="the model has no trainable parameters; give them"):
        start(frozen)
    start(frozen, config={"optimizer": None})  # was left alone, and evaluates
    for stage in range(4):
        config = {"zero_optimization": {"stage": stage}}
        model = small_model()
        start(model, config=config)
        with pytest.raises(ValueError, match=r"'0\.weight' is partitioned already"):
            start(model, config=config)


def test_models_that_cannot_be_trained_are_refused_by_name(rank_pools: RankPools) -> None:
    rank_pools(2).run(models)


def groups(rank: int) -> None:
    params = {"warmup_max_lr": [0.1, 0.2, 0.3]}
    config = {"scheduler": {"type": "WarmupLR", "params": params}}
    model = small_model()
    parameters = decay_groups(model)
    with pytest.raises(ValueError, match="warmup_max_lr: expected 2 numbers, one for each"):
        start(model, model_parameters=parameters, config=config)
    with pytest.raises(ValueError, match="warmup_max_lr: expected 1 number, one for each"):
        start(model, config=config)
    params["warmup_max_lr"] = [0.1, 0.2]
    start(model, model_parameters=parameters, config=config)  # nothing had been changed


def test_rates_for_another_count_of_groups_are_refused_before_anything_is_changed(
    rank_pools: RankPools,
) -> None:
    rank_pools(2).run(groups)


def datasets(rank: int) -> None:
    with pytest.raises(TypeError, match=r"got a dict with the keys 'train', 'test'; pass one"):
        start(training_data={"train": [1, 2], "test": [3]})
    with pytest.raises(TypeError, match="or an IterableDataset, got str"):
        start(training_data="train.txt")


def test_what_is_no_dataset_is_refused_though_it_can_be_indexed(rank_pools: RankPools) -> None:
    rank_pools(2).run(datasets)


def kinds(rank: int) -> None:
    for params, said in (({}, "WarmupLR"), (None, None)):
        section = None if params is None else {"type": "WarmupLR", "params": params}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            start(config={"scheduler": section})
        expected = "optimizer AdamW" + (f", {said}" if said else "")
        assert f"{expected}, gradients clipped" in printed.getvalue()


def test_the_summary_names_the_schedule_as_the_configuration_does(rank_pools: RankPools) -> None:
    rank_pools(1).run(kinds)


def sizes(rank: int) -> None:
    engine, *_ = start()
    for wrong in (True, 8.0, "8"):
        with pytest.raises(TypeError, match="set_train_batch_size: expected a whole number, got"):
            engine.set_train_batch_size(wrong)
    assert engine.train_batch_size() == 4


def test_a_batch_size_is_a_whole_number(rank_pools: RankPools) -> None:
    rank_pools(1).run(sizes)
