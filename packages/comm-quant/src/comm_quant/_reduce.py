"""The quantized reduce-scatter (qgZ), in one hop or, over a mesh, in two.

Each rank quantizes what it has for the others, once a hop, and keeps what it has for itself exact.
Sums are taken in float32, in rank order within a hop; each element is summed on one rank only, so
all ranks agree on it whatever happens to it next. In two hops the ranks of a node first sum their
contributions to each rank's column, then the nodes sum these.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from comm_quant._codec import Codec
from comm_quant._counter import Payload
from comm_quant._feedback import ErrorFeedback
from comm_quant._message import Run, new_messages
from comm_quant._quantize import dequantize_sum, dequantize_sum_requantize, quantize
from comm_quant._ranks import Hops, Mesh
from comm_quant._transfer import Hop, swap


def reduce(
    out: Tensor,
    contributions: Tensor,
    spec: Codec,
    *,
    group: dist.ProcessGroup,
    payload: Payload,
    feedback: ErrorFeedback | None = None,
    key: tuple[Hashable, ...] = (),
    seed: int = 0,
) -> Iterator[Hop]:
    """Sum slice r of all contributions on rank r, in one hop."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    rows = contributions.view(num_ranks, -1)
    run = Run(spec, rows.shape[1])
    sent = new_messages(num_ranks, run.run_bytes, device=out.device)
    for peer in range(num_ranks):
        if peer != rank:
            _write(sent[peer], [rows[peer]], run, feedback, (*key, "all", peer), seed=seed)
    own = rows[rank].clone()  # `out` may lie in the contributions
    arrived = torch.empty_like(sent)
    payload.count("reduce", "all", message_bytes=run.run_bytes, num_peers=num_ranks - 1)
    yield swap(arrived, sent, group=group)
    _sum(out, arrived, run, own, rank)


def reduce_in_two_hops(
    out: Tensor,
    contributions: Tensor,
    spec: Codec,
    *,
    group: dist.ProcessGroup,
    mesh: Mesh,
    hops: Hops,
    payload: Payload,
    feedback: ErrorFeedback | None = None,
    key: tuple[Hashable, ...] = (),
    seed: int = 0,
) -> Iterator[Hop]:
    """Sum slice r of all contributions on rank r: within the nodes, then across them.

    Shards stay in rank order. The message to the neighbour with place l is one run a node, n: the
    slice of rank (n, l).
    """
    rank = dist.get_rank(group)
    node, local = divmod(rank, mesh.num_local)
    rows = contributions.view(mesh.num_nodes, mesh.num_local, -1)
    run = Run(spec, rows.shape[2])
    sent = new_messages(mesh.num_local, mesh.num_nodes * run.run_bytes, device=out.device)
    for place in range(mesh.num_local):
        if place != local:
            slices = list(rows[:, place])
            _write(sent[place], slices, run, feedback, (*key, "local", place), seed=seed)
    own = rows[:, local].clone()
    arrived = torch.empty_like(sent)
    payload.count("reduce", "local", message_bytes=sent.shape[1], num_peers=mesh.num_local - 1)
    yield swap(arrived, sent, group=hops.local)

    sent = new_messages(mesh.num_nodes, run.run_bytes, device=out.device)
    total = torch.empty(run.numel, device=out.device)  # this node's, for this rank: stays exact
    for other in range(mesh.num_nodes):
        codes, scales = run.codes(arrived, other), run.scales(arrived, other)
        if other == node:
            dequantize_sum(
                codes, scales, spec, numel=run.numel, own=own[other], own_index=local, out=total
            )
        elif feedback is None:
            dequantize_sum_requantize(
                codes,
                scales,
                spec,
                numel=run.numel,
                to=spec,
                own=own[other],
                own_index=local,
                seed=seed + 1,
                out=(run.codes(sent[other]), run.scales(sent[other])),
            )
        else:
            partial = dequantize_sum(
                codes, scales, spec, numel=run.numel, own=own[other], own_index=local
            )
            _write(sent[other], [partial], run, feedback, (*key, "cross", other), seed=seed + 1)
    arrived = torch.empty_like(sent)
    payload.count("reduce", "cross", message_bytes=run.run_bytes, num_peers=mesh.num_nodes - 1)
    yield swap(arrived, sent, group=hops.cross)
    _sum(out, arrived, run, total, node)


