"""A save is whole or it did not happen, whoever fails."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from checkpoints import (
    NEW,
    OLD,
    Elsewhere,
    cut_entries,
    fail_with,
    index_of,
    previous_checkpoint_stays,
    run_ranks,
    same_bits,
    save,
    tensor_entries,
    tree,
    unsynced,
    values_of,
)
from zero_partition import _checkpoint_read
from zero_partition._checkpoint_plan import TensorEntry
from zero_partition._checkpoint_read import read_tensor
from zero_partition._checkpoint_write import Piece, write_checkpoint
from zero_partition._errors import CheckpointError


@given(tensor_entries(), tensor_entries(max_dim=40), st.integers(1, 4), st.data())
def test_files_hold_what_the_ranks_wrote_bitwise_wherever_it_was_cut(
    model: list[TensorEntry], state: list[TensorEntry], num_ranks: int, data: st.DataObject
) -> None:
    files = {"model": model, "optimizer.exp_avg": state}
    values = {file: {e.name: values_of(e) for e in entries} for file, entries in files.items()}
    cuts = {file: data.draw(cut_entries(entries, num_ranks)) for file, entries in files.items()}

    def body(rank: int, agree: Any) -> None:
        pieces = {
            file: [
                Piece(name, start, values[file][name].view(-1)[start : start + numel])
                for owner, name, start, numel in cuts[file]
                if owner == rank
            ]
            for file in files
        }
        write_checkpoint(
            folder,
            files=files,
            pieces=pieces,
            index=index_of(model),
            rank=rank,
            agree=agree,
            overwrite=False,
        )

    with TemporaryDirectory() as parent:
        folder = Path(parent) / "run" / "step-1"
        assert run_ranks(num_ranks, body) == [None] * num_ranks
        assert [path.name for path in folder.parent.iterdir()] == ["step-1"]
        for file in files:
            loaded = load_file(folder / f"{file}.safetensors")
            assert loaded.keys() == values[file].keys()
            assert all(same_bits(loaded[name], values[file][name]) for name in loaded)


A = TensorEntry("a", (6,), "F32")


@pytest.fixture(scope="module", autouse=True)
def no_sync() -> Iterator[None]:
    """Nothing here is about power cuts, and syncing is slow."""
    with unsynced():
        yield


def failing_pieces(rank: int, failing: int, piece: Any) -> Iterator[Piece]:
    yield Piece("a", 3 * rank, torch.ones(3))
    if rank == failing:
        if isinstance(piece, BaseException):
            raise piece
        yield piece


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (RuntimeError("gather failed"), "gather failed"),
        (Piece("b", 0, torch.ones(1)), "b: a piece of it came, the file has no such tensor"),
        (Piece("a", 0, torch.ones(1).half()), "a: a piece must be F32, got torch.float16"),
        (Piece("a", 5, torch.ones(2)), r"a: expected a piece inside its 6 elements, got \[5, 7\)"),
        (Piece("a", -1, torch.ones(2)), r"a: expected a piece .* 6 elements, got \[-1, 1\)"),
        (
            Piece("a", 0, torch.ones(1, 1)),
            r"a: a piece must be 1-D, .* cpu tensor of shape \[1, 1\]",
        ),
        (Piece("a", 0, torch.ones(4)[::2]), r"a: a piece must be 1-D, .* stride \[2\]"),
        (Piece("a", 0, torch.ones(1, device="meta")), "a: a piece must .* memory, got meta tensor"),
    ],
)
def test_a_failure_on_one_rank_reaches_all_and_costs_nothing(
    tmp_path: Path, overwrite: bool, failing: int, piece: Any, message: str
) -> None:
    def body(rank: int, agree: Any) -> None:
        write_checkpoint(
            tmp_path / ("step-1" if overwrite else "step-2"),
            files={"model": [A]},
            pieces={"model": failing_pieces(rank, failing, piece)},
            index=index_of([A]),
            rank=rank,
            agree=agree,
            overwrite=overwrite,
        )

    with previous_checkpoint_stays(tmp_path):
        for raised in run_ranks(3, body):
            assert isinstance(raised, CheckpointError)
            with pytest.raises(CheckpointError, match=f"^rank {failing}: {message}"):
                raise raised


def test_ctrl_c_on_one_rank_stays_ctrl_c_there_and_is_an_error_elsewhere(tmp_path: Path) -> None:
    def body(rank: int, agree: Any) -> None:
        write_checkpoint(
            tmp_path / "step-2",
            files={"model": [A]},
            pieces={"model": failing_pieces(rank, 1, KeyboardInterrupt("now"))},
            index=index_of([A]),
            rank=rank,
            agree=agree,
            overwrite=False,
        )

    with previous_checkpoint_stays(tmp_path):
        first, second = run_ranks(2, body)
        assert isinstance(second, KeyboardInterrupt)
        with pytest.raises(CheckpointError, match=r"^rank 1: now$"):
            raise first or AssertionError


def run_two(folders: list[Path], files: list[list[TensorEntry]]) -> list[BaseException | None]:
    def body(rank: int, agree: Any) -> None:
        write_checkpoint(
            folders[rank],
            files={"model": files[rank]},
            pieces={"model": [Piece("a", 3 * rank, torch.ones(3))]},
            index=index_of(files[rank]),
            rank=rank,
            agree=agree,
            overwrite=False,
        )

    return run_ranks(2, body)


def test_a_folder_that_is_not_shared_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    for raised in run_two([tmp_path / "0" / "step-1", tmp_path / "1" / "step-1"], [[A], [A]]):
        assert isinstance(raised, CheckpointError)
        path = tmp_path / "1" / "step-1.tmp" / "model.safetensors"
        assert f"rank 1 does not find {path}, which rank 0 made; give a folder" in str(raised)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("other", [("a", (7,), "F32"), ("a", (6,), "I32"), ("b", (6,), "F32")])
def test_ranks_that_describe_different_files_are_an_error(tmp_path: Path, other: Any) -> None:
    for raised in run_two([tmp_path / "step-1"] * 2, [[A], [TensorEntry(*other)]]):
        assert isinstance(raised, CheckpointError)
        assert "rank 1 and rank 0 want different tensors or shapes in" in str(raised)
    assert tree(tmp_path) == {}


def test_pieces_of_an_unknown_file_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"pieces came for files \['m'\], the files are \['model'\]"
    ):
        write_checkpoint(
            tmp_path / "step-1",
            files={"model": [A]},
            pieces={"m": []},
            index=index_of([A]),
            rank=0,
            agree=lambda _: None,
            overwrite=False,
        )
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_is_not_json_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with previous_checkpoint_stays(tmp_path), pytest.raises(TypeError, match=r"index\.state\.rng"):
        save(tmp_path / "step-1", NEW, overwrite=True, state={"rng": torch.ones(1)})


def test_an_existing_folder_is_refused_without_overwrite(tmp_path: Path) -> None:
    message = "step-1 exists; .* pass overwrite=True to replace"
    with previous_checkpoint_stays(tmp_path), pytest.raises(CheckpointError, match=message):
        save(tmp_path / "step-1", NEW)


def test_overwrite_replaces_the_whole_folder(tmp_path: Path) -> None:
    save(tmp_path / "step-1", NEW)
    save(tmp_path / "step-1", OLD, overwrite=True)
    assert sorted(tree(tmp_path)) == ["step-1/index.json", "step-1/model.safetensors"]
    assert torch.equal(read_tensor(tmp_path / "step-1", "a"), OLD["model"]["a"])


def test_overwrite_fills_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    save(tmp_path / "step-1", OLD, overwrite=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "step-1"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_overwrite_never_removes_what_is_not_a_checkpoint(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "home"
    if kind == "folder":
        target.mkdir()
    (target / "thesis.tex" if kind == "folder" else target).write_text("years of work")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"home exists and is not a checkpoint .*index.json"):
        save(target, NEW, overwrite=True)
    assert tree(tmp_path) == before


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    save(tmp_path / "step-1", OLD)
    (tmp_path / "latest").symlink_to("step-1")
    save(tmp_path / "latest", NEW, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
    assert torch.equal(read_tensor(tmp_path / "step-1", "a"), NEW["model"]["a"])


def test_a_backup_of_the_users_own_is_never_removed(tmp_path: Path) -> None:
    save(tmp_path / "step-1", OLD)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-1.old")
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"step-1.old exists and no save made it; .* move it"):
        save(tmp_path / "step-1", NEW, overwrite=True)
    assert tree(tmp_path) == before


def test_other_errors_of_the_system_name_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = f"^cannot save {tmp_path}/file/step-1: Not a directory: {tmp_path}/file/step-1.tmp$"
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "file" / "step-1", NEW)


def test_an_error_of_the_system_on_one_rank_reaches_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.EIO))
    for raised in run_two([tmp_path / "step-1"] * 2, [[A], [A]]):
        assert isinstance(raised, CheckpointError)
        assert str(raised).startswith(f"rank 0: cannot save {tmp_path / 'step-1'}: ")
    assert list(tmp_path.iterdir()) == []


def test_writes_that_the_system_cuts_short_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    tensor = torch.arange(100)
    save(tmp_path / "step-1", {"model": {"a": tensor}})
    assert torch.equal(load_file(tmp_path / "step-1" / "model.safetensors")["a"], tensor)


def test_a_file_system_that_takes_nothing_is_an_error_not_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(CheckpointError, match="the file system took no byte"):
        save(tmp_path / "step-1", NEW)


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_tensors_on_a_device_pass_through_staging_memory_of_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numel: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(_checkpoint_read, "BLOCK_BYTES", 16 * dtype.itemsize)
    tensor = torch.arange(numel).to(dtype)
    entry = TensorEntry("a", (numel,), "BF16" if dtype == torch.bfloat16 else "F64")
    write_checkpoint(
        tmp_path / "step-1",
        files={"model": [entry]},
        pieces={"model": [Piece("a", 0, tensor.as_subclass(Elsewhere))]},
        index=index_of([entry]),
        rank=0,
        agree=lambda _: None,
        overwrite=False,
    )
    assert same_bits(load_file(tmp_path / "step-1" / "model.safetensors")["a"], tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
def test_tensors_on_an_accelerator_are_saved(tmp_path: Path) -> None:
    tensor = torch.randn(5_000_000)
    device = torch.accelerator.current_accelerator()
    save(tmp_path / "step-1", {"model": {"a": tensor.to(device)}})
    assert torch.equal(load_file(tmp_path / "step-1" / "model.safetensors")["a"], tensor)
