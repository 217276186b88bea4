"""What a partitioned model and its optimizer write into a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_partition import _checkpoint_wire
from zero_partition._agreement import Agreement
from zero_partition._checkpoint_index import GroupRecord, OptimizerRecord, build_index
from zero_partition._checkpoint_plan import TensorEntry, entry_of
from zero_partition._checkpoint_write import Piece, write_checkpoint
from zero_partition._errors import CheckpointError
from zero_partition._exchange import exchange
from zero_partition._optimizer import ZeroOptimizer
from zero_partition._segment import OwnPiece, Segment
from zero_partition._transport import Transport
from zero_partition._whole import named_tensors, persistent_buffers

PLACEMENT_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that say how a step is computed here; they are not restored from a checkpoint."""


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    segments: Sequence[Segment],
    optimizer: ZeroOptimizer | None,
    *,
    state: Any,
    stage: int,
    transport: Transport,
    overwrite: bool,
) -> None:
    """Write model, masters, optimizer states and random states; see `Zero.save`."""
    agree = Agreement(transport)
    for segment in segments:
        segment.adopt_edits()
    parameters, aliases = named_tensors(model)
    buffers = persistent_buffers(model)
    own = {s: _own_runs(s, transport.rank) for s in segments}
    files: dict[str, list[TensorEntry]] = {}
    pieces: dict[str, Iterable[Piece]] = {
        "model": _model_pieces(own, buffers if transport.rank == 0 else {})
    }
    states = None if optimizer is None else _OptimizerStates(segments, optimizer)
    with _told_to_all(agree):
        buffer_entries = [entry_of(n, b.shape, b.dtype) for n, b in buffers.items()]
        files["model"] = [entry_of(n, p.shape, p.dtype) for n, p in parameters.items()]
        files["model"] += buffer_entries
        if states is not None:
            states.collect()
        wire_state = transport.wire_state()
    if masters := _master_entries(segments, list(parameters)):
        files["master"] = masters
        pieces["master"] = _master_pieces(own)
    record = None
    if states is not None:
        states.merge(transport)
        files |= states.files(parameters)
        pieces |= states.pieces(own)
        record = states.record()
    kept = _checkpoint_wire.list_entries(wire_state, transport) if transport.keeps else []
    if kept:
        files[_checkpoint_wire.FILE] = kept
        pieces[_checkpoint_wire.FILE] = _checkpoint_wire.state_pieces(wire_state, transport.rank)
    index = build_index(
        tensors=files["model"][: len(parameters)],
        buffers=buffer_entries,
        aliases=aliases,
        optimizer=record,
        random_states=_all_random_states(transport),
        wire_layout=_checkpoint_wire.layout_digest(segments) if kept else None,
        state=state,
        num_ranks=transport.num_ranks,
        stage=stage,
    )
    write_checkpoint(
        path,
        files=files,
        pieces=pieces,
        index=index,
        rank=transport.rank,
        agree=agree,
        overwrite=overwrite,
    )


@contextmanager
def _told_to_all(agree: Agreement) -> Iterator[None]:
    """Let an error of this rank's be every rank's."""
    try:
        yield
    except Exception as error:
        agree(error)
        raise
    agree(None)


def _master_entries(segments: Sequence[Segment], order: list[str]) -> list[TensorEntry]:
    found = {
        name: entry_of(name, shape, segment.sum_dtype)
        for segment in segments
        if segment.master is not None
        for name, shape in zip(segment.names, segment.shapes, strict=True)
    }
    return [found[name] for name in order if name in found]


_Runs = list[tuple[int, int, int, int, int]]
"""Slot, first element in the parameter, count, start in the flat buffer, start in the shard."""


def _own_runs(segment: Segment, rank: int) -> _Runs:
    return [
        (p.slot, p.param_start, p.numel, p.flat_start, p.shard_start)
        for p in segment.layout.pieces(rank)
    ]


def _cut(segment: Segment, buffer: Tensor, runs: _Runs) -> Iterator[Piece]:
    whole = buffer.numel() == segment.layout.numel
    for slot, param_start, numel, flat_start, shard_start in runs:
        start = flat_start if whole else shard_start
        yield Piece(segment.names[slot], param_start, buffer[start : start + numel])


def _model_pieces(own: dict[Segment, _Runs], buffers: dict[str, Tensor]) -> Iterator[Piece]:
    for segment, runs in own.items():
        yield from _cut(segment, segment.home(), runs)
    for name, buffer in buffers.items():
        yield Piece(name, 0, buffer.detach().reshape(-1).contiguous())


def _master_pieces(own: dict[Segment, _Runs]) -> Iterator[Piece]:
    for segment, runs in own.items():
        if segment.master is not None:
            yield from _cut(segment, segment.master, runs)


