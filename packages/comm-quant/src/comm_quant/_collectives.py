"""All-reduce and all-to-all as codes: one call, a transfer to wait for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from comm_quant._codec import Codec
from comm_quant._counter import Payload
from comm_quant._gather import gather
from comm_quant._message import Run, new_messages
from comm_quant._quantize import FLOATS, dequantize, quantize
from comm_quant._ranks import Mesh
from comm_quant._reduce import reduce
from comm_quant._transfer import Hop, Transfer, swap


def all_reduce(
    tensor: Tensor,
    spec: Codec,
    *,
    group: dist.ProcessGroup | None = None,
    payload: Payload | None = None,
    seed: int = 0,
) -> Transfer:
    """Sum a tensor over the ranks, in place.

    Each rank sums one slice of all, of whole blocks, then sends its sum to all.

    Args:
        tensor: Contiguous, of any shape, the same on every rank; float32, bfloat16 or float16.
        spec: What travels, in both halves.
        group: The ranks; default all.
        payload: Counts the bytes.
        seed: Where rounding is stochastic; the ranks draw alike.

    Returns:
        The transfer; leave the tensor alone until it has been waited for.

    Raises:
        TypeError: The tensor is of another dtype.
        ValueError: It is not contiguous.

    Error bound:
        The codec's for every contribution but a rank's own, and once more for the sum: two
        quantizations, however many ranks. All ranks get the same bits.
    """
    _check("all_reduce", tensor)
    hops = _all_reduce(tensor.view(-1), spec, _chosen(group), payload or Payload(), seed)
    return Transfer(hops)


def _all_reduce(
    flat: Tensor, spec: Codec, group: dist.ProcessGroup, payload: Payload, seed: int
) -> Iterator[Hop]:
    num_ranks = dist.get_world_size(group)
    slice_numel = -(-spec.num_blocks(flat.numel()) // num_ranks) * spec.block_numel
    padded = flat.new_zeros(num_ranks * slice_numel)
    padded[: flat.numel()] = flat
    total = torch.empty(slice_numel, device=flat.device)
    yield from reduce(total, padded, spec, group=group, payload=payload, seed=seed)
    whole = torch.empty(num_ranks * slice_numel, device=flat.device)
    mesh = Mesh(num_ranks, 1)
    yield from gather(whole, total, spec, group=group, mesh=mesh, payload=payload, seed=seed + 1)
    flat.copy_(whole[: flat.numel()])


def all_to_all(
    out: Tensor,
    tensor: Tensor,
    spec: Codec,
    *,
    group: dist.ProcessGroup | None = None,
    payload: Payload | None = None,
    seed: int = 0,
) -> Transfer:
    """Send row r of a tensor to rank r, and receive its row for this rank as row r of `out`.

    Args:
        out: Of the shape of `tensor`; row r is filled with what rank r sent.
        tensor: Contiguous; its first axis is one row a rank. float32, bfloat16 or float16.
        spec: What travels.
        group: The ranks; default all.
        payload: Counts the bytes.
        seed: Where rounding is stochastic.

    Returns:
        The transfer.

    Raises:
        TypeError: A tensor is of another dtype.
        ValueError: The shapes do not fit, or a tensor is not contiguous.

    Error bound:
        The codec's, once; the row that a rank sends to itself stays exact.
    """
    chosen = _chosen(group)
    num_ranks = dist.get_world_size(chosen)
    for name, each in (("out", out), ("tensor", tensor)):
        _check(f"all_to_all: {name}", each)
        if each.shape != tensor.shape or each.dim() == 0 or len(each) != num_ranks:
            raise ValueError(
                f"all_to_all: expected out and tensor of one shape with {num_ranks} rows, got "
                f"{tuple(out.shape)} and {tuple(tensor.shape)}"
            )
    hops = _all_to_all(out, tensor, spec, group=chosen, payload=payload or Payload(), seed=seed)
    return Transfer(hops)


def _all_to_all(
    out: Tensor,
    tensor: Tensor,
    spec: Codec,
    *,
    group: dist.ProcessGroup,
    payload: Payload,
    seed: int,
) -> Iterator[Hop]:
    rank, num_ranks = dist.get_rank(group), len(tensor)
    rows, into = tensor.view(num_ranks, -1), out.view(num_ranks, -1)
    run = Run(spec, rows.shape[1])
    sent = new_messages(num_ranks, run.run_bytes, device=tensor.device)
    others = [peer for peer in range(num_ranks) if peer != rank]
    for peer in others:
        quantize(rows[peer], spec, seed=seed, out=(run.codes(sent[peer]), run.scales(sent[peer])))
    own = rows[rank].clone()  # `out` may be the tensor itself
    arrived = torch.empty_like(sent)
    payload.count("exchange", "all", message_bytes=run.run_bytes, num_peers=len(others))
    yield swap(arrived, sent, group=group)
    for peer in others:
        codes, scales = run.codes(arrived[peer]), run.scales(arrived[peer])
        dequantize(codes, scales, spec, numel=run.numel, out=into[peer])
    into[rank] = own.to(into.dtype)


def _chosen(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    chosen = dist.group.WORLD if group is None else group
    if chosen is None:
        raise ValueError("group: torch.distributed is not initialised in this process")
    return chosen


def _check(where: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{where} must be float32, bfloat16 or float16, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ValueError(f"{where} must be contiguous, got strides {tensor.stride()}")
