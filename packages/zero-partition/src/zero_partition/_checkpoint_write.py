"""Writing a checkpoint: every rank writes its own byte ranges of shared files, rank 0 commits.

The folder is built beside its final place and renamed when all ranks have synced, so that a save
that dies at any moment leaves the previous checkpoint as it was::

    all     check what is asked for
    rank 0  <dir>.tmp with all files, their headers and their whole space
    all     write their pieces, sync
    rank 0  index.json, sync, <dir> -> <dir>.old (overwrite only), <dir>.tmp -> <dir>, sync

Between two lines the ranks agree that nobody failed; else all raise and rank 0 removes <dir>.tmp.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from zero_partition._checkpoint_index import INDEX_NAME, encode_index
from zero_partition._checkpoint_plan import (
    FilePlan,
    TensorEntry,
    check_byte_order,
    data_path,
    old_path,
    plan_file,
    tmp_path,
    torch_dtype_name,
)
from zero_partition._checkpoint_read import BLOCK_BYTES, host_bytes, staged_blocks
from zero_partition._errors import CheckpointError

T = TypeVar("T")
Agree: TypeAlias = Callable[[BaseException | None], None]

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_RESERVE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_REPLACED = "replaced"  # marks a folder that an overwrite moves aside: ours to remove


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's elements that this rank writes.

    Attributes:
        name: Logical name of the tensor.
        start: Index of the first element in the flattened tensor.
        tensor: Values, 1-D and contiguous, of the tensor's dtype, on any device.
    """

    name: str
    start: int
    tensor: Tensor


def write_checkpoint(
    directory: str | os.PathLike[str],
    *,
    files: Mapping[str, Sequence[TensorEntry]],
    pieces: Mapping[str, Iterable[Piece]],
    index: Mapping[str, Any],
    rank: int,
    agree: Agree,
    overwrite: bool,
) -> None:
    """Write a checkpoint together; every rank calls this at the same time.

    The pieces of all ranks together must hold each element of each tensor exactly once
    (`check_coverage` checks that); what nobody writes is zero.

    Args:
        directory: The folder to make, on a file system that all ranks share.
        files: Data file ("model", "optimizer.exp_avg") -> its tensors; the same on all ranks.
        pieces: Data file -> what this rank writes of it, taken one by one.
        index: From `build_index`; rank 0's counts.
        rank: This rank.
        agree: Collective that raises on every rank if any rank gave it an error.
        overwrite: Replace a checkpoint that is there. The former one is removed last; a kill before
            leaves it at ``<dir>`` or, for the moment between two renames, at ``<dir>.old``.

    Raises:
        CheckpointError: on every rank, whatever went wrong on any: `directory` exists, the disk is
            full, the folder is not shared. Nothing is left of the save and the rest is as it was.
    """
    final = Path(os.path.realpath(directory))
    save = _Save(
        final=final, tmp=tmp_path(final), old=old_path(final), rank=rank, overwrite=overwrite
    )
    plans, index_bytes = _agreed(lambda: _check(save, files, pieces, index), agree, save)
    try:
        _agreed(lambda: _prepare(save, plans), agree, save)
        _agreed(lambda: _write_pieces(save, plans, pieces), agree, save)
        _agreed(lambda: _commit(save, index_bytes), agree, save)
    except BaseException:
        if rank == 0:
            shutil.rmtree(save.tmp, ignore_errors=True)
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class _Save:
    final: Path
    tmp: Path
    old: Path
    rank: int
    overwrite: bool


def _agreed(action: Callable[[], T], agree: Agree, save: _Save) -> T:
    """Run one step of this rank, then raise if it failed on any."""
    try:
        result = action()
    except OSError as error:
        failure = CheckpointError(f"cannot save {save.final}: {_reason(error)}")
        failure.__cause__ = error
        agree(failure)
        raise failure from error
    except Exception as error:
        agree(error)
        raise
    except BaseException as error:  # Ctrl-C stays what it is, the others learn of it
        with suppress(Exception):
            agree(error)
        raise
    agree(None)
    return result


