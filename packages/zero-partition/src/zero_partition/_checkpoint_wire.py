"""What the wire keeps for later messages, in a checkpoint.

Every rank's tensors lie in one data file, under ``<rank>/<name>``. They speak of slices of flat
buffers, so they are of use to as many ranks with the same buffers, and to nobody else.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zero_partition._checkpoint_plan import TensorEntry, entry_of, torch_dtype_name
from zero_partition._checkpoint_read import Checkpoint
from zero_partition._checkpoint_write import Piece
from zero_partition._errors import CheckpointError
from zero_partition._exchange import exchange
from zero_partition._segment import Segment
from zero_partition._transport import Transport

FILE = "wire"


def layout_digest(segments: Sequence[Segment]) -> str:
    """Names, sizes and cuts of all buffers, in 16 characters."""
    told = [
        (s.names, [tuple(shape) for shape in s.shapes], str(s.dtype), s.layout) for s in segments
    ]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def list_entries(state: Mapping[str, Tensor], transport: Transport) -> list[TensorEntry]:
    """What the data file holds, of all ranks (collective)."""
    mine = [(name, tensor.numel(), str(tensor.dtype)) for name, tensor in state.items()]
    told = [mine] if transport.lane is None else exchange(mine, transport.lane.control)
    return [
        entry_of(f"{rank}/{name}", (numel,), dtype)
        for rank, listed in enumerate(told)
        for name, numel, dtype in listed
    ]


def state_pieces(state: Mapping[str, Tensor], rank: int) -> Iterator[Piece]:
    """What this rank writes of it."""
    for name, tensor in state.items():
        yield Piece(f"{rank}/{name}", 0, tensor.contiguous())


def read_state(
    checkpoint: Checkpoint, segments: Sequence[Segment], transport: Transport
) -> dict[str, Tensor]:
    """This rank's; nothing, and rank 0 says so, if it is that of other ranks or buffers."""
    match checkpoint.index.get("wire") if transport.keeps else None:
        case None:
            return {}
        case {"layout": str(layout)}:
            pass
        case other:
            raise CheckpointError(f"{checkpoint.directory}: damaged: wire is {other!r:.100}")
    saved_ranks = checkpoint.index["num_ranks"]
    reason = ""
    if saved_ranks != transport.num_ranks:
        reason = f"{saved_ranks} ranks, and these are {transport.num_ranks}"
    elif layout != layout_digest(segments):
        reason = "other units, buckets or a model of other dtypes"
    if reason:
        if transport.rank == 0:
            warnings.warn(
                f"{checkpoint.directory}: what its wire kept (error feedback) is that of {reason}; "
                "it begins at zero again",
                RuntimeWarning,
                stacklevel=2,
            )
        return {}
    here = f"{transport.rank}/"
    found = {}
    for name, entry in checkpoint.entries(FILE).items():
        if name.startswith(here):
            dtype = getattr(torch, torch_dtype_name(entry.dtype))
            tensor = torch.empty(entry.numel, dtype=dtype)
            checkpoint.read_into(FILE, name, 0, tensor)
            found[name.removeprefix(here)] = tensor
    return found
