"""What is compared, and on which models. No torch: the process that reports stays small."""

from __future__ import annotations

from dataclasses import dataclass

NUM_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train.

    Attributes:
        key: Its name in figures.
        label: Its name in the table.
        stage: How much of the states is sharded between a backward and the update: 0 nothing, 1
            optimizer states, 2 gradients too, 3 parameters too. Bytes are compared within a stage.
        is_ours: Whether it is zero_partition.
        needs: The package that it needs beside torch; empty for none.
    """

    key: str
    label: str
    stage: int
    is_ours: bool = False
    needs: str = ""


VARIANTS = (
    Variant(key="stage0", label="zero_partition", stage=0, is_ours=True),
    Variant(key="stage1", label="zero_partition", stage=1, is_ours=True),
    Variant(key="stage2", label="zero_partition", stage=2, is_ours=True),
    Variant(key="stage3", label="zero_partition", stage=3, is_ours=True),
    Variant(key="stage3_torch_wire", label="zero_partition, TorchWire", stage=3, is_ours=True),
    Variant(key="ddp", label="DDP", stage=0),
    Variant(key="zero_redundancy", label="ZeroRedundancyOptimizer", stage=1),
    Variant(key="fsdp2_whole", label="FSDP2, whole until update", stage=2),
    Variant(key="fsdp2_forward", label="FSDP2, whole until backward", stage=3),
    Variant(key="fsdp2", label="FSDP2", stage=3),
    Variant(key="deepspeed1", label="DeepSpeed", stage=1, needs="deepspeed"),
    Variant(key="deepspeed2", label="DeepSpeed", stage=2, needs="deepspeed"),
    Variant(key="deepspeed3", label="DeepSpeed", stage=3, needs="deepspeed"),
    Variant(key="deepspeed3_linear", label="DeepSpeed, torch's linear", stage=3, needs="deepspeed"),
)
"""FSDP2 comes with `reshard_after_forward=False` twice. That alone lets go of the parameters in
backward, so that nothing but shards is left after it, as at stage 3; stage 2, whose parameters are
whole at that time, is that together with `set_reshard_after_backward(False)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One model and its micro-batch.

    Attributes:
        name: About how many parameters.
        suffix: What the names of its figures end in.
        width: Channels.
        num_layers: Blocks.
        num_heads: Attention heads.
        batch: Sequences a rank and step.
        length: Tokens a sequence.
        num_rounds: Rounds to time where nothing else is asked for.
    """

    name: str
    suffix: str
    width: int
    num_layers: int
    num_heads: int
    batch: int
    length: int
    num_rounds: int


SIZES = {
    size.name: size
    for size in (
        Size(
            name="1M",  # for trying the benchmark out
            suffix="_1m",
            width=128,
            num_layers=5,
            num_heads=4,
            batch=2,
            length=64,
            num_rounds=12,
        ),
        Size(
            name="10M",
            suffix="",
            width=320,
            num_layers=8,
            num_heads=5,
            batch=4,
            length=256,
            num_rounds=24,
        ),
        Size(
            name="50M",
            suffix="_50m",
            width=640,
            num_layers=10,
            num_heads=10,
            batch=2,
            length=256,
            num_rounds=12,
        ),
    )
}
