"""What ranks do with wires, for the tests to call by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from comm_quant import (
    Codec,
    ErrorFeedback,
    PlainWire,
    QuantizedWire,
    dequantize,
    quantize,
)
from ranktest import subgroup


def world() -> dist.ProcessGroup:
    """All ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def values(rank: int, numel: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    """Numbers of one rank; any rank can make those of another."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def gather_once(
    rank: int, spec: Codec | None, numel: int, dtype: torch.dtype, num_local: int | None
) -> tuple[Tensor, dict[tuple[str, str], int]]:
    """What a rank holds after a gather, and what it sent."""
    wire = QuantizedWire(weights=spec, num_local=num_local)
    out = torch.full((numel * dist.get_world_size(),), torch.nan, dtype=dtype)
    transfer = wire.all_gather(out, values(rank, numel, dtype), group=world())
    transfer.wait()
    transfer.wait()
    assert transfer.done()
    return out, dict(wire.payload.sent_bytes)


def gather_twice(
    rank: int, spec: Codec | None, numel: int, dtype: torch.dtype, num_local: int | None
) -> tuple[Tensor, Tensor, dict[tuple[str, str], int], tuple[int, int]]:
    """A gather that keeps, the same again from what was kept, what that sent, bytes kept."""
    wire = QuantizedWire(weights=spec, num_local=num_local)
    first = torch.full((numel * dist.get_world_size(),), torch.nan, dtype=dtype)
    second = first.clone()
    shard = values(rank, numel, dtype)
    wire.all_gather(first, shard, group=world(), keep=("unit", 0)).wait()
    shard.zero_()  # what was kept does not look at the shard again
    wire.payload.clear()
    wire.all_gather_kept(second, group=world(), key=("unit", 0)).wait()
    kept = wire.kept_bytes(group=world())
    wire.forget_kept(group=world())
    return first, second, dict(wire.payload.sent_bytes), (kept, wire.kept_bytes(group=world()))


def reduce_once(  # noqa: PLR0917  ranks get no keywords
    rank: int,
    spec: Codec | None,
    numel: int,
    dtype: torch.dtype,
    num_local: int | None,
    in_place: bool,
    same_everywhere: bool = False,
    round_node_sums: bool = False,
) -> tuple[Tensor, dict[tuple[str, str], int]]:
    """A rank's slice of the sum, and what it sent."""
    wire = QuantizedWire(grads=spec, num_local=num_local, round_node_sums=round_node_sums)
    num_ranks = dist.get_world_size()
    given = values(0 if same_everywhere else rank, numel * num_ranks, dtype)
    out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.full((numel,), torch.nan, dtype=out_dtype)
    if in_place and dtype == out_dtype:
        out = given[rank * numel :][:numel]
    wire.reduce_scatter(out, given, group=world(), key="g").wait()
    return out, dict(wire.payload.sent_bytes)


def reduce_many_at_once(rank: int, spec: Codec, num_local: int | None) -> list[Tensor]:
    """Several reductions under way together, polled and waited for in their order."""
    wire = QuantizedWire(grads=spec, num_local=num_local)
    num_ranks = dist.get_world_size()
    given = [values(rank, 16 * num_ranks, torch.float32, seed=i) for i in range(6)]
    outs = [torch.empty(16) for _ in given]
    transfers = [
        wire.reduce_scatter(out, each, group=world(), key=i)
        for i, (out, each) in enumerate(zip(outs, given, strict=True))
    ]
    if rank % 2:  # some ask early, some late
        transfers[0].done()
    for transfer in transfers:
        transfer.wait()
    return outs


def reduce_in_subgroups(rank: int, spec: Codec) -> Tensor:
    """Two groups of different sizes at once."""
    most, alone = subgroup(0, 2, 3), subgroup(1)
    group = alone if rank == 1 else most
    assert group is not None
    wire = QuantizedWire(weights=spec, grads=spec)
    size = dist.get_world_size(group)
    out, given = torch.empty(5), values(rank, 5 * size, torch.float32)
    wire.reduce_scatter(out, given, group=group).wait()
    whole = torch.empty(5 * size)
    wire.all_gather(whole, out, group=group).wait()
    return whole


def open_with(rank: int, options: list[dict[str, Any]]) -> str:
    """The error of ranks that open wires of different settings."""
    try:
        QuantizedWire(**options[rank]).open(world())
    except ValueError as error:
        return str(error)
    return ""


def accumulate(
    rank: int, spec: Codec, num_local: int | None, beta: float | None, num_steps: int
) -> tuple[Tensor, Tensor]:
    """Sums over many steps of badly scaled gradients: as they came, and as they should."""
    feedback = None if beta is None else ErrorFeedback(beta=beta)
    wire = QuantizedWire(grads=spec, num_local=num_local, feedback=feedback)
    num_ranks = dist.get_world_size()
    scale = torch.logspace(-3, 0, 128).repeat(num_ranks)
    came, should = torch.zeros(128), torch.zeros(128)
    plain = PlainWire()
    for step in range(num_steps):
        gradient = scale * (1 + 0.3 * values(rank, 128 * num_ranks, torch.float32, seed=step))
        out, exact = torch.empty(128), torch.empty(128)
        wire.reduce_scatter(out, gradient, group=world(), key="g").wait()
        plain.reduce_scatter(exact, gradient, group=world()).wait()
        came += out
        should += exact
    return came, should


def gathers_in_any_order(rank: int, spec: Codec | None, seed: int) -> bool:
    """Gathers and gathers again, which every rank waits for when and as it likes."""
    wire, group = QuantizedWire(weights=spec, num_local=2), world()
    shards = [values(rank, 100, torch.float32, seed=number) for number in range(5)]
    outs, again = torch.zeros(5, 400), torch.zeros(5, 400)
    draws = torch.Generator().manual_seed(seed + rank)
    under_way = []
    for number, (shard, out) in enumerate(zip(shards, outs, strict=True)):
        under_way.append(wire.all_gather(out, shard, group=group, keep=number))
        if number and torch.rand((), generator=draws) < 0.5:
            under_way[-1].wait()
        if number:
            under_way[2 * number - 2].wait()  # what it kept is there
            kept = wire.all_gather_kept(again[number - 1], group=group, key=number - 1)
            under_way.append(kept)
        else:
            under_way.append(wire.all_gather(out.clone(), shard, group=group))
    for index in torch.randperm(len(under_way), generator=draws).tolist():
        under_way[index].done()
        under_way[-1 - index].wait()
    fine = True
    for number, out in enumerate(outs):
        parts = [values(r, 100, torch.float32, seed=number) for r in range(4)]
        if spec is not None:
            parts = [dequantize(*quantize(part, spec), spec, numel=100) for part in parts]
        fine &= torch.equal(out, torch.cat(parts))
        fine &= number == 4 or torch.equal(again[number], out)
    return fine