class _OptimizerStates:
    """An optimizer's states by logical name."""

    def __init__(self, segments: Sequence[Segment], optimizer: ZeroOptimizer) -> None:
        self._segments, self._optimizer = segments, optimizer
        self._names = {p: n for s in segments for n, p in zip(s.names, s.parameters, strict=True)}
        self._held: dict[str, dict[tuple[Segment, int], list[tuple[OwnPiece, Tensor]]]] = {}
        self._dtypes: dict[str, dict[str, str]] = {}

    def collect(self) -> None:
        """Find what this rank holds.

        Raises:
            CheckpointError: A state is not a tensor.
        """
        for segment in self._segments:
            for piece in segment.pieces:
                name = segment.names[piece.slot]
                for state, value in self._optimizer.state.get(piece.values, {}).items():
                    if not isinstance(value, Tensor):
                        raise CheckpointError(
                            f"optimizer state {state!r} of {name!r} is a "
                            f"{type(value).__name__}; only tensors are saved"
                        )
                    self._dtypes.setdefault(state, {})[name] = str(value.dtype)
                    held = self._held.setdefault(state, {})
                    held.setdefault((segment, piece.slot), []).append((piece, value))

    def merge(self, transport: Transport) -> None:
        """Learn which parameters have which state on other ranks."""
        self._dtypes = _merge(self._dtypes, transport)

    def files(self, parameters: dict[str, nn.Parameter]) -> dict[str, list[TensorEntry]]:
        """What each state's file holds."""
        return {
            f"optimizer.{state}": [
                entry_of(name, parameter.shape if self._is_elementwise(state) else (), found[name])
                for name, parameter in parameters.items()
                if name in found
            ]
            for state, found in self._dtypes.items()
        }

    def pieces(self, own: dict[Segment, _Runs]) -> dict[str, Iterable[Piece]]:
        """What this rank writes of them."""
        return {f"optimizer.{state}": self._pieces(state, own) for state in self._dtypes}

    def _pieces(self, state: str, own: dict[Segment, _Runs]) -> Iterator[Piece]:
        held = self._held.get(state, {})
        for segment, runs in own.items():
            for slot, param_start, numel, _, _ in runs:
                for piece, value in held.get((segment, slot), ()):
                    name = segment.names[slot]
                    if not self._is_elementwise(state):
                        if param_start == 0 and piece.param_start == 0:
                            yield Piece(name, 0, value.detach().reshape(1))
                        continue
                    start = param_start - piece.param_start
                    if start >= 0 and start + numel <= value.numel():
                        yield Piece(name, param_start, value.reshape(-1)[start : start + numel])
                        break

    def record(self) -> OptimizerRecord:
        """What the index says of the optimizer."""
        groups = [
            GroupRecord(
                names=[self._names[p] for p in members],
                options={k: _plain(v) for k, v in group.items() if k != "params"},
            )
            for group, members in zip(
                self._optimizer.param_groups, self._optimizer.logical, strict=True
            )
        ]
        kinds = {s: "elementwise" if self._is_elementwise(s) else "scalar" for s in self._dtypes}
        return OptimizerRecord(class_name=class_name(self._optimizer), states=kinds, groups=groups)

    def _is_elementwise(self, state: str) -> bool:
        return state in self._optimizer.form.elementwise


def class_name(optimizer: ZeroOptimizer) -> str:
    """Name of the class that the caller asked for."""
    return type(optimizer).__name__.removeprefix("Zero")


def _merge(mine: dict[str, dict[str, str]], transport: Transport) -> dict[str, dict[str, str]]:
    """Which parameters have which state on any rank, with its dtype."""
    lane = transport.lane
    told = [mine] if lane is None else exchange(mine, lane.control)
    merged: dict[str, dict[str, str]] = {}
    for states in told:
        for state, names in states.items():
            merged.setdefault(state, {}).update(names)
    return {state: merged[state] for state in sorted(merged)}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def _all_random_states(transport: Transport) -> list[bytes]:
    mine = random_state()
    return [mine] if transport.lane is None else exchange(mine, transport.lane.control)


def random_state() -> bytes:
    """torch's CPU generator's state, then that of the accelerator's generator, if there is one."""
    cpu = bytes(torch.get_rng_state().tolist())
    device = b""
    if torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        device = bytes(module.get_rng_state().tolist())
    return len(cpu).to_bytes(8, "little") + cpu + device


def set_random_state(state: bytes) -> None:
    """The inverse of `random_state`."""
    length = int.from_bytes(state[:8], "little")
    torch.set_rng_state(torch.tensor(list(state[8 : 8 + length]), dtype=torch.uint8))
    device = state[8 + length :]
    if device and torch.accelerator.is_available():
        module = torch.get_device_module(torch.accelerator.current_accelerator())
        module.set_rng_state(torch.tensor(list(device), dtype=torch.uint8))
