"""ZeRO++'s keys: what they build, and what they refuse."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plait
from comm_quant import BlockQuant
from plait._config import WireConfig
from plait._partitioning import make_wire
from ranktest import RankPools
from test_config import problems_in, read_config, written

ZERO: dict[str, Any] = {
    "stage": 3,
    "zero_quantized_weights": True,
    "zero_quantized_gradients": True,
}
LOCO = {"err_beta": 0.5, "reset_T": 100}


def wire_of(folder: Path, **zero: object) -> WireConfig:
    return read_config(written(folder, {"zero_optimization": zero})).training.wire


def test_nothing_asked_for_is_the_wire_that_partition_chooses(tmp_path: Path) -> None:
    config = wire_of(tmp_path, zero_quantized_weights=False, zeropp_loco_param=None)
    assert config.is_plain
    assert make_wire(config) is None


def test_each_key_builds_its_part(tmp_path: Path) -> None:
    both = make_wire(wire_of(tmp_path, **ZERO, zeropp_loco_param=LOCO))
    assert both is not None
    assert both.weights == BlockQuant(bits=8, block_numel=256)
    assert both.grads == BlockQuant(bits=4, block_numel=128)
    assert both.feedback is not None
    assert (both.feedback.beta, both.feedback.reset_steps) == (0.5, 100)
    frozen = make_wire(wire_of(tmp_path, stage=3, zero_quantized_nontrainable_weights=True))
    assert frozen is not None
    assert frozen.frozen_weights == BlockQuant(bits=8, block_numel=256)
    assert frozen.weights is frozen.grads is None
    gradients = make_wire(wire_of(tmp_path, stage=1, zero_quantized_gradients=True))
    assert gradients is not None
    assert gradients.weights is gradients.feedback is None


@pytest.mark.parametrize(
    ("loco", "beta", "reset"), [({"reset_T": 7}, 0.8, 7), ({"err_beta": 0.0}, 0.0, 1024)]
)
def test_half_of_the_feedback_takes_deepspeeds_default_for_the_rest(
    tmp_path: Path, loco: dict[str, object], beta: float, reset: int
) -> None:
    config = wire_of(tmp_path, **ZERO, zeropp_loco_param=loco)
    assert (config.err_beta, config.reset_steps) == (beta, reset)


def test_what_is_read_is_written_and_read_again(tmp_path: Path) -> None:
    zero = {**ZERO, "zero_quantized_nontrainable_weights": True, "zeropp_loco_param": LOCO}
    first = read_config(written(tmp_path, {"zero_optimization": zero}))
    again = read_config(written(tmp_path, first.as_json()))
    assert again.training.wire == first.training.wire
    assert not again.training.wire.is_plain


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_nontrainable_weights"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_parameters_in_8_bits_need_stage_3(tmp_path: Path, stage: int, key: str) -> None:
    zero = {"stage": stage, key: True}
    (problem,) = problems_in(written(tmp_path, {"zero_optimization": zero}))
    assert f"zero_optimization.{key}" in problem
    assert f"at stage 3 only, and the stage is {stage}" in problem


def test_feedback_without_4_bit_gradients_is_refused(tmp_path: Path) -> None:
    zero = {"stage": 3, "zeropp_loco_param": LOCO}
    (problem,) = problems_in(written(tmp_path, {"zero_optimization": zero}))
    assert "zero_optimization.zeropp_loco_param" in problem
    assert "error feedback corrects 4-bit gradients, and they are off" in problem


@pytest.mark.parametrize(("name", "value"), [("err_beta", 1.0), ("err_beta", -1), ("reset_T", 0)])
def test_feedback_out_of_range_is_refused_with_its_path(
    tmp_path: Path, name: str, value: float
) -> None:
    zero = {**ZERO, "zeropp_loco_param": {name: value}}
    (problem,) = problems_in(written(tmp_path, {"zero_optimization": zero}))
    assert f"zero_optimization.zeropp_loco_param.{name}" in problem


def test_nodes_of_several_ranks_are_those_of_the_wire(tmp_path: Path) -> None:
    tree = {"zero_optimization": {**ZERO, "zero_hpz_partition_size": 2}}
    config = read_config(written(tmp_path, tree), overrides=["run.ranks=4"]).training.wire
    assert config.ranks_a_node == 2
    assert read_config(written(tmp_path, {"zero_optimization": {"stage": 3}})).training.wire == (
        WireConfig()
    )


def test_nodes_that_do_not_divide_the_ranks_are_refused(tmp_path: Path) -> None:
    tree = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    (problem,) = problems_in(written(tmp_path, tree), "run.ranks=3")
    assert "zero_optimization.zero_hpz_partition_size" in problem
    assert "a divisor of 3, the number of ranks" in problem


def test_a_second_share_out_needs_stage_3(tmp_path: Path) -> None:
    tree = {"zero_optimization": {"stage": 1, "zero_hpz_partition_size": 2}}
    (problem,) = problems_in(written(tmp_path, tree))
    assert "parameters are shared out at stage 3 only, and the stage is 1" in problem


def train(rank: int, zero: dict[str, Any]) -> tuple[float, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 1))
    said = io.StringIO()
    with redirect_stdout(said):
        engine, *_ = plait.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 8,
                "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
                "zero_optimization": zero,
            },
        )
    generator = torch.Generator().manual_seed(rank)
    loss = torch.tensor(0.0)
    for _ in range(60):
        x = torch.randn(8, 6, generator=generator)
        loss = (engine(x) - x.sin().sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
    torch.distributed.all_reduce(loss := loss.detach())
    return float(loss) / torch.distributed.get_world_size(), said.getvalue()


def test_a_second_share_out_within_nodes_changes_no_bit(rank_pools: RankPools) -> None:
    nodes = rank_pools(4).run(train, {"stage": 3, "zero_hpz_partition_size": 2})
    plain = rank_pools(4).run(train, {"stage": 3})
    assert nodes[0][0] == plain[0][0]
    assert "on the wire: nodes of 2 ranks" in nodes[0][1]


def test_an_engine_trains_with_codes_and_says_so(rank_pools: RankPools) -> None:
    coded = rank_pools(2).run(train, {**ZERO, "zeropp_loco_param": {"err_beta": 0.8}})
    plain = rank_pools(2).run(train, {"stage": 3})
    wanted = "on the wire: parameters in 8 bits, gradients in 4 bits, error feedback of beta 0.8"
    assert wanted in coded[0][1]
    assert "on the wire" not in plain[0][1]
    assert coded[0][0] != plain[0][0]  # the codes were used
    assert coded[0][0] == pytest.approx(plain[0][0], rel=0.15)
