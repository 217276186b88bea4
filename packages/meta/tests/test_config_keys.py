"""DeepSpeed's keys: each is honoured, decided by plait, or refused by name where it asks."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait import ConfigError
from plait._config import TrainingConfig
from plait._config_read import read_config_and_fates, read_training_config
from plait._fates import Became, Fate
from plait._key import Key, Use, asks_nothing
from plait._keys import ALIASES, DEEPSPEED_KEYS, KEYS_BY_PATH, SECTIONS
from plait._kinds import Anything, Flag, Integer, Number, Object, OneOf, Text, TextList
from plait._optimizer_keys import OPTIMIZER_KEYS
from strategies import json_values

# Keys that at least two of ten projects set in their files.
STARRED = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps steps_per_print
    wall_clock_breakdown gradient_clipping prescale_gradients zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer fp16.enabled fp16.auto_cast fp16.loss_scale
    fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis fp16.min_loss_scale
    bf16.enabled zero_optimization.stage zero_optimization.overlap_comm
    zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
    zero_optimization.reduce_bucket_size zero_optimization.allgather_partitions
    zero_optimization.allgather_bucket_size zero_optimization.sub_group_size
    zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.stage3_param_persistence_threshold
    zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
    zero_optimization.stage3_gather_16bit_weights_on_model_save
    zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.pin_memory
    zero_optimization.offload_param.device zero_optimization.offload_param.pin_memory
    autotuning.enabled autotuning.arg_mappings
"""


def tree_of(path: str, value: object) -> dict[str, Any]:
    tree: dict[str, Any] = {"train_batch_size": 24} if path not in ALL_BATCH else {}
    node = tree
    *sections, name = path.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[name] = value
    if sections == ["optimizer"]:
        node["type"] = "AdamW"
    return tree


ALL_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu")


def read(tree: dict[str, Any], **given: bool) -> tuple[TrainingConfig, dict[str, Fate]]:
    config, fates = read_training_config(tree, num_ranks=4, **given)
    return config, {fate.path: fate for fate in fates}


def problems_in(tree: dict[str, Any], **given: bool) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tree, **given)
    return [str(problem) for problem in caught.value.problems]


def keys_of(use: Use) -> list[Any]:
    return [pytest.param(key, id=key.path) for key in DEEPSPEED_KEYS if key.use is use]


def asking(key: Key) -> object:
    """A value with which a key asks for what is not built."""
    some = {
        Flag: [True, False],
        Integer: [7],
        Number: [7.0],
        Object: [{"mode": "on"}],
        TextList: [["z1"]],
        Anything: [7],
        Text: ["some"],
    }
    kind = key.kind
    values = list(kind.values) if isinstance(kind, OneOf) else some[type(kind)]
    return next(value for value in values if not asks_nothing(key, value))


@pytest.mark.parametrize("path", STARRED.split())
def test_every_starred_key_is_in_the_table(path: str) -> None:
    assert path in KEYS_BY_PATH


@pytest.mark.parametrize("name", ["lr", "betas", "eps", "weight_decay", "torch_adam"])
def test_every_starred_option_of_the_optimizer_is_in_the_table(name: str) -> None:
    assert f"optimizer.params.{name}" in {key.path for key in OPTIMIZER_KEYS}


@pytest.mark.parametrize("key", keys_of(Use.ASKS))
def test_a_key_that_asks_for_what_is_not_built_is_refused_by_name_with_a_remedy(key: Key) -> None:
    value = asking(key)
    assert problems_in(tree_of(key.path, value)) == [
        f"{key.path}: not built yet: {key.meaning}, got {json.dumps(value)}; {key.instead}"
    ]
    assert key.instead


@pytest.mark.parametrize("key", keys_of(Use.ASKS))
def test_a_key_that_asks_for_nothing_is_taken_and_listed_as_off(key: Key) -> None:
    for value in (*key.off, "auto", None):
        fate = read(tree_of(key.path, value))[1][key.path]
        assert (fate.became, fate.value) == (Became.OFF, value)


@pytest.mark.parametrize("key", keys_of(Use.PART))
def test_a_part_of_what_is_off_is_taken_and_says_what_is_off(key: Key) -> None:
    assert KEYS_BY_PATH[key.needs].use is Use.ASKS
    fate = read(tree_of(key.path, "auto"))[1][key.path]
    assert (fate.became, fate.note) == (Became.OFF, f"{key.needs} is off")


@pytest.mark.parametrize("key", keys_of(Use.DECIDED))
def test_a_key_that_plait_decides_itself_is_taken_checked_and_listed(key: Key) -> None:
    plain, _ = read({"train_batch_size": 24})
    taken = [value for value in (True, 10**12, "WARN", ["a"]) if fits(key, value)]
    for value in (*taken, "auto"):
        config, fates = read(tree_of(key.path, value))
        assert config == plain
        assert fates[key.path].became is Became.DECIDED
        assert fates[key.path].note == key.meaning
    assert taken
    wrong = -1 if not isinstance(key.kind, Integer | Number) else "many"
    assert problems_in(tree_of(key.path, wrong))[0].startswith(f"{key.path}: expected ")


def fits(key: Key, value: object) -> bool:
    try:
        key.kind.read(value)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("key", keys_of(Use.HONOURED))
