"""Saving and loading through an engine, on the same and on other ranks."""

from __future__ import annotations

import functools
import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as torch_schedules

import plait
from engine_reference import check_same, small_model, square_loss
from plait._json_state import decode, encode
from ranktest import RankError, RankPools
from zero_partition import CheckpointError, OrderError

NUM_MICRO = 12  # a global batch of as many samples, shared out among the ranks


def start(
    *, stage: int = 2, accumulation_steps: int = 1, scheduler: Any = None, bf16: bool = False
) -> Any:
    config: dict[str, Any] = {
        "train_batch_size": NUM_MICRO * accumulation_steps,
        "gradient_accumulation_steps": accumulation_steps,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    }
    if scheduler is None:
        params = {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_max_lr": 0.05}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": params}
    return plait.initialize(model=small_model(), lr_scheduler=scheduler, config=config)[0]


def train(engine: Any, micro_steps: range) -> list[list[float]]:
    rates = []
    for micro in micro_steps:
        rates.append(engine.get_lr())
        engine.backward(square_loss(engine, micro, engine.global_rank))
        engine.step()
    return rates


def milestones(optimizer: torch.optim.Optimizer) -> Any:
    return torch_schedules.MultiStepLR(optimizer, [1, 3, 3, 4], gamma=0.5)


def halves(optimizer: torch.optim.Optimizer) -> Any:
    return torch_schedules.LambdaLR(optimizer, lambda update: 0.5**update)


SCHEDULERS = {"json": None, "milestones": milestones, "lambda": halves}


def save_half_way(rank: int, folder: str, name: str) -> tuple[Any, Any]:
    engine = start(stage=3, scheduler=SCHEDULERS[name])
    train(engine, range(3))
    assert engine.save_checkpoint(folder, client_state={"epoch": 1, "seen": [1, {"a": None}]})
    rates = train(engine, range(3, 6))
    return engine.module_state_dict(), rates


def resume(rank: int, folder: str, name: str, stage: int) -> tuple[Any, Any]:
    engine = start(stage=stage, scheduler=SCHEDULERS[name])
    path, client_state = engine.load_checkpoint(folder)
    assert path == f"{folder}/global_step3"
    assert client_state == {"epoch": 1, "seen": [1, {"a": None}]}
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (3, 3, 36)
    rates = train(engine, range(3, 6))
    return engine.module_state_dict(), rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_run_is_the_undisturbed_one(
    rank_pools: RankPools, tmp_path: Path, name: str
) -> None:
    (expected, rates), _ = rank_pools(2).run(save_half_way, str(tmp_path), name)
    assert (tmp_path / "latest").read_text() == "global_step3"
    for stage in (0, 2):
        for state, resumed_rates in rank_pools(2).run(resume, str(tmp_path), name, stage):
            check_same(expected, state)
            assert resumed_rates == rates


def resume_elsewhere(rank: int, folder: str, stage: int) -> tuple[Any, Any]:
    engine = start(stage=stage)
    engine.load_checkpoint(folder, tag="global_step3")
    return engine.module_state_dict(), engine.get_lr()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_checkpoint_loads_on_another_number_of_ranks(
    rank_pools: RankPools, tmp_path: Path, num_ranks: int
) -> None:
    rank_pools(2).run(save_half_way, str(tmp_path), "json")
    got = [
        result
        for stage in (1, 3)
        for result in rank_pools(num_ranks).run(resume_elsewhere, str(tmp_path), stage)
    ]
    for state, rates in got:
        check_same(got[0][0], state)
        assert rates == [0.05]


