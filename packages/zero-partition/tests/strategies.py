"""Everything legal, drawn by hypothesis: models, optimizers, loops and ways to partition them.

A `TrainingRun` fixes every number; a `Partitioning` may change time and memory only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from models import ALWAYS, NEVER, BlockSpec, ModelSpec, When, build

SIZES = (1, 2, 3, 5, 7, 11, 13, 16)
PARTS = ("norm", "inner", "outer", "gain")


@dataclass(frozen=True)
class OptimizerSpec:
    """A torch optimizer by name, its options, and how its parameters are grouped."""

    name: str = "AdamW"
    options: tuple[tuple[str, Any], ...] = (("lr", 0.05),)
    groups: str = "none"  # "none" | "decay" | "rates" | "named" | "named_groups" | "subset"


@dataclass(frozen=True)
class TrainingRun:
    """A model and a loop; `denominator` counts what one accumulation is divided by."""

    model: ModelSpec
    num_ranks: int = 2
    optimizer: OptimizerSpec = OptimizerSpec()
    steps: int = 2
    accumulation: int = 1
    max_norm: float | None = None
    denominator: float | None = None
    bf16: bool = False
    zero_grad: str = "optimizer"  # who clears: "optimizer" | "model" | "zero" | "never"


@dataclass(frozen=True)
class Partitioning:
    """How the library cuts and schedules a run."""

    stage: int = 3
    bucket: str = "none"  # "none" | "one" | "seven" | "param" | "param+1" | "total" | "10 total"
    overlap: bool = True
    wire: str = "chosen"  # "chosen" | "torch" | "small" rings | "hosts" | "nodes"


def bucket_numel(spec: ModelSpec, bucket: str) -> int | None:
    """The size that a `Partitioning` names, for one model."""
    numels = [p.numel() for p in build(spec).parameters()]
    some = max(sorted(numels)[len(numels) // 2], 1)
    sizes = {"none": None, "one": 1, "seven": 7, "param": some, "param+1": some + 1}
    return {**sizes, "total": sum(numels), "10 total": 10 * sum(numels)}[bucket]


def whens(num_ranks: int) -> SearchStrategy[When]:
    """Always, never, on some ranks, in some steps, in some micro-batches."""
    some_ranks = st.frozensets(st.integers(0, num_ranks - 1), max_size=num_ranks)
    return st.one_of(
        st.just(ALWAYS),
        st.just(NEVER),
        some_ranks.map(lambda ranks: When(ranks=tuple(sorted(ranks)))),
        st.sampled_from([When(steps=(0,)), When(steps=(1,)), When(micros=(0,)), When(micros=(1,))]),
        st.just(When(ranks=(0,), micros=(1,))),
    )


@st.composite
def block_specs(draw: DrawFn, num_ranks: int) -> BlockSpec:
    """One odd block."""
    checkpoint = draw(st.sampled_from([None, None, None, "reentrant", "non_reentrant", "inner"]))
    dtype = draw(st.sampled_from(["float32", "float32", "float32", "float64", "bfloat16"]))
    outputs = ["tensor"] if checkpoint == "reentrant" else ["tensor", "dict", "dataclass", "object"]
    frozen = draw(st.one_of(st.just(()), st.just(PARTS), st.sets(st.sampled_from(PARTS))))
    return BlockSpec(
        hidden=draw(st.sampled_from(SIZES)),
        dtype=dtype,
        frozen=frozenset(frozen),
        empty=tuple(draw(st.lists(st.sampled_from([(0,), (0, 8)]), max_size=2))),
        used=draw(st.one_of(st.just(ALWAYS), whens(num_ranks))),
        branch=draw(st.one_of(st.just(NEVER), whens(num_ranks))),
        num_uses=draw(st.sampled_from([1, 1, 2])),
        checkpoint=checkpoint,
        output=draw(st.sampled_from(outputs)),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.25])),
    )


@st.composite
def model_specs(draw: DrawFn, num_ranks: int = 4) -> ModelSpec:
    """Prime and tiny sizes, ties, frozen, empty, unused and doubly used parts, mixed types."""
    blocks = draw(st.lists(block_specs(num_ranks), max_size=3))
    for i in range(1, len(blocks)):
        if draw(
            st.sampled_from([False, False, True])
        ):  # never tied to a tied one: one source a tie
            source = draw(st.sampled_from([j for j in range(i) if blocks[j].tied_to is None]))
            blocks[i] = replace(blocks[i], tied_to=source, hidden=blocks[source].hidden)
            blocks[i] = replace(blocks[i], dtype=blocks[source].dtype)
    empties = st.sampled_from([None, None, (0,), (0, 8)])
    frozen = st.sets(st.sampled_from(["embed", "norm", "head"]), max_size=2)
    return ModelSpec(
        vocab=draw(st.sampled_from([2, 3, 7, 17])),
        dim=draw(st.sampled_from(SIZES)),
        blocks=tuple(blocks),
        tied_head=draw(st.booleans()),
        frozen=frozenset(draw(st.one_of(st.just(frozenset[str]()), frozen))),
        empty_first=draw(empties),
        empty_last=draw(empties),
        seed=draw(st.integers(0, 9)),
        units=draw(st.sampled_from(["default", "default", "blocks", "inner", "none"])),
        in_list=draw(st.sampled_from([True, True, False])),
    )


OPTIMIZERS: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("SGD", (("lr", 0.1),)),
    ("SGD", (("lr", 0.1), ("momentum", 0.9), ("nesterov", True), ("weight_decay", 0.01))),
    ("Adam", (("lr", 0.05),)),
    ("AdamW", (("lr", 0.05), ("weight_decay", 0.1))),
    ("AdamW", (("lr", 0.05), ("amsgrad", True))),
    ("AdamW", (("lr", 0.05), ("foreach", True))),
    ("SGD", (("lr", 0.1), ("momentum", 0.9), ("foreach", True))),
    ("Adagrad", (("lr", 0.05),)),
    ("RMSprop", (("lr", 0.01), ("momentum", 0.9), ("centered", True))),
    ("NAdam", (("lr", 0.05),)),
    ("RAdam", (("lr", 0.05),)),
    ("Adamax", (("lr", 0.05),)),
    ("Adadelta", (("lr", 0.5),)),
    ("ASGD", (("lr", 0.05),)),
    ("Rprop", (("lr", 0.01),)),
)
FUSED: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("AdamW", (("lr", 0.05), ("fused", True))),
    ("Adam", (("lr", 0.05), ("amsgrad", True), ("fused", True))),
    ("SGD", (("lr", 0.1), ("momentum", 0.9), ("fused", True))),
    ("Adagrad", (("lr", 0.05), ("fused", True))),
)


@st.composite
def optimizer_specs(draw: DrawFn) -> OptimizerSpec:
    """Any elementwise optimizer of torch, plain, foreach or fused."""
    name, options = draw(st.sampled_from([*OPTIMIZERS, *FUSED]))
    kinds = ["none", "none", "decay", "rates", "named", "named_groups", "subset"]
    return OptimizerSpec(name, options, draw(st.sampled_from(kinds)))


@st.composite
def training_runs(draw: DrawFn, *, bf16: bool = False) -> TrainingRun:
    """A model, an optimizer and a loop, on 1 to 4 ranks."""
    num_ranks = draw(st.sampled_from([2, 3, 4, 1]))
    model = draw(model_specs(num_ranks))
    if bf16:
        plain = [replace(b, dtype="float32") for b in model.blocks]
        model = replace(model, blocks=tuple(plain))
    return TrainingRun(
        model=model,
        num_ranks=num_ranks,
        optimizer=draw(optimizer_specs()),
        steps=draw(st.sampled_from([2, 3])),
        accumulation=draw(st.sampled_from([1, 1, 2, 3, 4])),
        max_norm=draw(st.sampled_from([None, 1e4, 0.01])),
        denominator=draw(st.sampled_from([None, None, 1, 7, 12.5])),
        bf16=bf16,
        zero_grad=draw(st.sampled_from(["optimizer", "model", "zero"])),
    )


@st.composite
def partitionings(draw: DrawFn) -> Partitioning:
    """Any stage, bucket size, overlap and wire."""
    buckets = ["none", "one", "seven", "param", "param+1", "total", "10 total"]
    return Partitioning(
        stage=draw(st.sampled_from([3, 2, 1, 0])),
        bucket=draw(st.sampled_from(buckets)),
        overlap=draw(st.booleans()),
        wire=draw(st.sampled_from(["chosen", "chosen", "torch", "small", "hosts", "nodes"])),
    )
