"""The loader that is made of ``training_data``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import plait
from engine_reference import small_model
from ranktest import RankPools


def start(data: Any, *, micro: int = 2, **more: Any) -> Any:
    arguments = {"collate_fn": more.pop("collate_fn", None)}
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }
    engine, _, loader, _ = plait.initialize(
        model=small_model(), training_data=data, config=config, **arguments
    )
    assert engine.training_dataloader is loader
    return loader


def two_epochs(rank: int, num_samples: int, micro: int, drop_last: bool) -> list[list[list[int]]]:
    data = TensorDataset(torch.arange(num_samples))
    loader = start(data, micro=micro, dataloader_drop_last=drop_last, seed=3)
    epochs = [[batch.tolist() for (batch,) in loader] for _ in range(2)]
    assert all(len(epoch) == len(loader) for epoch in epochs)
    loader.set_epoch(0)
    assert [batch.tolist() for (batch,) in loader] == epochs[0], "an order can be had again"
    return epochs


@settings(max_examples=settings.default.max_examples // 3)
@given(
    num_samples=st.integers(1, 20),
    micro=st.integers(1, 5),
    num_ranks=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_ranks_share_out_every_epoch(
    rank_pools: RankPools, num_samples: int, micro: int, num_ranks: int, drop_last: bool
) -> None:
    ranks = rank_pools(num_ranks).run(two_epochs, num_samples, micro, drop_last)
    for epoch in range(2):
        shares = [rank[epoch] for rank in ranks]
        assert len({len(share) for share in shares}) == 1, "as many batches on every rank"
        seen = [sample for share in shares for batch in share for sample in batch]
        if drop_last:
            assert len(set(seen)) == len(seen)
            assert all(len(batch) == micro for share in shares for batch in share)
        else:
            assert set(seen) == set(range(num_samples))
            assert len(seen) < num_samples + num_ranks


def orders(rank: int, seed: int) -> list[list[int]]:
    loader = start(TensorDataset(torch.arange(50)), seed=seed)
    return [[n for (batch,) in loader for n in batch.tolist()] for _ in range(2)]


def test_every_epoch_has_an_order_of_its_own_that_the_seed_decides(rank_pools: RankPools) -> None:
    (first,), (again,), (other,) = (rank_pools(1).run(orders, seed) for seed in (1, 1, 2))
    assert first == again
    assert first[0] != first[1]
    assert first[0] != other[0]


class Stream(IterableDataset[int]):
    """Parts itself."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * self.rank, 10 * self.rank + 5))


def stream(rank: int) -> None:
    loader = start(Stream(rank), collate_fn=list)
    first = 10 * rank
    assert list(loader) == list(loader) == [[first, first + 1], [first + 2, first + 3], [first + 4]]


def test_a_stream_is_read_as_it_is(rank_pools: RankPools) -> None:
    rank_pools(2).run(stream)


def pairs(rank: int) -> None:
    loader = start([(1, "a"), (2, "b")], collate_fn=sorted)
    assert list(loader) == [[(1, "a"), (2, "b")]]


def test_samples_are_collated_as_asked_for(rank_pools: RankPools) -> None:
    rank_pools(1).run(pairs)


def refused(rank: int) -> None:
    data = TensorDataset(torch.arange(4))
    with pytest.raises(TypeError, match="expected a dataset, got a DataLoader; iterate over it"):
        start(DataLoader(data))
    with pytest.raises(TypeError, match=r"with __len__ and __getitem__ or an Iter.*, got int"):
        start(3)
    with pytest.raises(ValueError, match="the dataset is empty"):
        start(TensorDataset(torch.arange(0)))


def test_data_that_makes_no_batches_is_refused(rank_pools: RankPools) -> None:
    rank_pools(2).run(refused)
