"""The loader of `plait.initialize`: each rank its own part of a dataset, epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

__all__ = ["RankLoader", "check_dataset"]


@runtime_checkable
class _Indexed(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...

    def __len__(self) -> int: ...


def check_dataset(dataset: object) -> None:
    """Refuse what batches cannot be made of.

    Raises:
        TypeError: Neither a dataset with ``__len__`` and ``__getitem__`` nor an IterableDataset.
        ValueError: It is empty.
    """
    if isinstance(dataset, DataLoader | RankLoader):
        raise TypeError(
            f"training_data: expected a dataset, got a {type(dataset).__name__}; iterate over it "
            "yourself (give it a DistributedSampler), or pass its dataset"
        )
    if isinstance(dataset, IterableDataset):
        return
    if isinstance(dataset, Mapping) and dataset:
        raise TypeError(
            "training_data: expected a dataset, whose samples are numbered from 0, got a "
            f"{type(dataset).__name__} with the keys {', '.join(map(repr, dataset))}; pass one of "
            "its values"
        )
    if isinstance(dataset, str) or not isinstance(dataset, _Indexed):
        raise TypeError(
            "training_data: expected a dataset with __len__ and __getitem__ or an "
            f"IterableDataset, got {type(dataset).__name__}"
        )
    if len(dataset) == 0:
        raise ValueError("training_data: the dataset is empty")


class RankLoader:
    """Batches of this rank's part of a dataset.

    Every iteration is an epoch of its own order, the same on all ranks, and each rank takes every
    n-th sample of it; the last samples are repeated, or left out with `drop_last`, so that all
    ranks have as many batches. An IterableDataset is read as it is: it must part itself among the
    ranks, as with DeepSpeed.

    Args:
        dataset: A map-style dataset, or an IterableDataset.
        batch_size: Samples a batch.
        seed: Of the order.
        drop_last: Leave out what does not fill a batch.
        collate_fn: Makes a batch of samples; default: torch's.
        pin_memory: Copy batches into memory that an accelerator reads fast.

    Attributes:
        epoch: Number of the next iteration.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        pin_memory: bool,
    ) -> None:
        check_dataset(dataset)
        self.dataset, self.batch_size = dataset, batch_size
        self.epoch = 0
        self.sampler: DistributedSampler[Any] | None = None
        if not isinstance(dataset, IterableDataset):
            self.sampler = DistributedSampler(
                dataset,
                num_replicas=dist.get_world_size(),
                rank=dist.get_rank(),
                seed=seed,
                drop_last=drop_last,
            )
        self._batches: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self.sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
        )

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration, after a resume for example."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if self.sampler is not None:
            self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)
