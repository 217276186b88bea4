"""The quantized all-gather (qwZ): every rank sends its slice once, as codes.

Over a mesh each slice crosses to the other nodes once, as its owner quantized it, and is handed on
within the node: nothing is quantized twice, and a gather gives the same bits with one hop or two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from comm_quant._codec import Codec
from comm_quant._counter import Payload
from comm_quant._message import Run, new_messages
from comm_quant._quantize import dequantize, quantize
from comm_quant._ranks import Mesh
from comm_quant._transfer import Hop, spread


def gather(
    out: Tensor,
    shard: Tensor,
    spec: Codec | None,
    *,
    group: dist.ProcessGroup,
    mesh: Mesh,
    payload: Payload,
    keep: Callable[[Tensor], None] | None = None,
    seed: int = 0,
) -> Iterator[Hop]:
    """Fill `out` with what every rank's shard is once it has been quantized, own one included.

    Without `spec` the bytes travel as they are. `keep` takes what crossed to this rank: one message
    a node, its own included.
    """
    rank = dist.get_rank(group)
    run = None if spec is None else Run(spec, shard.numel())
    if run is None:
        rows = out.view(torch.uint8).view(mesh.num_ranks, -1)
        if rows[rank].data_ptr() != shard.data_ptr():
            rows[rank].copy_(shard.view(torch.uint8))
    else:
        rows = new_messages(mesh.num_ranks, run.run_bytes, device=out.device)
        own = rows[rank]
        quantize(shard, run.spec, seed=seed, out=(run.codes(own), run.scales(own)))
    yield from _cross(rows, rank, mesh, group=group, payload=payload)
    held = rows.view(mesh.num_nodes, mesh.num_local, -1)
    crossed = held[:, rank % mesh.num_local]
    crossed = crossed.contiguous() if keep is None else crossed.clone()
    if keep is not None:
        keep(crossed)
    yield from _hand_on(held, crossed, rank, mesh, group=group, payload=payload)
    if run is not None:
        _decode(out, rows, run)


def gather_again(
    out: Tensor,
    crossed: Tensor,
    spec: Codec | None,
    *,
    group: dist.ProcessGroup,
    mesh: Mesh,
    payload: Payload,
) -> Iterator[Hop]:
    """Fill `out` as the gather did that kept `crossed`; only the ranks of a node send."""
    rank = dist.get_rank(group)
    run = None if spec is None else Run(spec, out.numel() // mesh.num_ranks)
    if run is None:
        held = out.view(torch.uint8).view(mesh.num_nodes, mesh.num_local, -1)
    else:
        rows = new_messages(mesh.num_ranks, run.run_bytes, device=out.device)
        held = rows.view(mesh.num_nodes, mesh.num_local, -1)
    held[:, rank % mesh.num_local] = crossed
    yield ()  # nothing crosses; within the node it takes its turn among other gathers
    yield from _hand_on(held, crossed, rank, mesh, group=group, payload=payload)
    if run is not None:
        _decode(out, held.view(mesh.num_ranks, -1), run)


def _decode(out: Tensor, rows: Tensor, run: Run) -> None:
    for row, target in zip(rows, out.view(len(rows), -1), strict=True):
        dequantize(run.codes(row), run.scales(row), run.spec, numel=len(target), out=target)


def _cross(
    rows: Tensor, rank: int, mesh: Mesh, *, group: dist.ProcessGroup, payload: Payload
) -> Iterator[Hop]:
    """Fill the rows of this rank's place on all nodes; its own is there."""
    row_bytes = rows.shape[1]
    column = mesh.column(rank)
    hop = "cross" if mesh.num_local > 1 else "all"
    payload.count("gather", hop, message_bytes=row_bytes, num_peers=len(column) - 1)
    yield spread([rows[peer] for peer in column], rows[rank], column, group=group)


def _hand_on(
    held: Tensor,
    crossed: Tensor,
    rank: int,
    mesh: Mesh,
    *,
    group: dist.ProcessGroup,
    payload: Payload,
) -> Iterator[Hop]:
    """Fill the other places of all nodes from this node's ranks."""
    neighbours = mesh.row(rank)
    if len(neighbours) == 1:
        return
    arrived = {peer: torch.empty_like(crossed) for peer in neighbours if peer != rank}
    into = [arrived.get(peer, crossed).view(-1) for peer in neighbours]
    payload.count("gather", "local", message_bytes=crossed.numel(), num_peers=len(neighbours) - 1)
    yield spread(into, crossed.view(-1), neighbours, group=group)
    for peer, message in arrived.items():
        held[:, peer % mesh.num_local] = message
