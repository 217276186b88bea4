"""What one backward's reduced gradient is: uses, ranks, ties, types."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from torch import Tensor, nn

from models import BlockSpec, ModelSpec, build
from ranktest import RankPools
from reference import LossOf
from twin import STAGES, Twin, numbers, seeded, spec_loss, square_loss


class TwoViews(nn.Module):
    """One encoder applied to two inputs, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.encoder(first).tanh()), self.head(self.encoder(second).tanh())


class Switched(nn.Module):
    """A trunk, and a side that only some forwards use."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.side = nn.Linear(3, 3)

    def forward(self, x: Tensor, use_side: bool) -> Tensor:
        y = self.trunk(x).tanh()
        return self.side(y) if use_side else y


def switched_loss(seed: int, ranks: Collection[int]) -> LossOf:
    """Some ranks use the side."""

    def loss_of(model: nn.Module, rank: int) -> Tensor:
        return model(numbers(2, 3, seed=9 * seed + rank), rank in ranks).square().sum()

    return loss_of


def units_apart(model: nn.Module) -> list[nn.Module]:
    """Every child a unit of its own."""
    return list(model.children())


# C01


def two_views(rank: int, bucket_numel: int | None, overlap: bool) -> None:
    def loss_of(model: nn.Module, rank: int) -> Tensor:
        a, b = model(numbers(4, 5, seed=rank), numbers(2, 5, seed=10 + rank))
        return a.square().mean() + b.abs().sum()

    for stage in STAGES:
        for units_of in (None, units_apart):
            twin = Twin(
                seeded(TwoViews),
                stage=stage,
                bucket_numel=bucket_numel,
                overlap=overlap,
                units_of=units_of,
            )
            for _ in range(2):
                twin.backward(loss_of)
                twin.finish()
                twin.step()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_numel", [1, 10**6, None])
def test_a_module_used_twice_gets_both_contributions(
    rank_pools: RankPools, bucket_numel: int | None, overlap: bool
) -> None:
    rank_pools(2).run(two_views, bucket_numel, overlap)


# C03, C04


def unused_then_used(rank: int, cls: type[torch.optim.Optimizer]) -> None:
    for stage in STAGES:
        twin = Twin(seeded(Switched), cls=cls, stage=stage, units_of=units_apart)
        for step, use_side in enumerate([False, True, False]):
            twin.backward(switched_loss(step, range(3) if use_side else ()))
            twin.finish()
            grads = twin.zero.gradients()
            assert (grads["side.weight"] is None) is (not use_side)
            twin.step()
        twin.check_states()  # the side has taken one step, the trunk three


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_parameter_that_no_rank_used_keeps_grad_none_value_and_state(
    rank_pools: RankPools, num_ranks: int, cls: type[torch.optim.Optimizer]
) -> None:
    rank_pools(num_ranks).run(unused_then_used, cls)


def used_now_and_then(rank: int, uses: tuple[tuple[int, int], ...]) -> None:
    for stage in STAGES:
        twin = Twin(seeded(Switched), stage=stage, units_of=units_apart)
        for micro in range(3):
            twin.backward(switched_loss(micro, [r for m, r in uses if m == micro]))
        twin.finish()
        twin.step()
        twin.check_states()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("uses", [((1, 0), (2, 1)), ((0, 1),), ((2, 0), (2, 1)), ()])
def test_a_parameter_used_in_some_micro_batches_on_some_ranks_counts_as_zero_elsewhere(
    rank_pools: RankPools, num_ranks: int, uses: tuple[tuple[int, int], ...]
) -> None:
    rank_pools(num_ranks).run(used_now_and_then, uses)


# C10


class Mixed(nn.Module):
    """Layers of three types, one inside another's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 5).double()
        self.narrow = nn.Linear(5, 5).bfloat16()
        self.plain = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x.double()).tanh()
        y = self.narrow(y.bfloat16()).tanh() * self.scale
        return self.plain(y.float())


def mixed_types(rank: int) -> list[bytes]:
    seen = []
    for stage in STAGES:
        for bucket_numel in (1, None):
            twin = Twin(seeded(Mixed), stage=stage, bucket_numel=bucket_numel)
            for step in range(2):
                for micro in range(2):
                    twin.backward(square_loss(10 * step + micro))
                twin.finish()
                twin.clip(0.1)
                twin.step()
            twin.check_states()
            whole = twin.zero.state_dict()
            assert {t.dtype for t in whole.values()} == {
                torch.float64,
                torch.bfloat16,
                torch.float32,
            }
            seen.append(b"".join(t.double().numpy().tobytes() for t in whole.values()))
    return seen


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_type_of_a_mixed_model_is_reduced_and_ranks_agree(
    rank_pools: RankPools, num_ranks: int
) -> None:
    seen = rank_pools(num_ranks).run(mixed_types)
    assert all(each == seen[0] for each in seen)


# C15


def tied_and_recomputed(rank: int, spec: ModelSpec) -> None:
    for stage in STAGES:
        for overlap in (True, False):
            twin = Twin(lambda: build(spec), stage=stage, overlap=overlap)
            for step in range(2):
                twin.backward(spec_loss(spec, step))
                twin.finish()
                twin.step()
            assert twin.model.head.weight is twin.model.embed.weight


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("checkpoint", ["reentrant", "non_reentrant", "inner"])
def test_a_tie_under_activation_checkpointing_is_reduced_once(
    rank_pools: RankPools, num_ranks: int, checkpoint: str
) -> None:
    block = BlockSpec(checkpoint=checkpoint)
    blocks = (block, block, BlockSpec(checkpoint=checkpoint, tied_to=0, num_uses=2))
    spec = ModelSpec(blocks=blocks, tied_head=True)
    rank_pools(num_ranks).run(tied_and_recomputed, spec)