def _write(
    message: Tensor,
    slices: list[Tensor],
    run: Run,
    feedback: ErrorFeedback | None,
    key: tuple[Hashable, ...],
    *,
    seed: int,
) -> None:
    for index, part in enumerate(slices):
        given = part if feedback is None else feedback.corrected((*key, index), part)
        codes, scales = run.codes(message, index), run.scales(message, index)
        quantize(given, run.spec, seed=seed, out=(codes, scales))
        if feedback is not None:
            feedback.note((*key, index), given, codes, scales, run.spec)


def _sum(out: Tensor, arrived: Tensor, run: Run, own: Tensor, own_index: int) -> None:
    codes, scales = run.codes(arrived), run.scales(arrived)
    into = out if out.dtype == torch.float32 else None
    total = dequantize_sum(
        codes, scales, run.spec, numel=run.numel, own=own, own_index=own_index, out=into
    )
    if into is None:
        out.copy_(total)


def reduce_exactly(
    out: Tensor, contributions: Tensor, *, group: dist.ProcessGroup, payload: Payload
) -> Iterator[Hop]:
    """Sum slice r of all contributions on rank r in rank order; nothing is quantized."""
    rows = contributions.view(dist.get_world_size(group), -1)
    arrived = torch.empty_like(rows)
    rank = dist.get_rank(group)
    row_bytes = rows.shape[1] * rows.element_size()
    payload.count("reduce", "all", message_bytes=row_bytes, num_peers=len(rows) - 1)
    yield swap(arrived.view(torch.uint8), rows.view(torch.uint8), group=group)
    arrived[rank] = rows[rank]
    out.copy_(_add_up(arrived, out.dtype))


def reduce_node_sums(
    out: Tensor,
    contributions: Tensor,
    *,
    group: dist.ProcessGroup,
    mesh: Mesh,
    hops: Hops,
    payload: Payload,
) -> Iterator[Hop]:
    """Sum slice r of all contributions on rank r: within the nodes, then across them.

    A node's sum crosses in the type of the contributions: one rounding, but for this node's own.
    """
    node, local = divmod(dist.get_rank(group), mesh.num_local)
    sent = contributions.view(mesh.num_nodes, mesh.num_local, -1).transpose(0, 1).contiguous()
    arrived = torch.empty_like(sent)
    message_bytes = sent[0].numel() * sent.element_size()
    payload.count("reduce", "local", message_bytes=message_bytes, num_peers=mesh.num_local - 1)
    yield swap(_bytes_of(arrived), _bytes_of(sent), group=hops.local)
    arrived[local] = sent[local]
    sums = _add_up(arrived, out.dtype)

    sent = sums.to(contributions.dtype)
    arrived = torch.empty_like(sent)
    message_bytes = sent[0].numel() * sent.element_size()
    payload.count("reduce", "cross", message_bytes=message_bytes, num_peers=mesh.num_nodes - 1)
    yield swap(_bytes_of(arrived), _bytes_of(sent), group=hops.cross)
    rows = arrived.to(out.dtype)
    rows[node] = sums[node]
    out.copy_(_add_up(rows, out.dtype))


def _add_up(rows: Tensor, dtype: torch.dtype) -> Tensor:
    total = rows[0].to(dtype, copy=True)
    for row in rows[1:]:
        total += row
    return total


def _bytes_of(rows: Tensor) -> Tensor:
    return rows.view(len(rows), -1).view(torch.uint8)
