"""What an engine answers, refuses and prints."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import plait
from engine_reference import numbers, small_model, square_loss
from ranktest import RankError, RankPools
from zero_partition import OrderError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 2},
}


def start(**arguments: Any) -> Any:
    """An engine, with what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine, *_ = plait.initialize(**({"model": small_model(), "config": CONFIG} | arguments))
    return engine, printed.getvalue()


def micro_batch(engine: Any, micro: int = 0) -> None:
    engine.backward(square_loss(engine, micro, engine.global_rank))
    engine.step()


def facts(rank: int) -> None:
    engine, _ = start(config=CONFIG | {"gradient_clipping": 2.5})
    assert isinstance(engine, plait.PlaitEngine)
    assert engine.train_batch_size() == 16
    assert engine.train_micro_batch_size_per_gpu() == 4
    assert engine.gradient_accumulation_steps() == 2
    assert engine.get_batch_info() == (16, 4, 2)
    assert engine.gradient_clipping() == 2.5
    assert engine.steps_per_print() is None
    assert (engine.zero_optimization(), engine.zero_optimization_stage()) == (True, 2)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (False, False)
    assert (engine.global_rank, engine.world_size, engine.dp_world_size) == (rank, 2, 2)
    assert engine.device == torch.device("cpu")
    assert engine.get_lr() == [0.05]
    assert engine.get_mom() == [(0.9, 0.999)]
    assert engine.get_global_grad_norm() is None
    assert (engine.lr_scheduler, engine.training_dataloader) == (None, None)
    assert engine.zero.memory is not None
    assert engine.config.stage == 2
    engine.allreduce_gradients()
    engine.destroy()


def test_an_engine_answers_under_deepspeeds_names(rank_pools: RankPools) -> None:
    rank_pools(2).run(facts)


def counts(rank: int) -> list[tuple[int, int, int, bool]]:
    engine, _ = start()
    found = []
    for epoch in range(2):
        for micro in range(3):  # an epoch ends within a window
            engine.train()
            micro_batch(engine, 3 * epoch + micro)
            applied = engine.was_step_applied()
            assert applied is all(p.grad is None for p in engine.parameters())
            found.append((engine.micro_steps, engine.global_steps, engine.global_samples, applied))
        engine.eval()
        with torch.no_grad():
            engine(numbers(2, 3, seed=1))
        assert not engine.module.training
    assert engine.skipped_steps == 0
    return found


def test_a_window_that_an_epochs_end_leaves_open_goes_on(rank_pools: RankPools) -> None:
    for found in rank_pools(2).run(counts):
        assert found == [
            (1, 0, 0, False),
            (2, 1, 16, True),
            (3, 1, 16, False),
            (4, 2, 32, True),
            (5, 2, 32, False),
            (6, 3, 48, True),
        ]


