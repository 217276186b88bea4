"""Models with frozen parts, beside others, dropped, and with outputs of any kind."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from models import BlockSpec, ModelSpec, Moment, build
from ranktest import RankPools
from training import check_same
from twin import STAGES, Twin, check_at_rest, numbers, seeded, spec_loss
from zero_partition import Precision, partition

# C31, C36


def frozen_parts(rank: int, spec: ModelSpec) -> None:
    for stage in STAGES:
        twin = Twin(lambda: build(spec), stage=stage)
        for step in range(3):
            twin.backward(spec_loss(spec, step))
            twin.finish()
            frozen = {n for n, p in twin.model.named_parameters() if not p.requires_grad}
            assert frozen
            assert not frozen & set(twin.zero.gradients())
            twin.step()
        if stage == 3:
            check_at_rest(twin.model)
        twin.check_states()


@pytest.mark.parametrize(
    ("num_ranks", "checkpoint", "frozen"),
    [
        (2, "non_reentrant", ("norm",)),
        (2, "reentrant", ("inner",)),
        (2, "inner", ("norm", "inner", "outer", "gain")),
        (2, None, ("norm",)),
        (3, "non_reentrant", ("norm", "inner", "outer", "gain")),
        (3, "reentrant", ("norm",)),
        (3, "inner", ("inner",)),
        (3, None, ("inner",)),
    ],
)
def test_frozen_parts_under_checkpointing_train_like_one_process_and_rest(
    rank_pools: RankPools, num_ranks: int, checkpoint: str | None, frozen: tuple[str, ...]
) -> None:
    block = BlockSpec(checkpoint=checkpoint, frozen=frozenset(frozen))
    spec = ModelSpec(blocks=(block, replace(block, frozen=frozenset()), block))
    rank_pools(num_ranks).run(frozen_parts, spec)


def mostly_frozen(rank: int) -> None:
    def make() -> nn.Module:
        layers = [nn.Linear(64, 64) for _ in range(20)]
        for layer in layers[:10] + layers[11:]:
            layer.requires_grad_(False)
        return nn.Sequential(*layers)

    trainable = 64 * 64 + 64
    for stage in STAGES:
        for param in (None, torch.bfloat16):
            model = make() if param is None else make().half().requires_grad_(False)
            if param is not None:
                model[10].float().requires_grad_(True)
            zero = partition(model, stage=stage, precision=Precision(param=param))
            zero.optimizer(torch.optim.AdamW, lr=1e-3)
            measured = {row.state: row.measured_bytes for row in zero.memory.rows}
            share = 1 if stage == 0 else zero.num_ranks
            extra = sum(b for state, b in measured.items() if "parameter" not in state)
            # Sums, two moments and, for 16 bits, a master: 16 bytes an element at most, and slack.
            assert extra <= 16 * trainable + 8192, measured
            assert share >= 1
            types = {p.dtype for p in model.parameters() if not p.requires_grad}
            assert types == ({torch.float32} if param is None else {torch.float16})


def test_frozen_parameters_have_no_gradients_masters_or_moments_and_keep_their_type(
    rank_pools: RankPools,
) -> None:
    rank_pools(2).run(mostly_frozen)


# C34


def student_and_teacher(rank: int, stages: tuple[int, int]) -> None:
    spec = ModelSpec(blocks=(BlockSpec(), BlockSpec(hidden=7)), dim=5)
    teacher = build(replace(spec, seed=3)).requires_grad_(False).eval()
    before = {n: t.clone() for n, t in teacher.state_dict().items()}
    plain_teacher = build(replace(spec, seed=3)).requires_grad_(False).eval()
    zero_teacher = partition(teacher, stage=stages[1])
    twin = Twin(lambda: build(spec), stage=stages[0])

    def loss_of(step: int) -> Callable[[nn.Module, int], Tensor]:
        def distil(model: nn.Module, r: int) -> Tensor:
            tokens = (torch.arange(6).view(2, 3) * (r + 2) + step) % spec.vocab
            source = teacher if model is twin.model else plain_teacher
            with torch.no_grad():
                target = source(tokens, Moment(step, 0, r))
            return (model(tokens, Moment(step, 0, r)) - target).square().mean()

        return distil

    counts = []
    for step in range(20):
        twin.backward(loss_of(step))
        stepped = twin.optimizer.step()
        twin.reference.step()
        twin.optimizer.zero_grad()
        assert stepped
        gc.collect()
        counts.append(sum(issubclass(type(o), Tensor) for o in gc.get_objects()))
    assert min(counts[11:]) == min(counts[2:11]), counts  # one may be on its way while we count
    twin.check()
    check_same("teacher", before, zero_teacher.state_dict())


@pytest.mark.parametrize("stages", [(3, 3), (1, 3)], ids=str)
def test_a_teacher_beside_a_student_stays_bitwise_and_no_tensors_pile_up(
    rank_pools: RankPools, stages: tuple[int, int]
) -> None:
    rank_pools(2).run(student_and_teacher, stages)


def partition_and_drop(rank: int) -> tuple[int, int]:
    counts = []
    for _ in range(8):
        model = nn.Linear(3, 2)
        zero = partition(model, stage=3)
        optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        gone = weakref.ref(model), weakref.ref(zero), weakref.ref(optimizer)
        del model, zero, optimizer
        gc.collect()
        assert [ref() for ref in gone] == [None, None, None]
        counts.append(len(list(Path("/proc/self/task").iterdir())))
    return counts[2], counts[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_model_that_is_dropped_frees_its_memory_and_its_groups(rank_pools: RankPools) -> None:
    for early, late in rank_pools(2).run(partition_and_drop):
        assert late == early


# C37


@dataclass
class Record:
    value: Tensor
    note: str


class Pair(NamedTuple):
    value: Tensor
    count: int


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Nested:
    def __init__(self, value: Tensor) -> None:
        self.layers = [{"states": (Slotted(value),)}]


PACK: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (lambda t: Record(t, "x"), lambda o: o.value),
    "named tuple": (lambda t: Pair(t, 3), lambda o: o.value),
    "dict": (lambda t: {"value": t, "n": 1}, lambda o: o["value"]),
    "list of dicts": (lambda t: [{"value": t}, None], lambda o: o[0]["value"]),
    "slots": (Slotted, lambda o: o.value),
    "nested object": (Nested, lambda o: o.layers[0]["states"][0].value),
}


class Packing(nn.Module):
    """A block that packs its output."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner, self.outer = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, x: Any) -> Any:
        value = x if isinstance(x, Tensor) else PACK[self.how][1](x)
        return PACK[self.how][0](value + self.outer(self.inner(value).tanh()))


class Unpacking(nn.Module):
    """Packing blocks, and an output that is packed too."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Packing(how) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


def packed_outputs(rank: int, how: str) -> None:
    for stage in STAGES:
        twin = Twin(seeded(lambda: Unpacking(how)), stage=stage)
        for step in range(2):
            twin.backward(
                lambda m, r, s=step: PACK[how][1](m(numbers(2, 5, seed=r + s))).square().mean()
            )
            twin.finish()
            twin.step()
        if stage == 3:
            check_at_rest(twin.model)


@pytest.mark.parametrize("how", sorted(PACK))
def test_outputs_of_any_container_are_found_and_backward_gathers(
    rank_pools: RankPools, how: str
) -> None:
    rank_pools(2).run(packed_outputs, how)