def _reason(error: OSError) -> str:
    return f"{error.strerror or error}: {error.filename}" if error.filename else str(error)


def _check(
    save: _Save,
    files: Mapping[str, Sequence[TensorEntry]],
    pieces: Mapping[str, Iterable[Piece]],
    index: Mapping[str, Any],
) -> tuple[dict[str, FilePlan], bytes]:
    """Plan the files and refuse what cannot be saved, before anything is touched."""
    check_byte_order()
    if unknown := sorted(pieces.keys() - files.keys()):
        raise ValueError(f"pieces came for files {unknown}, the files are {list(files)}")
    plans = {}
    for file, entries in files.items():
        data_path(save.tmp, file)
        plans[file] = plan_file(entries)
    if save.rank != 0:
        return plans, b""
    if os.path.lexists(save.final):
        if not save.overwrite:
            raise CheckpointError(
                f"{save.final} exists; save to another folder, or pass overwrite=True to replace it"
            )
        if not _is_replaceable(save.final):
            raise CheckpointError(
                f"{save.final} exists and is not a checkpoint (it has no {INDEX_NAME}), so"
                " overwrite=True does not remove it; save to another folder"
            )
    if os.path.lexists(save.old) and (save.overwrite or not os.path.lexists(save.final)):
        _check_old(save)
    return plans, encode_index(index, plans)


def _is_replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / INDEX_NAME).is_file() or not any(folder.iterdir()))


def _check_old(save: _Save) -> None:
    """Refuse to lose what lies where an overwrite puts the former checkpoint."""
    is_ours = _is_replaced(save.old)
    if save.overwrite and not is_ours:
        raise CheckpointError(
            f"{save.old} exists and no save made it; overwriting {save.final.name} needs that name:"
            " move it away"
        )
    if is_ours and not save.overwrite:
        raise CheckpointError(
            f"{save.old} is the previous checkpoint, left there by an interrupted overwrite;"
            f" rename it to {save.final.name} to keep it, or pass overwrite=True to replace it"
        )


def _prepare(save: _Save, plans: Mapping[str, FilePlan]) -> None:
    """Rank 0 makes every file in its full size, so that no later write can find the disk full."""
    if save.rank != 0:
        return
    _recover_old(save)
    if os.path.lexists(save.tmp):
        shutil.rmtree(save.tmp)
    try:
        save.tmp.mkdir(parents=True)
        for file, plan in plans.items():
            _create(data_path(save.tmp, file), plan)
    except OSError as error:
        shutil.rmtree(save.tmp, ignore_errors=True)
        if error.errno not in _NO_SPACE:
            raise
        needed_bytes = sum(plan.total_bytes for plan in plans.values())
        disk = next(folder for folder in save.tmp.parents if folder.exists())
        raise CheckpointError(
            f"cannot save {save.final}: {error.strerror}: {needed_bytes} bytes are needed,"
            f" {shutil.disk_usage(disk).free} are free on {disk}; earlier checkpoints are untouched"
        ) from error


def _recover_old(save: _Save) -> None:
    """Undo, or finish, what an interrupted overwrite left."""
    if os.path.lexists(save.final):
        _remove_replaced(save.old)
    elif _is_replaced(save.old):
        save.old.rename(save.final)
        (save.final / _REPLACED).unlink(missing_ok=True)


def _is_replaced(old: Path) -> bool:
    return (old / _REPLACED).is_file() or (old.is_dir() and not any(old.iterdir()))


def _remove_replaced(old: Path) -> None:
    """Remove what an overwrite moved aside, its mark last: a kill leaves it recognisable."""
    if _is_replaced(old):
        for path in old.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _REPLACED:
                path.unlink()
        shutil.rmtree(old)


