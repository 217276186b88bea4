"""What `plait.initialize` reads: optimizer, schedule, batch sizes, and whole configurations."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from deepspeed_configs import CONFIGS
from plait import ConfigError, read_config
from plait._config import TrainingConfig
from plait._config_read import read_config_and_fates, read_training_config
from plait._fates import Became, Fate
from plait._keys import KEYS_BY_PATH
from plait._schedule_warmups import WarmupLR


def read(tree: Mapping[str, Any], **given: bool) -> tuple[TrainingConfig, dict[str, Fate]]:
    config, fates = read_training_config(tree, num_ranks=4, **given)
    return config, {fate.path: fate for fate in fates}


def problems_in(tree: dict[str, Any], **given: bool) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tree, **given)
    return [str(problem) for problem in caught.value.problems]


def test_an_optimizer_and_a_schedule_that_are_passed_win_and_the_file_s_are_not_read() -> None:
    tree = {
        "train_batch_size": 8,
        "optimizer": {"type": "Lamb", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
    }
    config, fates = read(tree, optimizer_given=True, scheduler_given=True)
    assert (config.optimizer, config.scheduler) == (None, None)
    for name, kind in (("optimizer", "Lamb"), ("scheduler", "WarmupDecayLR")):
        assert fates[name] == Fate(
            name, kind, Became.OFF, "the one passed to plait.initialize wins"
        )
    assert [said.partition(":")[0] for said in problems_in(tree)] == [
        "optimizer.type",
        "optimizer.params.lr",
        "scheduler.params.total_num_steps",
    ]


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (
            {"type": "WarmupDecayLR"},
            (
                "scheduler.params.total_num_steps: WarmupDecayLR needs it; write the number of "
                "updates the training will make"
            ),
        ),
        (
            {"type": "WarmupCosineLR", "params": {"total_num_steps": None}},
            (
                "scheduler.params.total_num_steps: WarmupCosineLR needs it; write the number of "
                "updates the training will make"
            ),
        ),
        (
            {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}},
            (
                'scheduler.params.total_num_steps: "auto" has no source here: write the value, '
                'got "auto"'
            ),
        ),
        (
            {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
            (
                'scheduler.params.warmup_num_steps: "auto" has no source here: write the value, '
                'got "auto"'
            ),
        ),
        (
            {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}},
            "scheduler.params.cycle_max_lr: OneCycle needs it; write it",
        ),
        ({"params": {}}, "scheduler.type: no type is given; write one, such as WarmupLR"),
    ],
)
def test_a_schedule_without_what_it_needs_is_an_error_that_names_it(
    scheduler: dict[str, Any], message: str
) -> None:
    assert problems_in({"train_batch_size": 8, "scheduler": scheduler}) == [message]


def test_the_command_fills_in_the_length_of_the_run() -> None:
    overrides = ["scheduler.type=WarmupDecayLR", "scheduler.params.total_num_steps=auto"]
    _, fates = read_config_and_fates(overrides=[*overrides, "run.steps=77"])
    path = "scheduler.params.total_num_steps"
    assert Fate(path, 77, Became.DERIVED, "auto: the length of the run") in fates


def test_a_momentum_must_stay_below_one_as_long_as_the_run_is_known_to_be() -> None:
    params = ["cycle_min_lr=0.1", "cycle_max_lr=1.0", "cycle_first_step_size=5"]
    params += ["decay_step_size=10", "decay_mom_rate=0.1"]
    overrides = ["optimizer.type=AdamW", "scheduler.type=OneCycle"]
    overrides += [f"scheduler.params.{param}" for param in params]
    with pytest.raises(ConfigError) as caught:
        read_config(overrides=[*overrides, "run.steps=22"])
    assert [str(problem) for problem in caught.value.problems] == [
        (
            "scheduler.params.decay_mom_rate: the momentum reaches 1 at update 22 of 22 "
            "(run.steps), got 0.1 (--set)"
        )
    ]
    read_config(overrides=[*overrides, "run.steps=21"])
    read_config(overrides=[*overrides, "run.steps=22", "scheduler.params.cycle_momentum=false"])
    read_config(overrides=[*overrides, "run.steps=22", "optimizer.type=SGD"])


def test_a_schedule_without_an_optimizer_is_not_said_to_be_honoured() -> None:
    tree = {"train_batch_size": 8, "scheduler": {"type": "WarmupLR", "params": {}}}
    config, fates = read_training_config(tree, num_ranks=1)
    assert config.scheduler is None
    said = Fate("scheduler", "WarmupLR", Became.OFF, "there is no optimizer to schedule")
    assert said in fates


@pytest.mark.parametrize(
    ("betas", "said"),
    [
        (["0,9", "0,999"], "[0.9, 0.999]"),
        ("0,9; 0,999", "[0.9, 0.999]"),
        ("[0,9; 0,999]", "[0.9, 0.999]"),
        ([0, 9, 0, 999], "[0.9, 0.999]"),
        (["0,9", 0.999], "[0.9, 0.999]"),
    ],
)
def test_decimal_commas_of_betas_are_said_however_they_are_quoted(betas: object, said: str) -> None:
    tree = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"betas": betas}}}
    (problem,) = problems_in(tree)
    assert problem.endswith(f"; a decimal number has a point: write {said}")


@pytest.mark.parametrize(
    ("value", "hint"), [("true", "; write true without quotes"), ("\u0663", ""), ("yes", "")]
)
def test_a_quoted_value_is_given_back_only_where_json_has_it(value: str, hint: str) -> None:
    for tree in ({"bf16": {"enabled": value}}, {"seed": value}):
        (problem,) = problems_in(tree | {"train_batch_size": 8})
        is_flag = "bf16" in tree
        assert problem.endswith(f'got "{value}"' + (hint if is_flag else ""))


def test_a_warm_up_of_no_updates_counts_as_two_as_in_deepspeed() -> None:
    rates = [WarmupLR(warmup_num_steps=num_steps)(1, 0.5) for num_steps in (0, 1, 2)]
    assert rates[0] == rates[1] == rates[2]
    params = {"warmup_num_steps": 0}
    tree = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW"},
        "scheduler": {"type": "WarmupLR", "params": params},
    }
    config, _ = read_training_config(tree, num_ranks=1)
    assert config.scheduler is not None
    assert config.scheduler.params["warmup_num_steps"] == 0


def test_a_momentum_to_move_needs_an_optimizer_with_betas() -> None:
    tree = {
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {
            "type": "OneCycle",
            "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_momentum": True},
        },
    }
    assert problems_in(tree) == [
        "scheduler.params.cycle_momentum: SGD has no betas to move, got true; write false"
    ]


@pytest.mark.parametrize(
    ("params", "option"),
    [
        ({"bias_correction": True, "fp32_optimizer_states": True, "max_grad_norm": 0}, None),
        ({"bias_correction": False}, "bias_correction"),
        ({"fp32_optimizer_states": False}, "fp32_optimizer_states"),
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
        ({"freeze_step": 400}, "freeze_step"),
        ({"lr": "auto"}, "lr"),
        ({"weight_decay": "auto"}, "weight_decay"),
        ({"betas": "auto", "eps": "auto"}, None),
        ({"lr": "1e-4"}, "lr"),
        ({"betas": [0.9, 0, 999]}, "betas"),
    ],
)
def test_options_of_the_optimizer_are_honoured_or_refused_by_name(
    params: dict[str, object], option: str | None
) -> None:
    tree = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": params}}
    if option is None:
        _, fates = read(tree)
        assert {f"optimizer.params.{name}" for name in params} <= set(fates)
    else:
        (said,) = problems_in(tree)
        assert said.startswith(f"optimizer.params.{option}: ")


def test_the_number_of_ranks_a_config_was_made_for_is_checked() -> None:
    assert problems_in({"train_batch_size": 8, "data_parallel_size": 8}) == [
        "data_parallel_size: expected 4, the number of ranks (the process group), got 8"
    ]
    assert problems_in(CONFIGS["for a set number of ranks"][0]) == [
        (
            "train_batch_size: train_batch_size 256 (the config passed in) is not "
            "train_micro_batch_size_per_gpu 8 (the config passed in) x gradient_accumulation_steps "
            "4 (the config passed in) x 4 ranks (the process group) = 128; leave one of them out"
        )
    ]


def test_without_a_batch_size_initialize_asks_for_one() -> None:
    assert problems_in({"gradient_accumulation_steps": 2}) == [
        (
            "train_batch_size: nothing says how many samples an update has; write train_batch_size "
            "or train_micro_batch_size_per_gpu as a number"
        )
    ]


def test_what_is_passed_in_may_be_any_mapping_of_what_json_has() -> None:
    config, _ = read(MappingProxyType({"train_batch_size": 8, "bf16": MappingProxyType({})}))
    assert config.batch.micro_batch_size == 2
    assert problems_in({"train_batch_size": 8, "seed": {7}}) == [
        "not JSON: it holds {7}, of type set"
    ]


def test_the_command_s_sections_are_taken_by_initialize_and_checked() -> None:
    _, fates = read({"train_batch_size": 8, "run": {"steps": 5}})
    assert fates["run.steps"] == Fate("run.steps", 5, Became.OFF, "of plait train alone")
    assert len(problems_in({"train_batch_size": 8, "run": {"stepz": 5}})) == 1
    (said,) = problems_in({"train_batch_size": 8, "model": {"hidden_size": 30}})
    assert said == "model.hidden_size: expected a multiple of model.num_heads, 4, got 30"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_configuration_reads_or_is_refused_for_exactly_these_keys(name: str) -> None:
    tree, refused = CONFIGS[name]
    if refused:
        with pytest.raises(ConfigError) as caught:
            read(tree)
        assert sorted(problem.path for problem in caught.value.problems) == sorted(refused)
    else:
        assert set(leaves(tree)) <= set(read(tree)[1])


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Every key of a tree; the inside of a feature that is off as a whole counts as one."""
    found = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        deeper = isinstance(value, dict) and path not in KEYS_BY_PATH and name != "params"
        if name == "params":
            found += [f"{path}.{inner}" for inner in value]
        else:
            found += leaves(value, f"{path}.") if deeper else [path]
    return found
