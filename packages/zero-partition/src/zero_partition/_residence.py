"""What each ZeRO stage shards, and how many bytes a rank then holds. Pure.

A segment has three states: parameters, gradients, optimizer state. The stage says which of them a
rank holds only its shard of, and so how long the full copy lives:

    stage   parameters   gradients         optimizer state
    0       whole        whole             whole
    1       whole        whole buffer (*)  shard
    2       whole        shard             shard
    3       shard        shard             shard

(*) At stage 1 the buffer in which local gradients arrive is kept from step to step; the reduced sum
lies in the owned slice of it. From stage 2 up the buffer goes as soon as its reduction has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from zero_partition._layout import SegmentLayout

STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True)
class Residence:
    """Which states of a segment are sharded."""

    parameters_sharded: bool
    gradients_sharded: bool
    optimizer_sharded: bool


def residence_of(stage: int) -> Residence:
    """The residence that ZeRO `stage` prescribes.

    Raises:
        ValueError: `stage` is not 0, 1, 2 or 3.

    Source:
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
        SC 2020, section 5.
    """
    if stage not in STAGES or isinstance(stage, bool):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage!r}")
    return Residence(stage >= 3, stage >= 2, stage >= 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentBytes:
    """Bytes one rank holds of one segment between a backward and the next forward."""

    parameters: int
    masters: int
    gradients: int
    padding: int


def plan_segment_bytes(
    layout: SegmentLayout,
    residence: Residence,
    *,
    rank: int,
    param_bytes: int,
    sum_bytes: int,
    has_master: bool,
    trainable: bool,
) -> SegmentBytes:
    """Bytes of a segment on `rank` in closed form.

    With P elements over N ranks and evenly cut slices, fp32 throughout (4 bytes each, plus Adam's
    8): ``16P``, ``8P + 8P/N``, ``4P + 12P/N``, ``16P/N`` at stages 0 to 3. With 16-bit parameters,
    fp32 masters and fp32 sums: ``18P``, ``4P + 16P/N``, ``2P + 16P/N``, ``18P/N``.

    Args:
        layout: The segment's plan.
        residence: What is sharded.
        rank: Whose bytes; slices are equal, but the last ones may hold mostly padding.
        param_bytes: Bytes of one parameter element.
        sum_bytes: Bytes of one element of masters and gradient sums.
        has_master: Whether the optimizer steps a wider copy.
        trainable: Whether there are gradients at all.

    Returns:
        Logical bytes by state, and the padding of all the buffers together.
    """
    whole = (layout.logical_numel, layout.numel)
    shard = (sum(piece.numel for piece in layout.pieces(rank)), layout.shard_numel)
    buffers = {"parameters": [(shard if residence.parameters_sharded else whole, param_bytes)]}
    buffers["masters"] = []
    if has_master:
        buffers["masters"].append((shard if residence.optimizer_sharded else whole, sum_bytes))
    buffers["gradients"] = gradients = []
    if trainable:
        in_place = has_master is False and not residence.gradients_sharded
        if in_place or not residence.optimizer_sharded:
            gradients.append((whole, sum_bytes))
        else:
            gradients.append((shard, sum_bytes))
            if not residence.gradients_sharded:
                gradients.append((whole, param_bytes))
    logical = {
        state: sum(numel * size for (numel, _), size in held) for state, held in buffers.items()
    }
    padding = sum(
        (padded - numel) * size for held in buffers.values() for (numel, padded), size in held
    )
    return SegmentBytes(padding=padding, **logical)
