"""Bytes a rank holds, by state: counted in its tensors, beside the closed form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from zero_partition._gradients import GradientBuffers
from zero_partition._layout import Piece
from zero_partition._optimizer import ZeroOptimizer
from zero_partition._residence import plan_segment_bytes
from zero_partition._segment import Segment


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """One state: what its tensors hold now, and what the plan says they hold between steps."""

    state: str
    measured_bytes: int
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """What one rank holds of a partitioned model.

    Measured and planned are equal once a step has been made: before that gradients and optimizer
    states do not exist, and during a step units are whole and messages are under way.
    """

    rank: int
    rows: tuple[MemoryRow, ...]

    @property
    def measured_bytes(self) -> int:
        """All states together, as counted."""
        return sum(row.measured_bytes for row in self.rows)

    @property
    def planned_bytes(self) -> int:
        """All states together, as planned."""
        return sum(row.planned_bytes for row in self.rows)

    def __str__(self) -> str:
        total = MemoryRow("total", self.measured_bytes, self.planned_bytes)
        lines = [f"{f'bytes on rank {self.rank}':<22}{'measured':>16}{'planned':>16}"]
        lines += [
            f"{row.state:<22}{row.measured_bytes:>16,}{row.planned_bytes:>16,}"
            for row in (*self.rows, total)
        ]
        return "\n".join(lines)


def measure(
    segments: Sequence[Segment],
    buffers: Iterable[GradientBuffers],
    optimizers: Iterable[ZeroOptimizer],
    *,
    rank: int,
    secondary_bytes: int,
    wire_bytes: int,
) -> Memory:
    """Count the tensors of a partition and set the closed form beside.

    What the wire keeps for later messages has no closed form here: it is planned as it is.
    """
    planned = dict.fromkeys(("parameters", "masters", "gradients", "padding"), 0)
    measured = dict.fromkeys((*planned, "communication buffers"), 0)
    for segment in segments:
        plan = plan_segment_bytes(
            segment.layout,
            segment.residence,
            rank=rank,
            param_bytes=segment.dtype.itemsize,
            sum_bytes=segment.sum_dtype.itemsize,
            has_master=segment.has_master,
            trainable=segment.trainable,
        )
        for state in planned:
            planned[state] += getattr(plan, state)
        whole, owned = segment.layout.logical_numel, _owned_numel(segment.layout.pieces(rank))
        held = [("parameters", segment.home(), segment.residence.parameters_sharded)]
        if segment.shard is not None:
            measured["communication buffers"] += _bytes([segment.full])
        if segment.master is not None:
            held.append(("masters", segment.master, segment.residence.optimizer_sharded))
        for state, tensor, is_shard in held:
            logical = (owned if is_shard else whole) * tensor.element_size()
            measured[state] += logical
            measured["padding"] += _own_bytes(segment, tensor) - logical
    for held_gradients in buffers:
        logical, padding, passing = held_gradients.bytes_held()
        measured["gradients"] += logical
        measured["padding"] += padding
        measured["communication buffers"] += passing
    state_measured, state_planned = _optimizer_bytes(optimizers)
    rows = [
        MemoryRow("parameters", measured["parameters"], planned["parameters"]),
        MemoryRow("masters", measured["masters"], planned["masters"]),
        MemoryRow("gradients", measured["gradients"], planned["gradients"]),
        MemoryRow("optimizer state", state_measured, state_planned),
        MemoryRow("communication buffers", measured["communication buffers"], 0),
        MemoryRow("padding", measured["padding"], planned["padding"]),
    ]
    if secondary_bytes:
        rows.insert(-1, MemoryRow("secondary shards", secondary_bytes, 0))
    if wire_bytes:
        rows.insert(-1, MemoryRow("kept by the wire", wire_bytes, wire_bytes))
    return Memory(rank, tuple(rows))


def _optimizer_bytes(optimizers: Iterable[ZeroOptimizer]) -> tuple[int, int]:
    measured = planned = 0
    for optimizer in optimizers:
        states = [t for state in optimizer.state.values() for t in state.values()]
        measured += _bytes([t for t in states if isinstance(t, Tensor)])
        for piece in (p for group in optimizer.param_groups for p in group["params"]):
            planned += sum(optimizer.form.elementwise.values()) * piece.numel()
            planned += sum(optimizer.form.scalars.values())
    return measured, planned


def _own_bytes(segment: Segment, tensor: Tensor) -> int:
    """This rank's part of a buffer."""
    if segment.is_shared and tensor is segment.full:
        return segment.layout.shard_numel * tensor.element_size()
    return _bytes([tensor])


def _owned_numel(pieces: Iterable[Piece]) -> int:
    return sum(piece.numel for piece in pieces)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
