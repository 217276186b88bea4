"""Reading a checkpoint of any number of ranks, stage and precision into a partitioned model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zero_partition import _checkpoint_wire
from zero_partition._agreement import Agreement
from zero_partition._checkpoint_index import random_states, stored_name
from zero_partition._checkpoint_plan import torch_dtype_name
from zero_partition._checkpoint_read import Checkpoint
from zero_partition._errors import CheckpointError
from zero_partition._optimizer import ZeroOptimizer
from zero_partition._saving import PLACEMENT_OPTIONS, class_name, set_random_state
from zero_partition._segment import OwnPiece, Segment
from zero_partition._transport import Transport
from zero_partition._whole import named_tensors, persistent_buffers

_T = TypeVar("_T")
_LISTED = 8  # names told of each kind of mismatch


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    segments: Sequence[Segment],
    optimizer: ZeroOptimizer | None,
    *,
    transport: Transport,
) -> Any:
    """Fill model and optimizer; return the caller's state. See `Zero.load`.

    Everything is checked on all ranks before anything is changed.
    """
    agree = Agreement(transport)
    with ExitStack() as opened:
        checkpoint = _together(
            lambda: opened.enter_context(_checked(path, model, segments, optimizer)), agree
        )
        _together(lambda: _read_all(checkpoint, model, segments, optimizer), agree)
        kept = _together(
            lambda: _checkpoint_wire.read_state(checkpoint, segments, transport), agree
        )
        _together(lambda: transport.load_wire_state(kept), agree)
    states = random_states(checkpoint.index)
    if len(states) == transport.num_ranks:
        set_random_state(states[transport.rank])
    return checkpoint.index["state"]


def _together(action: Callable[[], _T], agree: Agreement) -> _T:
    try:
        result = action()
    except Exception as error:
        agree(error)
        raise
    agree(None)
    return result


def _checked(
    path: str | os.PathLike[str],
    model: nn.Module,
    segments: Sequence[Segment],
    optimizer: ZeroOptimizer | None,
) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    faults = list(_model_faults(checkpoint, model, segments))
    if optimizer is not None:
        faults += _optimizer_faults(checkpoint, segments, optimizer)
    if faults:
        checkpoint.close()
        raise CheckpointError(f"{path} does not fit: " + "; ".join(faults))
    return checkpoint


def _model_faults(
    checkpoint: Checkpoint, model: nn.Module, segments: Sequence[Segment]
) -> Iterator[str]:
    parameters, aliases = named_tensors(model)
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        name: (tuple(p.shape), p.dtype) for name, p in parameters.items()
    }
    wanted |= {n: (tuple(b.shape), b.dtype) for n, b in persistent_buffers(model).items()}
    entries = checkpoint.entries("model")
    masters = checkpoint.entries("master") if "master" in checkpoint.files else {}
    has_master = {name for s in segments if s.has_master for name in s.names}
    missing, misshaped, retyped, found = [], [], [], set[str]()
    for name, (shape, dtype) in wanted.items():
        stored = {stored_name(checkpoint.index, n) for n in (name, *aliases.get(name, ()))}
        present = stored & entries.keys()
        if len(present) != 1 or present & found:
            missing.append(name if len(present) != 1 else f"{name} (tied in the checkpoint)")
            found |= present
            continue
        (key,) = present
        found.add(key)
        entry = entries[key]
        kept = {_dtype(entry.dtype)} | ({torch.float32} if key in masters else set())
        if entry.shape != shape:
            misshaped.append(f"{name} (checkpoint {list(entry.shape)}, model {list(shape)})")
        elif dtype not in kept and not (name in has_master and torch.float32 in kept):
            retyped.append(f"{name} (checkpoint {_dtype(entry.dtype)}, model {dtype})")
    unexpected = sorted(entries.keys() - found)
    for kind, names in (
        ("missing", missing),
        ("unexpected", unexpected),
        ("mis-shaped", misshaped),
        ("of another dtype", retyped),
    ):
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            yield f"{kind}: {', '.join(names[:_LISTED])}{more}"


def _optimizer_faults(
    checkpoint: Checkpoint, segments: Sequence[Segment], optimizer: ZeroOptimizer
) -> Iterator[str]:
    saved = checkpoint.index["optimizer"]
    if saved is None:
        yield "it holds no optimizer; load it without one"
        return
    if saved["class"] != class_name(optimizer):
        yield f"its optimizer is {saved['class']}, this one is {class_name(optimizer)}"
        return
    names = {p: n for s in segments for n, p in zip(s.names, s.parameters, strict=True)}
    mine = [sorted(names[p] for p in members) for members in optimizer.logical]
    index = checkpoint.index
    theirs = [sorted(stored_name(index, n) for n in group["names"]) for group in saved["groups"]]
    stored = [sorted(stored_name(index, n) for n in group) for group in mine]
    if stored != theirs:
        yield (
            f"its optimizer has {len(theirs)} groups of {[len(g) for g in theirs]} parameters, "
            f"this one {len(mine)} of {[len(g) for g in mine]}; make the same groups"
        )


def _read_all(
    checkpoint: Checkpoint,
    model: nn.Module,
    segments: Sequence[Segment],
    optimizer: ZeroOptimizer | None,
) -> None:
    with torch.no_grad():
        for segment in segments:
            _read_segment(checkpoint, segment)
        for name, buffer in persistent_buffers(model).items():
            _read(checkpoint, "model", name, 0, buffer.view(-1) if buffer.dim() else buffer[None])
        if optimizer is not None:
            _read_optimizer(checkpoint, segments, optimizer)
    for segment in segments:
        torch.autograd.graph.increment_version(segment.parameters)
        segment.note_versions()


def _read_segment(checkpoint: Checkpoint, segment: Segment) -> None:
    masters = checkpoint.entries("master") if "master" in checkpoint.files else {}
    for buffer in (segment.home(), segment.master):
        if buffer is None:
            continue
        for slot, param_start, out in _held_runs(segment, buffer):
            name = segment.names[slot]
            wide = buffer is segment.master or segment.dtype == torch.float32
            stored = stored_name(checkpoint.index, name)
            file = "master" if wide and stored in masters else "model"
            _read(checkpoint, file, name, param_start, out)


def _held_runs(segment: Segment, buffer: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Slot, first element, and the part of `buffer` that holds it: all of it, or owned parts."""
    if buffer.numel() == segment.layout.numel and not segment.is_shared:
        for slot, place in enumerate(segment.layout.slots):
            yield slot, 0, buffer[place.start : place.start + place.numel]
        return
    for piece in segment.layout.pieces(segment.rank):
        yield piece.slot, piece.param_start, segment.part(buffer, piece)


