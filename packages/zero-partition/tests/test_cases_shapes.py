"""Odd sizes, empty parameters, and the sizes of messages."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models import BlockSpec, ModelSpec, build
from ranktest import RankPools
from training import check_same
from twin import STAGES, Twin, numbers, seeded, spec_loss
from zero_partition import partition


class WithEmpties(nn.Module):
    """Empty parameters first, in the middle and last, used and unused."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(shape))
        self.inner = nn.Linear(3, 5)
        self.middle = nn.Parameter(torch.empty(shape))
        self.outer = nn.Linear(5, 1)
        self.unused = nn.Parameter(torch.empty(shape))
        self.last = nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x + self.first.sum()).tanh()
        return self.outer(y + self.middle.sum()) + self.last.sum()


def square(model: nn.Module, rank: int) -> Tensor:
    """Mean square of the outputs for inputs of a rank's own."""
    return model(numbers(4, 3, seed=rank)).square().mean()


# C11


def empty_parameters(rank: int, shape: tuple[int, ...], folder: str) -> None:
    for stage in STAGES:
        twin = Twin(seeded(lambda: WithEmpties(shape)), stage=stage, units_of=lambda m: [m.inner])
        for _ in range(3):
            twin.backward(square)
            twin.finish()
            twin.clip(0.1)
            twin.step()
        assert twin.zero.state_dict()["first"].shape == shape
        twin.zero.save(f"{folder}/stage{stage}", twin.optimizer)


def resume_empty_parameters(rank: int, shape: tuple[int, ...], folder: str) -> None:
    wholes = []
    for stage in STAGES:
        model = seeded(lambda: WithEmpties(shape), seed=1)()
        zero = partition(model, stage=3 - stage, units=[model.outer])
        optimizer = zero.optimizer(torch.optim.AdamW, lr=0.05)
        zero.load(f"{folder}/stage{stage}", optimizer)
        wholes.append(zero.state_dict())
        square(model, rank).backward()
        assert optimizer.step() is True
    for whole in wholes[1:]:
        check_same("parameter", wholes[0], whole)


@pytest.mark.parametrize("shape", [(0,), (0, 8), (3, 0)])
def test_empty_parameters_train_save_load_and_reshard(
    rank_pools: RankPools, shape: tuple[int, ...], tmp_path: Path
) -> None:
    rank_pools(2).run(empty_parameters, shape, str(tmp_path))
    rank_pools(3).run(resume_empty_parameters, shape, str(tmp_path))


def only_tiny(rank: int, shapes: tuple[tuple[int, ...], ...]) -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(torch.ones(shape) for shape in shapes)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([(p * x).sum() for p in self.parts]).sum()

    for stage in STAGES:
        twin = Twin(Tiny, stage=stage)
        for step in range(2):
            twin.backward(lambda m, r, step=step: m(numbers(1, seed=r + step)).square())
            twin.finish()
            twin.step()
        twin.check_states()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("shapes", [((),), ((1,),), ((), (1,), (1, 1)), ((2,), ())], ids=str)
def test_more_ranks_than_elements_train_like_one_process(
    rank_pools: RankPools, num_ranks: int, shapes: tuple[tuple[int, ...], ...]
) -> None:
    rank_pools(num_ranks).run(only_tiny, shapes)


# C13


def prime_sizes(rank: int, primes: tuple[int, ...]) -> None:
    def make() -> nn.Module:
        sizes = (3, *primes, 1)
        return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))

    for stage in STAGES:
        twin = Twin(seeded(make), stage=stage, units_of=list)
        for _ in range(2):
            twin.backward(square)
            twin.finish()
            twin.step()
        for name, whole in twin.zero.state_dict().items():
            assert whole.shape == dict(make().named_parameters())[name].shape
            assert whole.untyped_storage().nbytes() == whole.numel() * whole.element_size()
        covered: dict[str, int] = {}
        for name, part, shard in twin.zero.shards():
            assert shard.shape == (part.stop - part.start,)
            covered[name] = covered.get(name, 0) + shard.numel()
        if stage > 0:
            assert sum(covered.values()) < sum(p.numel() for p in make().parameters())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("primes", [(7, 13), (31, 2), (101,)], ids=str)
def test_prime_sizes_train_like_one_process_and_come_back_without_padding(
    rank_pools: RankPools, num_ranks: int, primes: tuple[int, ...]
) -> None:
    rank_pools(num_ranks).run(prime_sizes, primes)


# C16


@pytest.mark.parametrize("bucket_numel", [0, -1, -(10**12)])
def test_a_bucket_without_elements_is_refused_by_name_and_leaves_the_model_alone(
    bucket_numel: int,
) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=f"bucket_numel.*{bucket_numel}"):
        partition(model, stage=3, bucket_numel=bucket_numel)
    assert type(model.weight) is nn.Parameter
    model(torch.ones(3)).sum().backward()


@pytest.mark.parametrize("bucket_numel", [1, 2, 10**12])
def test_any_positive_bucket_size_trains(rank_pools: RankPools, bucket_numel: int) -> None:
    rank_pools(2).run(any_bucket, bucket_numel)


def any_bucket(rank: int, bucket_numel: int) -> None:
    spec = ModelSpec(blocks=(BlockSpec(hidden=13), BlockSpec(hidden=16)))
    for stage in STAGES:
        twin = Twin(lambda: build(spec), stage=stage, bucket_numel=bucket_numel)
        for step in range(2):
            twin.backward(spec_loss(spec, step))
            twin.finish()
            twin.step()


@pytest.mark.parametrize("stage", [-1, 4, "3", True, None])
def test_a_stage_that_is_none_of_four_is_refused(stage: object) -> None:
    model = nn.Linear(3, 2)
    with pytest.raises((ValueError, TypeError), match="stage"):
        partition(model, stage=stage)  # type: ignore[arg-type]
    assert type(model.weight) is nn.Parameter
