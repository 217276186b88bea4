"""What the checkpoint tests share: everything legal, and ranks that are threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor

from zero_partition._checkpoint_index import build_index
from zero_partition._checkpoint_plan import TensorEntry, entry_of
from zero_partition._checkpoint_read import read_tensor
from zero_partition._checkpoint_write import Piece, write_checkpoint
from zero_partition._errors import CheckpointError

DTYPES = (
    torch.float64,
    torch.int64,
    torch.uint64,
    torch.complex64,
    torch.float32,
    torch.int32,
    torch.uint32,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.uint16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.int8,
    torch.uint8,
    torch.bool,
)

OLD = {"model": {"a": torch.zeros(1000)}}
NEW = {"model": {"a": torch.ones(1000), "b": torch.ones(3)}, "optimizer.m": {"a": torch.ones(2)}}

RUN_FILES = {
    "model": {"wte": torch.randn(4, 3), "ln": torch.randn(3).bfloat16(), "seen": torch.tensor(7)},
    "optimizer.exp_avg": {"wte": torch.randn(4, 3), "ln": torch.randn(3)},
}

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def tensor_entries(draw: DrawFn, max_dim: int = 5) -> list[TensorEntry]:
    """Tensors of one file: any name, any dtype, scalars and empty ones among them."""
    shapes = st.lists(st.integers(0, max_dim), max_size=3)
    return [
        entry_of(name, draw(shapes), draw(st.sampled_from(DTYPES)))
        for name in draw(st.lists(names, max_size=6, unique=True))
    ]


@st.composite
def cut_entries(
    draw: DrawFn, entries: Sequence[TensorEntry], num_ranks: int
) -> list[tuple[int, str, int, int]]:
    """(rank, name, start, numel) of pieces that cover each tensor once, cut at any element."""
    pieces = []
    for entry in entries:
        cuts = draw(st.lists(st.integers(0, entry.numel), max_size=4))
        bounds = [0, *sorted(cuts), entry.numel]
        for start, end in pairwise(bounds):
            pieces.append((draw(st.integers(0, num_ranks - 1)), entry.name, start, end - start))
    return draw(st.permutations(pieces))


def values_of(entry: TensorEntry) -> Tensor:
    """Random bits in an entry's shape and dtype, NaNs and subnormals among them."""
    generator = torch.Generator().manual_seed(crc32(repr(entry).encode()))
    top = 2 if entry.dtype == "BOOL" else 256
    raw = torch.randint(0, top, (entry.num_bytes,), dtype=torch.uint8, generator=generator)
    dtype = next(d for d in DTYPES if entry_of("", (), d).dtype == entry.dtype)
    return raw.view(dtype).view(entry.shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


def index_of(entries: Iterable[TensorEntry], **changes: Any) -> dict[str, Any]:
    """An index of nothing but parameters, unless `changes` say otherwise."""
    parts: dict[str, Any] = {
        "tensors": list(entries),
        "buffers": (),
        "aliases": {},
        "optimizer": None,
        "random_states": (),
        "state": None,
        "num_ranks": 1,
        "stage": 0,
    }
    return build_index(**(parts | changes))


def save(
    directory: Path,
    files: Mapping[str, Mapping[str, Tensor]],
    *,
    overwrite: bool = False,
    **index: Any,
) -> None:
    """Save whole tensors from one rank."""
    entries = {
        file: [entry_of(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        for file, tensors in files.items()
    }
    pieces = {
        file: [Piece(name, 0, tensor.reshape(-1)) for name, tensor in tensors.items()]
        for file, tensors in files.items()
    }
    write_checkpoint(
        directory,
        files=entries,
        pieces=pieces,
        index=index_of(entries.get("model", ()), **index),
        rank=0,
        agree=agree_alone,
        overwrite=overwrite,
    )


def agree_alone(error: BaseException | None) -> None:
    if error is not None:
        raise error


def run_ranks(
    num_ranks: int, body: Callable[[int, Callable[[BaseException | None], None]], None]
) -> list[BaseException | None]:
    """Run ``body(rank, agree)`` in a thread a rank; what each raised. A hang ends in 20 s."""
    barrier = threading.Barrier(num_ranks, timeout=20)
    errors: list[BaseException | None] = [None] * num_ranks
    raised: list[BaseException | None] = [None] * num_ranks

    def rank_main(rank: int) -> None:
        def agree(error: BaseException | None) -> None:
            errors[rank] = error
            barrier.wait()
            failed = [f"rank {r}: {e}" for r, e in enumerate(errors) if e is not None]
            barrier.wait()
            if failed:
                raise CheckpointError("; ".join(failed))

        try:
            body(rank, agree)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            raised[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def tree(folder: Path) -> dict[str, bytes]:
    """Everything under a folder: path -> content."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@contextmanager
def previous_checkpoint_stays(folder: Path) -> Iterator[None]:
    """Whatever fails inside must leave the folder as it is, and step-1 loadable."""
    save(folder / "step-1", OLD)
    before = tree(folder)
    yield
    assert tree(folder) == before
    assert sorted(path.name for path in folder.iterdir()) == ["step-1"]
    assert torch.equal(read_tensor(folder / "step-1", "a"), OLD["model"]["a"])


@contextmanager
def unsynced() -> Iterator[None]:
    """Do not wait for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


def save_run(folder: Path) -> Path:
    """Save steps 1, 2 and 10 of a run."""
    for step in (1, 2, 10):
        save(folder / f"step-{step}", RUN_FILES, aliases={"wte": ["head"]}, state={"step": step})
    return folder


def refusal(path: Path, name: str = "wte", file: str = "model") -> str:
    with pytest.raises(CheckpointError) as caught:
        read_tensor(path, name, file=file)
    return str(caught.value)


def fail_with(code: int) -> Any:
    def call(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    return call


class Elsewhere(Tensor):
    """A host tensor that says it is not one: what tensors on a device go through."""

    is_cpu = False