def _read(checkpoint: Checkpoint, file: str, name: str, start: int, out: Tensor) -> None:
    stored = _dtype(checkpoint.entry(file, name).dtype)
    if stored == out.dtype and out.is_contiguous():
        checkpoint.read_into(file, name, start, out)
        return
    staged = torch.empty(out.shape, dtype=stored)
    checkpoint.read_into(file, name, start, staged)
    out.copy_(staged)


def _read_optimizer(
    checkpoint: Checkpoint, segments: Sequence[Segment], optimizer: ZeroOptimizer
) -> None:
    saved = checkpoint.index["optimizer"]
    on_device: dict[int, bool] = {}
    for group, record in zip(optimizer.param_groups, saved["groups"], strict=True):
        _restore_options(group, record["options"])
        is_there = bool(group.get("capturable") or group.get("fused"))
        on_device |= {id(piece): is_there for piece in group["params"]}
    for segment in segments:
        for piece in segment.pieces:
            if id(piece.values) not in on_device:
                continue
            device = piece.values.device if on_device[id(piece.values)] else torch.device("cpu")
            state = {}
            for state_name, kind in saved["states"].items():
                file, name = f"optimizer.{state_name}", segment.names[piece.slot]
                if stored_name(checkpoint.index, name) not in checkpoint.entries(file):
                    continue  # the optimizer had not touched this parameter yet
                if kind == "scalar":
                    state[state_name] = _read_scalar(checkpoint, file, name, device)
                else:
                    state[state_name] = _read_elements(checkpoint, file, name, piece)
            optimizer.state.pop(piece.values, None)
            if state:
                optimizer.state[piece.values] = state


def _restore_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    for option, value in options.items():
        kept = group.get(option)
        if option in PLACEMENT_OPTIONS:
            continue
        if isinstance(kept, Tensor):
            kept.fill_(value)
        else:
            group[option] = tuple(value) if isinstance(kept, tuple) else value


def _read_scalar(checkpoint: Checkpoint, file: str, name: str, device: torch.device) -> Tensor:
    one = torch.empty(1, dtype=_dtype(checkpoint.entry(file, name).dtype), device=device)
    checkpoint.read_into(file, name, 0, one)
    return one[0].clone()


def _read_elements(checkpoint: Checkpoint, file: str, name: str, piece: OwnPiece) -> Tensor:
    dtype = _dtype(checkpoint.entry(file, name).dtype)
    out = torch.empty(piece.values.shape, dtype=dtype, device=piece.values.device)
    checkpoint.read_into(file, name, piece.param_start, out.view(-1))
    return out


def _dtype(code: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, torch_dtype_name(code))
    return found