def test_auto_means_the_same_as_leaving_an_honoured_key_out(key: Key) -> None:
    tree = tree_of(key.path, "auto") | {"train_micro_batch_size_per_gpu": 2}
    tree.pop("train_batch_size", None)
    plain, _ = read({"train_micro_batch_size_per_gpu": 2})
    if key.path == "train_micro_batch_size_per_gpu":
        tree = {key.path: "auto", "train_batch_size": 8}
    config, fates = read(tree)
    assert config == plain
    if key.path == "bf16.check_grad_overflow":
        assert fates[key.path].note == "bf16.enabled is off"
    else:
        assert key.path not in fates or fates[key.path].became is Became.DERIVED


@pytest.mark.parametrize("name", ["reduce_bucket_size", "allgather_bucket_size"])
def test_a_bucket_size_is_at_least_one_element_and_may_be_huge(name: str) -> None:
    path = f"zero_optimization.{name}"
    for value in (0, -1, -5e8, 0.5, True, "5e8"):
        (said,) = problems_in(tree_of(path, value))
        assert said.startswith(f"{path}: expected a whole number of at least 1, got ")
    for value in (1, 10**12, 5e8):
        assert read(tree_of(path, value))[0].bucket_numel == int(value)


def test_the_smaller_bucket_size_counts_and_the_fates_say_so() -> None:
    zero = {"reduce_bucket_size": 5e8, "allgather_bucket_size": 2e8}
    config, fates = read({"train_batch_size": 8, "zero_optimization": zero})
    assert config.bucket_numel == 200_000_000
    note = fates["zero_optimization.reduce_bucket_size"].note
    assert note == "messages of at most 200000000 elements; never other bits"
    assert read({"train_batch_size": 8})[0].bucket_numel is None


@pytest.mark.parametrize("alias", sorted(set(ALIASES) - SECTIONS))
def test_another_name_means_the_same_and_both_at_once_are_an_error(alias: str) -> None:
    path = ALIASES[alias]
    if path in SECTIONS:
        alias, path = f"{alias}.enabled", f"{path}.enabled"
    for value in (True, 7):
        if fits(KEYS_BY_PATH[path], value):
            one, fates = read(tree_of(alias, value))
            assert one == read(tree_of(path, value))[0]
            assert alias in fates
            both = tree_of(path, value)
            for name in alias.split(".")[:-1]:
                both.setdefault(name, {})
            section = both
            for name in alias.split(".")[:-1]:
                section = section[name]
            section[alias.rpartition(".")[2]] = value
            assert f"{alias}: the same key as {path}; keep one of them" in "".join(
                problems_in(both)
            )


def test_absent_clipping_is_1_as_in_deepspeed_and_is_told() -> None:
    config, fates = read({"train_batch_size": 8})
    assert config.gradient_clipping == 1.0
    said = fates["gradient_clipping"]
    assert (said.value, said.became) == (1.0, Became.DERIVED)
    assert said.note == "absent: 1.0, as in DeepSpeed"
    assert read({"train_batch_size": 8, "gradient_clipping": 0})[0].gradient_clipping == 0.0


def test_an_absent_stage_is_0_for_initialize_and_3_for_the_command() -> None:
    assert read({"train_batch_size": 8})[0].stage == 0
    config, fates = read_config_and_fates(num_ranks=2)
    assert config.training.stage == 3
    assert Fate("zero_optimization.stage", 3, Became.DERIVED, "absent: the default") in fates


def test_overflow_is_checked_with_bf16_unless_it_says_no() -> None:
    def skips(**bf16: object) -> bool:
        return read({"train_batch_size": 8, "bf16": bf16})[0].skip_nonfinite

    assert (skips(enabled=True), skips(enabled=False), skips()) == (True, False, False)
    assert not skips(enabled=True, check_grad_overflow=False)
    assert not skips(enabled=False, check_grad_overflow=True)


def test_seed_is_another_name_of_the_run_s_and_two_that_differ_are_an_error() -> None:
    def seeds(*overrides: str) -> tuple[int, int | None]:
        config = read_config_and_fates(overrides=overrides)[0]
        return config.run.seed, config.training.seed

    assert seeds("seed=7") == (7, 7)
    assert seeds("run.seed=7") == (7, None)
    assert seeds("seed=7", "run.seed=7") == (7, 7)
    with pytest.raises(ConfigError, match=r"seed: expected 8, as run\.seed has it, got 7"):
        seeds("seed=7", "run.seed=8")


def test_progress_can_be_printed_never() -> None:
    for value in (None, math.inf, "auto"):
        assert read({"train_batch_size": 8, "steps_per_print": value})[0].steps_per_print is None
    assert read({"train_batch_size": 8, "steps_per_print": 1e3})[0].steps_per_print == 1000
    assert len(problems_in({"train_batch_size": 8, "steps_per_print": 0})) == 1


@given(key=st.sampled_from(DEEPSPEED_KEYS), value=json_values())
def test_any_json_value_of_any_key_is_taken_and_listed_or_refused_with_its_path(
    key: Key, value: object
) -> None:
    tree = tree_of(key.path, value)
    try:
        _, fates = read_training_config(tree, num_ranks=1)
    except ConfigError as error:
        refused = {problem.path for problem in error.problems}
    else:
        assert key.path in {fate.path for fate in fates}
        return
    assert "train_batch_size" in refused or any(path.startswith(key.path) for path in refused)