def _create(path: Path, plan: FilePlan) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _reserve(handle, plan.total_bytes)
        _write(handle, memoryview(plan.header), 0)
    finally:
        os.close(handle)


def _reserve(handle: int, num_bytes: int) -> None:
    """Take the space now. A file system that cannot only gets the size: a full disk shows later."""
    if sys.platform == "darwin":  # has no such call
        os.ftruncate(handle, num_bytes)
        return
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        if error.errno not in _NO_RESERVE:
            raise
        os.ftruncate(handle, num_bytes)


def _write_pieces(
    save: _Save, plans: Mapping[str, FilePlan], pieces: Mapping[str, Iterable[Piece]]
) -> None:
    """Write this rank's pieces and wait until they are on disk."""
    for file, plan in plans.items():
        if save.rank != 0 and file not in pieces:
            continue
        path = data_path(save.tmp, file)
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"rank {save.rank} does not find {path}, which rank 0 made; give a folder on a file"
                " system that all ranks share"
            ) from error
        try:
            if os.pread(handle, len(plan.header), 0) != plan.header:
                raise CheckpointError(
                    f"rank {save.rank} and rank 0 want different tensors or shapes in {path}"
                )
            for piece in pieces.get(file, ()):
                _write_piece(handle, plan, piece)
            os.fsync(handle)  # rank 0's header too
        finally:
            os.close(handle)


def _write_piece(handle: int, plan: FilePlan, piece: Piece) -> None:
    entry, tensor = plan.entries.get(piece.name), piece.tensor.detach()
    if entry is None:
        raise ValueError(f"{piece.name}: a piece of it came, the file has no such tensor")
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.is_meta:
        raise ValueError(
            f"{entry.name}: a piece must be 1-D, contiguous and have memory, got {tensor.device}"
            f" tensor of shape {list(tensor.shape)}, stride {list(tensor.stride())}"
        )
    if str(tensor.dtype) != f"torch.{torch_dtype_name(entry.dtype)}":
        raise TypeError(f"{entry.name}: a piece must be {entry.dtype}, got {tensor.dtype}")
    if piece.start < 0 or piece.start + tensor.numel() > entry.numel:
        raise ValueError(
            f"{entry.name}: expected a piece inside its {entry.numel} elements, got"
            f" [{piece.start}, {piece.start + tensor.numel()})"
        )
    offset = plan.offsets[entry.name] + piece.start * entry.width
    if tensor.is_cpu:
        _write(handle, host_bytes(tensor), offset)
        return
    for begin, end, staging in staged_blocks(tensor):
        staging.copy_(tensor[begin:end])
        _write(handle, host_bytes(staging), offset + begin * entry.width)


def _write(handle: int, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        num_bytes = os.pwrite(handle, memory[done : done + BLOCK_BYTES], offset + done)
        if num_bytes == 0:
            raise OSError(errno.EIO, "the file system took no byte")
        done += num_bytes


def _commit(save: _Save, index_bytes: bytes) -> None:
    """Rank 0 writes the index and moves the folder into place; all data is on disk by now."""
    if save.rank != 0:
        return
    handle = os.open(save.tmp / INDEX_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write(handle, memoryview(index_bytes), 0)
        os.fsync(handle)
    finally:
        os.close(handle)
    _sync_folder(save.tmp)
    if not os.path.lexists(save.final):
        save.tmp.rename(save.final)
        _sync_folder(save.final.parent)
        return
    (save.final / _REPLACED).touch()
    save.final.rename(save.old)
    try:
        save.tmp.rename(save.final)
    except OSError:
        save.old.rename(save.final)
        raise
    _sync_folder(save.final.parent)
    try:
        _remove_replaced(save.old)
    except OSError as error:
        raise CheckpointError(
            f"{save.final} is saved, but {save.old}, which it replaces, cannot be removed:"
            f" {_reason(error)}; remove it by hand"
        ) from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
