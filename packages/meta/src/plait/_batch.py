"""The three batch sizes: any two determine the third."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchSizes", "BatchSizesError", "Given", "plan_batch_sizes"]

DEFAULT_TRAIN_BATCH_SIZE = 24


@dataclass(frozen=True, slots=True)
class Given:
    """A number and where it came from (a file, ``--set``, ``--ranks``, ``default``)."""

    value: int
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """``train_batch_size == micro_batch_size * accumulation_steps * num_ranks``, in sequences.

    Args:
        train_batch_size: Sequences an update, over all ranks.
        micro_batch_size: Sequences a backward on one rank.
        accumulation_steps: Backwards an update on one rank.
        num_ranks: Ranks that share the batch.
    """

    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int
    num_ranks: int


class BatchSizesError(ValueError):
    """Batch sizes that contradict each other; the message names the numbers and their origins."""


def plan_batch_sizes(
    *, ranks: Given, train: Given | None, micro: Given | None, accumulation: Given | None
) -> BatchSizes:
    """Complete the batch sizes from those that are given; nothing given is ever changed.

    With `train` alone or `micro` alone the accumulation is 1; with neither, `train` is 24.

    Raises:
        BatchSizesError: The numbers contradict each other.

    Example:
        >>> sizes = plan_batch_sizes(
        ...     ranks=Given(2, "--ranks"),
        ...     train=Given(64, "a.json"),
        ...     micro=Given(8, "a.json"),
        ...     accumulation=None,
        ... )
        >>> sizes.accumulation_steps
        4
    """
    if train is None and micro is None:
        train = Given(DEFAULT_TRAIN_BATCH_SIZE, "default")
    if accumulation is None and (train is None or micro is None):
        accumulation = Given(1, "default")

    named = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    factors = [f"{name} {given.value} ({given.origin})" for name, given in named.items() if given]
    factors.append(f"{ranks.value} rank{'s' * (ranks.value != 1)} ({ranks.origin})")
    product = ranks.value
    for given in named.values():
        product *= given.value if given else 1

    if train is None:
        train = Given(product, "product")
    product_said = " x ".join(factors) + (f" = {product}" if len(factors) > 1 else "")
    train_said = f"train_batch_size {train.value} ({train.origin})"
    if micro and accumulation:
        if train.value != product:
            raise BatchSizesError(f"{train_said} is not {product_said}; leave one of them out")
    elif train.value % product:
        raise BatchSizesError(f"{train_said} is not a multiple of {product_said}")
    return BatchSizes(
        train_batch_size=train.value,
        micro_batch_size=micro.value if micro else train.value // product,
        accumulation_steps=accumulation.value if accumulation else train.value // product,
        num_ranks=ranks.value,
    )