def within_a_window(rank: int, folder: str) -> None:
    engine = start(accumulation_steps=3)
    train(engine, range(3))
    whole = engine.module_state_dict()
    train(engine, range(3, 5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.save_checkpoint(folder, tag="middle")
    said = [str(warning.message) for warning in caught]
    assert len(said) == (rank == 0)
    assert all("after 2 micro-batches of an update: their gradients are not" in s for s in said)
    train(engine, range(5, 6))
    expected = engine.module_state_dict()

    train(engine, range(6, 7))  # another window begins, and another backward
    engine.backward(square_loss(engine, 7, rank))
    engine.load_checkpoint(folder)
    check_same(whole, engine.module_state_dict())
    with pytest.raises(OrderError, match="no backward since the latest step"):
        engine.step()
    assert (engine.micro_steps, engine.global_steps) == (3, 1)
    train(engine, range(3, 6))
    assert engine.global_steps == 2
    check_same(expected, engine.module_state_dict())


def test_a_window_that_had_begun_begins_anew_after_loading(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools(2).run(within_a_window, str(tmp_path))


def parts(rank: int, folder: str) -> None:
    engine = start()
    train(engine, range(3))
    engine.save_checkpoint(folder, client_state={"note": "x"})
    saved, rates = engine.module_state_dict(), engine.get_lr()

    fresh = start()
    path, client_state = fresh.load_checkpoint(folder, load_module_only=True)
    assert (path, client_state) == (f"{folder}/global_step3", {"note": "x"})
    check_same(saved, fresh.module_state_dict())
    assert fresh.global_steps == 0
    assert fresh.get_lr() == [0.0] != rates

    no_schedule = start()
    no_schedule.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert no_schedule.global_steps == 3
    assert no_schedule.get_lr() == [0.0]

    no_optimizer = start()
    no_optimizer.load_checkpoint(folder, load_optimizer_states=False)
    assert no_optimizer.get_lr() == rates
    assert not no_optimizer.optimizer.state

    constant = start(scheduler=halves)
    with pytest.raises(CheckpointError, match=r"the schedule of a \w+, this engine has a LambdaLR"):
        constant.load_checkpoint(folder)
    check_same(small_model().state_dict(), constant.module_state_dict())
    constant.load_checkpoint(folder, load_lr_scheduler_states=False)


def test_parts_of_a_checkpoint_can_be_left_out(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools(2).run(parts, str(tmp_path))


def nothing_there(rank: int, folder: str) -> None:
    engine = start()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert engine.load_checkpoint(folder) == (None, None)
    assert len(caught) == (rank == 0)
    assert all("has no file 'latest', so nothing was loaded" in str(w.message) for w in caught)
    engine.save_checkpoint(folder, tag=7, save_latest=False)
    assert not (Path(folder) / "latest").exists()
    with pytest.raises(CheckpointError, match=r"/8 is not a complete checkpoint; there are 7 in "):
        engine.load_checkpoint(folder, tag=8)
    with pytest.raises(CheckpointError, match=r"is a checkpoint itself; .*tag='7'\)"):
        engine.load_checkpoint(f"{folder}/7")
    assert engine.load_checkpoint(folder, tag=7) == (f"{folder}/7", {})


def test_a_missing_checkpoint_is_said(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools(2).run(nothing_there, str(tmp_path))


def replaced(rank: int, folder: str) -> None:
    engine = start()
    train(engine, range(1))
    engine.save_checkpoint(folder, tag="best")
    train(engine, range(1, 2))
    engine.save_checkpoint(folder, tag="best")
    state = engine.module_state_dict()
    other = start(stage=0)
    other.load_checkpoint(folder)
    check_same(state, other.module_state_dict())


def test_a_tag_is_replaced(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools(2).run(replaced, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest"]


DEEPSPEED = {
    "stage 0": ["mp_rank_00_model_states.pt"],
    "stage 2": ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"],
    "stage 3": [
        "zero_pp_rank_0_mp_rank_00_model_states.pt",
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
    ],
    "pipeline": ["layer_00-model_00-model_states.pt"],
}


def deepspeeds_own(rank: int, folder: str) -> None:
    engine = start()
    for load_dir, tag in (
        (folder, None),
        (folder, "global_step9"),
        (f"{folder}/global_step9", None),
    ):
        with pytest.raises(CheckpointError, match=r"DeepSpeed wrote .*zero_to_fp32\.py .*load_mod"):
            engine.load_checkpoint(load_dir, tag)


@pytest.mark.parametrize("name", DEEPSPEED)
def test_a_checkpoint_of_deepspeeds_own_is_named_as_such(
    rank_pools: RankPools, tmp_path: Path, name: str
) -> None:
    (tmp_path / "latest").write_text("global_step9")
    (tmp_path / "global_step9").mkdir()
    for file in DEEPSPEED[name]:
        (tmp_path / "global_step9" / file).touch()
    rank_pools(2).run(deepspeeds_own, str(tmp_path))


def of_another_program(rank: int, folder: str) -> None:
    engine = start()
    engine.zero.save(f"{folder}/step-1", engine.optimizer, state={"step": 1})
    with pytest.raises(
        CheckpointError, match=r"was not saved by an engine .*load_module_only=True"
    ):
        engine.load_checkpoint(folder, tag="step-1")
    assert engine.load_checkpoint(folder, tag="step-1", load_module_only=True)[1] == {}


def test_a_checkpoint_of_another_program_gives_its_parameters(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    rank_pools(2).run(of_another_program, str(tmp_path))


def refused(rank: int, folder: str) -> None:
    engine = start()
    for client_state, message in (
        ({"a": [1, {"b": torch.zeros(2)}]}, r"client_state\['a'\]\[1\]\['b'\]: .* got Tensor; "),
        ({"a": (1, 2)}, r"client_state\['a'\]: expected what JSON has .* got tuple; write a list"),
        ({"a": {1: 2}}, r"client_state\['a'\]: expected keys that are text, got 1"),
        ([1], "client_state: expected a dict, got list"),
    ):
        with pytest.raises(TypeError, match=message):
            engine.save_checkpoint(folder, client_state=client_state)
    for tag in ("", "latest", "/tmp/x", "../x"):
        with pytest.raises(ValueError, match="tag: expected a folder's name below save_dir"):
            engine.save_checkpoint(folder, tag=tag)
    with pytest.raises(ValueError, match="exclude_frozen_parameters=True is not built"):
        engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    with pytest.raises(ValueError, match="load_module_strict=False is not built"):
        engine.load_checkpoint(folder, load_module_strict=False)
    with pytest.raises(ValueError, match="custom_load_fn is not built"):
        engine.load_checkpoint(folder, custom_load_fn=print)
    with pytest.raises(ValueError, match="would hold torch's format"):
        engine.save_16bit_model(folder, "model.safetensors")
    assert list(Path(folder).iterdir()) == []


def test_what_cannot_be_saved_or_loaded_is_refused(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools(2).run(refused, str(tmp_path))


class Stubborn:
    """A schedule whose state is no JSON."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.seen = {"of": [optimizer]}

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def stubborn(rank: int, folder: str) -> None:
    engine = start(scheduler=Stubborn)
    with pytest.raises(TypeError, match=r"lr_scheduler.state_dict\(\)\['of'\]\[0\]: expected what"):
        engine.save_checkpoint(folder)


def test_a_schedule_that_is_no_json_is_refused(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools(1).run(stubborn, str(tmp_path))


def write_whole(rank: int, folder: str, stage: int, bf16: bool) -> Any:
    engine = start(stage=stage, bf16=bf16)
    train(engine, range(2))
    assert engine.save_16bit_model(folder)
    assert engine.save_16bit_model(f"{folder}/deeper", save_filename="w.bin")
    return engine.module_state_dict()


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights_are_written_for_torch_load(
    rank_pools: RankPools, tmp_path: Path, stage: int, bf16: bool
) -> None:
    expected, _ = rank_pools(2).run(write_whole, str(tmp_path), stage, bf16)
    for path in (tmp_path / "pytorch_model.bin", tmp_path / "deeper" / "w.bin"):
        state = torch.load(path, weights_only=True)
        check_same(expected, state)
        assert {v.dtype for v in state.values()} == {torch.bfloat16 if bf16 else torch.float32}
        plain: nn.Module = small_model()
        plain.load_state_dict(state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deeper", "pytorch_model.bin"]


def trained_only(rank: int, folder: str) -> None:
    model = small_model()
    model[0].weight.requires_grad_(requires_grad=False)
    config = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = plait.initialize(model=model, config=config)
    engine.save_16bit_model(folder, exclude_frozen_parameters=True)
    state = torch.load(f"{folder}/pytorch_model.bin", weights_only=True)
    assert engine.module_state_dict().keys() - state.keys() == {"0.weight"}
    engine.load_module_state_dict(state, strict=False)


def test_frozen_parameters_can_be_left_out(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools(1).run(trained_only, str(tmp_path))


def cannot_write(rank: int, folder: str) -> None:
    engine = start()
    with pytest.raises(OSError, match="file"):
        engine.save_16bit_model(folder)


def test_rank_0s_failure_to_write_reaches_all(rank_pools: RankPools, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    rank_pools(2).run(functools.partial(cannot_write, folder=str(tmp_path / "file")))


def only_rank_0_saves(rank: int, folder: str) -> None:
    engine = start()
    if rank == 0:
        engine.save_checkpoint(folder)
    else:
        train(engine, range(1))


def test_a_save_on_one_rank_alone_is_an_error_and_no_hang(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match="the ranks are at different places: rank 1 is at the end"):
        rank_pools(2).run(only_rank_0_saves, str(tmp_path), limit_s=10.0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("!kind"), inner)
        | st.dictionaries(st.integers() | st.text(), inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=20,
)


@given(value=JSON)
def test_a_schedules_state_comes_back_from_json_as_it_was(value: Any) -> None:
    back = decode(json.loads(json.dumps(encode(value, "state"))))
    assert back == value
    assert type(back) is type(value)