class Talking(nn.Linear):
    """A model with something of its own."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.greeting = "hello"

    def generate(self) -> str:
        return self.greeting


def forwarded(rank: int) -> None:
    engine, _ = start(model=Talking())
    assert engine.generate() == engine.greeting == "hello"
    assert [name for name, _ in engine.named_parameters()] == ["weight", "bias"]
    assert engine.forward(torch.ones(2, 3)).shape == (2, 1)
    with pytest.raises(AttributeError, match=r"neither PlaitEngine nor the Talking .* 'farewell'"):
        _ = engine.farewell
    with pytest.raises(AttributeError, match="no_sync: every backward is reduced"):
        engine.no_sync()
    with pytest.raises(AttributeError, match="train_batch: pipelines are not built"):
        engine.train_batch()


def test_what_the_engine_has_not_is_found_on_the_model(rank_pools: RankPools) -> None:
    rank_pools(1).run(forwarded)


def wrong_calls(rank: int) -> None:
    engine, _ = start()
    with pytest.raises(OrderError, match="no backward since the latest step"):
        engine.step()
    square_loss(engine, 0, rank).backward()  # behind the engine's back
    with pytest.raises(OrderError, match=r"not loss.backward\(\)"):
        engine.step()
    engine.zero_grad()
    with pytest.raises(TypeError, match="expected the loss, a tensor, got tuple"):
        engine.backward((1, 2))
    with pytest.raises(ValueError, match=r"one element, got shape \(4, 1\)"):
        engine.backward(engine(numbers(4, 3, seed=0)))
    with torch.no_grad(), pytest.raises(ValueError, match="does not depend on a trainable"):
        engine.backward(engine(numbers(4, 3, seed=0)).mean())
    micro_batch(engine)
    with pytest.raises(OrderError, match="1 micro-batches of an update are done"):
        engine.set_train_batch_size(32)
    micro_batch(engine)
    with pytest.raises(ValueError, match=r"9 is not a multiple of 4 \(micro-batch\) x 2 \(ranks\)"):
        engine.set_train_batch_size(9)


def test_calls_that_make_no_sense_say_why(rank_pools: RankPools) -> None:
    rank_pools(2).run(wrong_calls)


def retained(rank: int) -> None:
    engine, _ = start()
    loss = square_loss(engine, 0, rank)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    engine.step()


def test_a_graph_can_be_kept_for_another_backward(rank_pools: RankPools) -> None:
    rank_pools(2).run(retained)


def infinite(rank: int) -> None:
    config = CONFIG | {
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 1,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }
    engine, _ = start(config=config)
    before = engine.module_state_dict()
    micro_batch(engine)
    engine.backward(square_loss(engine, 1, rank) * (torch.inf if rank == 1 else 1.0))
    rates = engine.get_lr()
    engine.step()
    assert (engine.was_step_applied(), engine.skipped_steps, engine.global_steps) == (False, 1, 2)
    assert engine.get_lr() == rates, "the schedule waits for a step"
    assert all(torch.isfinite(value).all() for value in engine.module_state_dict().values())
    micro_batch(engine)
    assert engine.was_step_applied()
    assert engine.get_lr() != rates
    assert before.keys() == engine.state_dict().keys()


def test_an_update_that_is_not_finite_is_skipped_and_the_schedule_waits(
    rank_pools: RankPools,
) -> None:
    rank_pools(2).run(infinite)


def evaluation(rank: int) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "optimizer"}
    engine, optimizer, *_ = plait.initialize(model=small_model(), config=config)
    assert optimizer is None
    with torch.no_grad():
        engine(numbers(4, 3, seed=0))
    assert engine.get_lr() == []
    with pytest.raises(OrderError, match="has no optimizer, it only evaluates"):
        engine.step()


def test_an_engine_without_optimizer_evaluates(rank_pools: RankPools) -> None:
    rank_pools(2).run(evaluation)


def printed(rank: int) -> str:
    config = CONFIG | {"steps_per_print": 2, "gradient_accumulation_steps": 1}
    engine, said = start(config=config)
    later = io.StringIO()
    with contextlib.redirect_stdout(later):
        for micro in range(5):
            micro_batch(engine, micro)
    return said + later.getvalue()


def test_rank_0_prints_what_is_trained_and_every_few_updates(rank_pools: RankPools) -> None:
    first, second = rank_pools(2).run(printed)
    assert second == ""
    assert "Sequential, 380 parameters, fp32, ZeRO stage 2, 2 ranks on cpu" in first
    assert "batch 8 = 2 x 1 x 4 (ranks x accumulation x micro-batch)" in first
    assert "optimizer AdamW, gradients clipped to norm 1 (absent: 1.0, as in DeepSpeed)\n" in first
    assert first.count("step=") == 2
    assert "step=2, skipped=0, lr=[0.05], mom=[(0.9, 0.999)]" in first


def sources(rank: int, folder: str) -> None:
    path = Path(folder) / "ds.json"
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = plait.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path), "--local_rank", "0"])
    assert start(args=args, config=None)[0].train_batch_size() == 8
    assert start(args=vars(args), config=None)[0].train_batch_size() == 8
    assert start(args=args, config=str(path))[0].train_batch_size() == 8, "the same one twice"
    assert start(config=path)[0].train_batch_size() == 8
    assert start(config=None, config_params=CONFIG)[0].train_batch_size() == 8
    for arguments in ({"args": args, "config": CONFIG}, {"config": path, "config_params": CONFIG}):
        with pytest.raises(ValueError, match="two different configurations"):
            start(**arguments)
    with pytest.raises(ValueError, match="no configuration: pass config="):
        start(config=None, args=argparse.Namespace(deepspeed_config=None))
    with pytest.raises(TypeError, match="config: expected a path or a dict, got int"):
        start(config=3)
    with pytest.raises(TypeError, match="args: expected what argparse gives, got int"):
        start(args=3)


def test_the_configuration_comes_from_a_path_a_dict_or_the_command_line(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    rank_pools(1).run(sources, str(tmp_path))


def refused(rank: int) -> None:
    with pytest.raises(ValueError, match="mpu: tensor and pipeline parallel groups are not built"):
        start(mpu=object())
    with pytest.raises(ValueError, match="mesh_param: sequence parallelism is not built"):
        start(mesh_param=(2, 1))
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got None"):
        start(model=None)
    config = {name: value for name, value in CONFIG.items() if name != "optimizer"}
    with pytest.raises(ValueError, match="lr_scheduler: there is no optimizer to schedule"):
        start(config=config, lr_scheduler=lambda optimizer: optimizer)
    with pytest.raises(plait.ConfigError, match="stage"):
        start(config=CONFIG | {"zero_optimization": {"stage": 7}})


def test_arguments_that_cannot_be_used_are_refused_by_name(rank_pools: RankPools) -> None:
    rank_pools(2).run(refused)


def one_rank_is_wrong(rank: int) -> None:
    config = CONFIG if rank == 0 else CONFIG | {"zero_optimization": {"stage": 7}}
    error = plait.PeerFailed if rank == 0 else plait.ConfigError
    with pytest.raises(error, match=r"rank 1: ConfigError" if rank == 0 else "stage"):
        start(config=config)


def test_a_configuration_that_is_wrong_on_one_rank_stops_all(rank_pools: RankPools) -> None:
    rank_pools(2).run(one_rank_is_wrong)


def other_denominators(rank: int) -> None:
    engine, _ = start(config=CONFIG | {"gradient_accumulation_steps": 1})
    if rank == 1:
        engine.set_train_batch_size(16)
        engine.set_gradient_accumulation_boundary(is_boundary=True)
    micro_batch(engine)


def test_ranks_that_accumulate_differently_learn_of_it(rank_pools: RankPools) -> None:
    with pytest.raises(RankError, match="every rank must pass the same denominator"):
        rank_pools(2).run(other_denominators)


def alone(rank: int) -> None:
    dist.destroy_process_group()
    with pytest.raises(ValueError, match=r"dist_init_required=False, but torch.distributed"):
        start(dist_init_required=False)
    plait.init_distributed()
    plait.init_distributed("gloo")  # a second time is nothing
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
    engine, _ = start(dist_init_required=True)
    micro_batch(engine)
    assert engine.local_rank == 0


def test_without_a_launcher_the_group_is_this_process(rank_pools: RankPools) -> None:
    rank_pools(1).run(alone, retire=True)


def launched(rank: int, port: int) -> int:
    dist.destroy_process_group()
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.delenv("MASTER_PORT", raising=False)
        engine, _ = start(distributed_port=port)
    micro_batch(engine)
    return int(engine.world_size)


def test_the_ranks_of_a_launcher_are_joined(rank_pools: RankPools) -> None:
    assert rank_pools(2).run(launched, free_port(), retire=True) == [2, 2]


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def test_the_guide_names_what_the_engine_has(rank_pools: RankPools) -> None:
    text = (Path(__file__).parents[3] / "docs" / "initialize.md").read_text(encoding="utf-8")
    table = text.partition("## The engine\n")[2].partition("\n\nWhat the engine has not")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    names = [re.match(r"\w*", name)[0] for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) > 40
    rank_pools(1).run(has_all, [name for name in names if name != "engine"])


def has_all(rank: int, names: list[str]) -> None:
    engine, _ = start()
    own = {*dir(plait.PlaitEngine), *vars(engine)}
    assert [name for name in names if name not in own] == []
