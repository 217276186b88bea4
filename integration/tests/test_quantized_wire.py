"""`comm_quant.QuantizedWire` under `zero_partition.partition`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from comm_quant import BlockQuant, ErrorFeedback, QuantizedWire
from ranktest import RankPools
from zero_partition import (
    FrozenWire,
    KeepingWire,
    LossyWire,
    NodesWire,
    OpeningWire,
    TorchWire,
    Wire,
    partition,
)

FITS: Wire = QuantizedWire()  # checked by mypy
OPENS: OpeningWire = QuantizedWire()
NODES_TOO: NodesWire = QuantizedWire()
LOSES: LossyWire = QuantizedWire()
KEEPS: KeepingWire = QuantizedWire()
FREEZES: FrozenWire = QuantizedWire()
FROZEN_NODES: NodesWire = QuantizedWire().frozen
INT8, INT4 = BlockQuant(bits=8), BlockQuant(bits=4, block_numel=128)
MADE: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"weights": INT8},
    "grads": {"grads": INT4},
    "both": {"weights": INT8, "grads": INT4},
    "two hops": {"weights": INT8, "grads": INT4, "num_local": 2},
}
NUM_STEPS = 100


def build(width: int = 33) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(5, width), *layers, nn.Linear(width, 1))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """A regression problem; every rank has its own part."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(16, 5, generator=generator)
    return x, (x.sin().sum(1, keepdim=True) + 0.1 * torch.randn(16, 1, generator=generator))


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def train(
    rank: int, kind: str, feedback: bool, bf16: bool, accumulation: int = 1
) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, the parameters at the end, bytes sent."""
    model = build()
    if kind == "torch":
        wire: Wire = TorchWire()
    else:
        wire = QuantizedWire(**MADE[kind], feedback=ErrorFeedback() if feedback else None)
    if bf16:
        model = model.to(torch.bfloat16)
    zero = partition(model, stage=3, wire=wire)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=3e-3)
    losses = []
    for step in range(NUM_STEPS if not bf16 else 5):
        total = 0.0
        for part in range(accumulation):
            x, y = batch(rank, step * accumulation + part)
            out = model(x.to(torch.bfloat16) if bf16 else x)
            loss = (out.float() - y).square().mean()
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(total / accumulation))
    state = zero.state_dict()
    sent = wire.payload.total_bytes() if isinstance(wire, QuantizedWire) else 0
    return losses, state, sent


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_without_codecs_training_is_that_of_the_plain_wire_bit_by_bit(
    rank_pools: RankPools, num_ranks: int
) -> None:
    ours = rank_pools(num_ranks).run(train, "plain", False, False)
    plain = rank_pools(num_ranks).run(train, "torch", False, False)
    for (losses, state, _), (expected, values, _) in zip(ours, plain, strict=True):
        assert losses == expected
        assert all(torch.equal(state[name], values[name]) for name in values)


@pytest.mark.parametrize(
    ("num_ranks", "kind", "feedback"),
    [(2, "weights", False), (2, "grads", True), (3, "both", True), (4, "two hops", True)],
)
def test_a_regression_learns_as_well_with_codes(
    rank_pools: RankPools, num_ranks: int, kind: str, feedback: bool
) -> None:
    """C75: the loss after 100 steps is within 1 % of that of exact messages."""
    found = rank_pools(num_ranks).run(train, kind, feedback, False)
    exact = rank_pools(num_ranks).run(train, "torch", False, False)
    ours, expected = (
        sum(sum(losses[-20:]) for losses, _, _ in each) / (20 * num_ranks)
        for each in (found, exact)
    )
    start = sum(losses[0] for losses, _, _ in exact) / num_ranks
    assert expected < 0.5 * start  # there was something to learn
    assert abs(ours - expected) < 0.01 * start
    for _, state, _ in found[1:]:
        assert all(torch.equal(state[name], found[0][1][name]) for name in state)


@pytest.mark.parametrize(("num_ranks", "kind"), [(3, "both"), (4, "two hops")])
def test_bf16_gradients_and_accumulation_work_on_odd_sizes(
    rank_pools: RankPools, num_ranks: int, kind: str
) -> None:
    found = rank_pools(num_ranks).run(train, kind, True, True, 2)
    plain = rank_pools(num_ranks).run(train, "plain", False, True, 2)
    for losses, state, sent in found:
        assert all(torch.equal(state[name], found[0][1][name]) for name in state)
        assert losses[-1] == pytest.approx(plain[0][0][-1], rel=0.1)
        if kind == "both":  # slices are shorter than a block; two hops send two codes of them
            assert 0 < sent < 0.75 * plain[0][2]


def train_over_nodes(
    rank: int, options: dict[str, Any], num_local: int, secondary: bool, frozen: bool
) -> tuple[list[float], dict[str, Tensor], int, bool]:
    """Five steps of two micro-batches, one of them after a pass without gradients."""
    model = build(20)
    if frozen:
        model.get_parameter("0.weight").requires_grad_(False)
    wire = QuantizedWire(**options)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // num_local, num_local))
    zero = partition(model, stage=3, wire=wire, mesh=mesh, secondary="local" if secondary else None)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=3e-3)
    losses, norms = [], []
    rows = ""
    for step in range(5):
        for part in range(2):
            x, y = batch(rank, 2 * step + part)
            if part:
                with torch.no_grad():
                    model(x)
            (loss := (model(x) - y).square().mean()).backward()
            losses.append(mean_over_ranks(float(loss.detach())))
            rows = str(zero.memory)
        norms.append(float(zero.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            with zero.gathered(modify=True), torch.no_grad():
                model.get_parameter("0.bias").add_(0.1)
    assert all(norm > 0 for norm in norms)
    assert "secondary shards" not in str(zero.memory)  # given up when the parameters changed
    crossed = wire.payload.total_bytes("cross") + wire.payload.total_bytes("all")
    return losses, zero.state_dict(), crossed, "secondary shards" in rows


NODES = [(4, 2), (4, 1), (4, 4), (3, 3), (2, 1)]


@pytest.mark.parametrize(("num_ranks", "num_local"), NODES)
@pytest.mark.parametrize("kind", ["plain", "both"])
def test_a_secondary_shard_changes_no_bit(
    rank_pools: RankPools, num_ranks: int, num_local: int, kind: str
) -> None:
    """C72, with and without codes: backward sees what forward saw."""
    options, frozen = MADE[kind], kind == "both"
    pool = rank_pools(num_ranks)
    ours = pool.run(train_over_nodes, options, num_local, True, frozen)
    others = pool.run(train_over_nodes, options, num_local, False, frozen)
    assert len(set(ours[0][0])) == len(ours[0][0])  # the loss is never constant
    for (losses, state, crossed, kept), (expected, values, all_crossed, kept_none) in zip(
        ours, others, strict=True
    ):
        assert losses == expected
        assert all(torch.equal(state[name], values[name]) for name in values)
        assert crossed < all_crossed or num_ranks == num_local
        assert kept
        assert not kept_none


def test_without_codes_a_mesh_trains_as_the_plain_wire_bit_by_bit(rank_pools: RankPools) -> None:
    ours = rank_pools(4).run(train_over_nodes, {}, 2, True, False)
    flat = rank_pools(4).run(train_over_nodes, {}, 1, False, False)
    for (losses, state, _, _), (expected, values, _, _) in zip(ours, flat, strict=True):
        assert losses == expected
        assert all(torch.equal(state[name], values[name]) for name in values)


def frozen_and_trained(rank: int, options: dict[str, Any], secondary: bool) -> tuple[int, Any]:
    """What a forward sees of a frozen and of a trained layer, and what the state holds."""
    model = build()
    model[1].requires_grad_(False)
    exact = {name: value.clone() for name, value in model.state_dict().items()}
    seen: dict[str, Tensor] = {}
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, *_: object) -> None:
        for name, parameter in module.named_parameters():
            seen[f"{names[module]}.{name}"] = parameter.detach().clone()

    for module in names:
        if isinstance(module, nn.Linear):
            module.register_forward_hook(look)  # before partition's, which shards again
    wire = QuantizedWire(num_local=1, **options)
    zero = partition(model, stage=3, wire=wire, secondary="local" if secondary else None)
    x, y = batch(rank, 0)
    (model(x) - y).square().mean().backward()
    state = zero.state_dict()
    assert all(torch.equal(state[name], exact[name]) for name in exact)
    coded = {name for name, value in seen.items() if not torch.equal(value, exact[name])}
    return wire.payload.total_bytes(), coded


@pytest.mark.parametrize("secondary", [False, True])
def test_frozen_parameters_may_have_a_codec_of_their_own(
    rank_pools: RankPools, secondary: bool
) -> None:
    pool = rank_pools(2)
    frozen = {"1.0.weight", "1.0.bias"}
    plain = pool.run(frozen_and_trained, {}, secondary)
    coded = pool.run(frozen_and_trained, {"frozen_weights": INT8}, secondary)
    both = pool.run(frozen_and_trained, {"weights": INT8}, secondary)
    other = pool.run(frozen_and_trained, {"weights": INT8, "frozen_weights": INT4}, secondary)
    for rank in range(2):
        assert plain[rank][1] == set()
        assert coded[rank][1] == frozen
        assert both[rank][1] == other[rank][1] > frozen
        assert other[rank][0] < both[rank][0] < coded[rank][0] < plain[rank][0]


def train_two_over_one_wire(rank: int) -> list[float]:
    """One model steps between forward and backward of another that shares its wire."""
    wire = QuantizedWire(num_local=1)
    losses = []
    first, second = build(8), build(8)
    ours = partition(first, stage=3, wire=wire, secondary="local")
    other = partition(second, stage=3, wire=wire, secondary="local")
    optimizers = [each.optimizer(torch.optim.SGD, lr=0.1) for each in (ours, other)]
    for _ in range(2):
        x, y = batch(rank, 0)
        loss = (first(x) - y).square().mean()
        (same := (second(x) - y).square().mean()).backward()
        optimizers[1].step()
        assert "secondary shards" in str(ours.memory)
        loss.backward()
        optimizers[0].step()
        losses += [float(loss.detach()), float(same.detach())]
        for optimizer in optimizers:
            optimizer.zero_grad()
    return losses


def test_models_that_share_a_wire_keep_their_own_secondary_shards(rank_pools: RankPools) -> None:
    for losses in rank_pools(2).run(train_two_over_one_wire):
        assert losses[0] == losses[1] > losses[2] == losses[3]


def refusals(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1))
    row = init_device_mesh("cpu", (2,))
    asked: list[dict[str, Any]] = [
        {"stage": 3, "mesh": mesh, "group": dist.group.WORLD, "wire": QuantizedWire()},
        {"stage": 3, "mesh": row, "wire": QuantizedWire()},
        {"stage": 3, "mesh": mesh, "wire": TorchWire()},
        {"stage": 3, "secondary": "local", "wire": TorchWire()},
        {"stage": 2, "mesh": mesh, "secondary": "local", "wire": QuantizedWire()},
        {"stage": 3, "secondary": "remote", "wire": QuantizedWire()},
        {"stage": 3, "mesh": mesh, "wire": QuantizedWire(num_local=2)},
    ]
    found = []
    for options in asked:
        try:
            partition(build(3), **options)
        except ValueError as error:
            found.append(str(error))
    return found


def test_meshes_and_secondary_shards_that_cannot_be_are_refused(rank_pools: RankPools) -> None:
    for texts in rank_pools(2).run(refusals):
        for text, said in zip(
            texts,
            [
                "mesh: it says who the ranks are; leave group out",
                "mesh: expected two axes, nodes and the ranks of a node, got 1",
                "mesh: needs a wire over nodes, HierarchicalWire(num_local=...) or comm_quant.",
                "secondary: needs a wire over nodes, HierarchicalWire(num_local=...) or comm_qua",
                "at stage 3 only, got stage=2",
                "secondary must be 'local' or None, got 'remote'",
                "made for num_local=2, and the mesh has nodes of 1",
            ],
            strict=True,
        ):
            assert said in text


def test_codes_for_parameters_are_refused_below_stage_3() -> None:
    with pytest.raises(ValueError, match=r"QuantizedWire changes the parameters.*got stage=2"):
        partition(build(), stage=2, wire=QuantizedWire(weights=INT8))


def mismatched(rank: int) -> str:
    wire = QuantizedWire(grads=INT8 if rank else INT4)
    try:
        partition(build(), stage=2, wire=wire)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_of_other_settings_are_refused_when_partitioned(rank_pools: RankPools) -> None:
    for text in rank_pools(2).run(mismatched):
        assert "all ranks need the same settings" in text


STOCHASTIC = BlockQuant(bits=4, block_numel=128, rounding="stochastic")
KEEPING: dict[str, dict[str, Any]] = {
    "feedback": {"grads": INT4, "feedback": True},
    "feedback over nodes": {"weights": INT8, "grads": INT4, "num_local": 2, "feedback": True},
    "dice": {"weights": STOCHASTIC, "grads": STOCHASTIC},
    "dice and feedback": {"grads": STOCHASTIC, "feedback": True},
    "neither": {"grads": INT4},
}


def go_on(
    rank: int, options: dict[str, Any], stage: int, folder: str, steps: tuple[int, int]
) -> tuple[dict[str, Tensor], list[str]]:
    """Train from the checkpoint of the first of `steps`, if there is one, and save at the second.

    Returns:
        The parameters, and what was warned of.
    """
    first, last = steps
    options = dict(options)
    feedback = ErrorFeedback() if options.pop("feedback", False) else None
    model = build(20)
    zero = partition(model, stage=stage, wire=QuantizedWire(**options, feedback=feedback))
    optimizer = zero.optimizer(torch.optim.AdamW, lr=3e-3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if first:
            for _ in range(3):  # which loading must forget
                x, y = batch(rank, 77)
                (model(x) - y).square().mean().backward()
            zero.load(f"{folder}/{first}", optimizer)
    for step in range(first, last):
        for part in range(2):
            x, y = batch(rank, 2 * step + part)
            (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in (3, last):
            zero.save(f"{folder}/{step + 1}", optimizer, overwrite=True)
    return zero.state_dict(), [str(each.message) for each in said]


@pytest.mark.parametrize("kind", KEEPING)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_training_that_goes_on_is_the_one_that_was_not_stopped_bit_by_bit(
    rank_pools: RankPools, tmp_path: Path, kind: str, stage: int
) -> None:
    options = dict(KEEPING[kind])
    if stage == 1:
        options.pop("weights", None)
    pool = rank_pools(4 if "nodes" in kind else 3)
    whole = pool.run(go_on, options, stage, str(tmp_path), (0, 6))
    again = pool.run(go_on, options, stage, str(tmp_path), (3, 6))
    assert (tmp_path / "3" / "wire.safetensors").exists() == (kind != "neither")
    for (expected, _), (state, said) in zip(whole, again, strict=True):
        assert not said
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_without_its_errors_it_would_be_another_training(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    """The test above can fail."""
    pool, options = rank_pools(2), KEEPING["feedback"]
    whole = pool.run(go_on, options, 3, str(tmp_path), (0, 6))
    pool.run(go_on, KEEPING["neither"], 3, str(tmp_path), (0, 3))
    again = pool.run(go_on, options, 3, str(tmp_path), (3, 6))
    assert any(not torch.equal(again[0][0][name], whole[0][0][name]) for name in whole[0][0])


def test_errors_of_other_ranks_or_buffers_begin_anew_and_it_is_said(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    options = KEEPING["feedback over nodes"]
    rank_pools(4).run(go_on, options, 3, str(tmp_path), (0, 3))
    flat = {name: value for name, value in options.items() if name != "num_local"}
    fewer = rank_pools(2).run(go_on, flat, 3, str(tmp_path), (3, 4))
    assert "that of 4 ranks, and these are 2; it begins at zero again" in fewer[0][1][0]
    assert [len(said) for _, said in fewer] == [1, 0]
    rank_pools(4).run(go_on, options, 3, str(tmp_path), (0, 3))
    other = rank_pools(4).run(go_on, flat, 3, str(tmp_path), (3, 4))
    for _, said in other:
        assert "errors are those of nodes of 2 ranks, these are of 1" in said[0]
    for state, _ in fewer + other:
        assert all(value.isfinite().all() for value in state.values())
