"""Reading a checkpoint: any range of any tensor, by any number of processes, without a group."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from torch import Tensor

from zero_partition._checkpoint_index import (
    INDEX_NAME,
    check_same_tensors,
    decode_index,
    indexed_files,
    stored_name,
)
from zero_partition._checkpoint_plan import (
    FilePlan,
    TensorEntry,
    check_byte_order,
    data_path,
    header_num_bytes,
    old_path,
    parse_header,
    tmp_path,
    torch_dtype_name,
)
from zero_partition._errors import CheckpointError

BLOCK_BYTES = 8 * 2**20  # of one read or write, and of the staging memory for device tensors


class _IncompleteError(CheckpointError):
    """Something of the checkpoint is not there, or not whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _DataFile:
    handle: FileIO
    plan: FilePlan
    path: str


@final
class Checkpoint:
    """An open checkpoint, checked to be complete; use it in a `with` block.

    The files stay open: whoever replaces the folder meanwhile does not change what is read.

    Attributes:
        directory: The folder.
        index: The index, as `zero_partition._checkpoint_index` describes it.
    """

    def __init__(
        self, directory: Path, index: dict[str, Any], files: Mapping[str, _DataFile]
    ) -> None:
        self.directory = directory
        self.index = index
        self._files = files

    @staticmethod
    def open(directory: str | os.PathLike[str]) -> Checkpoint:
        """Open a checkpoint folder and check the index, all headers and all sizes (not the values).

        Raises:
            CheckpointError: there is none, it is incomplete or damaged, or its format is newer. The
                message says which file, what was expected and what to load instead.
        """
        path = Path(directory).absolute()
        try:
            return _open_checkpoint(path)
        except _IncompleteError as error:
            raise CheckpointError(f"{error}; {_advice(path)}") from error

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the data files: "model", "optimizer.exp_avg", ..."""
        return tuple(self._files)

    def entries(self, file: str) -> Mapping[str, TensorEntry]:
        """Stored name -> shape and dtype of each tensor of a data file, in file order."""
        return self._file(file).plan.entries

    def entry(self, file: str, name: str) -> TensorEntry:
        """Shape, dtype and stored name of one tensor; `name` may be an alias.

        Raises:
            CheckpointError: the file holds no such tensor.
        """
        entries = self.entries(file)
        found = entries.get(name) or entries.get(stored_name(self.index, name))
        if found is None:
            near = ", ".join(get_close_matches(name, entries, n=3, cutoff=0.5)) or "nothing"
            raise CheckpointError(
                f"{self._file(file).path}: expected a tensor {name!r}, it has none; it holds"
                f" {len(entries)} tensors, of similar name: {near}"
            )
        return found

    def read_into(self, file: str, name: str, start: int, out: Tensor) -> None:
        """Fill `out` with elements ``[start, start + out.numel())`` of a flattened tensor.

        Args:
            file: Data file, as in `files`.
            name: The tensor, by any of its names.
            start: First element.
            out: 1-D, contiguous, of the stored dtype, on any device.

        Raises:
            CheckpointError: there is no such tensor, or the file has been cut since it was opened.
            ValueError: the range leaves the tensor, or `out` is not 1-D and contiguous.
            TypeError: `out` has another dtype.
        """
        entry = self.entry(file, name)
        _check_out(entry, start, out)
        source, out = self._file(file), out.detach()
        offset = source.plan.offsets[entry.name] + start * entry.width
        if out.is_cpu:
            _fill(source, host_bytes(out), offset)
        else:
            for begin, end, staging in staged_blocks(out):
                _fill(source, host_bytes(staging), offset + begin * entry.width)
                out[begin:end].copy_(staging)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        for file in self._files.values():
            file.handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _file(self, file: str) -> _DataFile:
        if file not in self._files:
            raise CheckpointError(
                f"{self.directory}: expected a data file {file!r}; it has {', '.join(self._files)}"
            )
        return self._files[file]


def read_tensor(directory: str | os.PathLike[str], name: str, *, file: str = "model") -> Tensor:
    """Read one whole tensor out of a checkpoint; no process group is needed.

    Args:
        directory: A checkpoint folder, whatever number of ranks saved it.
        name: Logical name of a parameter or buffer; of a tie any name will do.
        file: "model", "master", or "optimizer." and the name of a state, as in "optimizer.exp_avg".

    Returns:
        The tensor in host memory, in its whole shape and stored dtype.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged, or has no such tensor.

    Cost:
        Reads the headers and this tensor; no memory beyond the tensor's own.

    Example:
        >>> import tempfile, torch
        >>> from zero_partition import partition, read_tensor
        >>> folder = tempfile.mkdtemp() + "/step-1"
        >>> partition(torch.nn.Linear(3, 2), stage=0).save(folder)
        >>> read_tensor(folder, "weight").shape
        torch.Size([2, 3])
    """
    with Checkpoint.open(directory) as checkpoint:
        entry = checkpoint.entry(file, name)
        dtype = getattr(torch, torch_dtype_name(entry.dtype), None)
        if dtype is None:
            raise CheckpointError(
                f"{name}: torch {torch.__version__} has no dtype for {entry.dtype}; upgrade it"
            )
        tensor = torch.empty(entry.shape, dtype=dtype, device="cpu")
        checkpoint.read_into(file, entry.name, 0, tensor.view(-1))
    return tensor


def latest_checkpoint(parent: str | os.PathLike[str]) -> Path | None:
    """Find the newest complete ``step-N`` in a run's folder: the one with the highest N.

    Interrupted saves (``step-N.tmp``, ``step-N.old``, files missing or cut) are passed over.

    Returns:
        Its path, or None if there is no complete one.

    Raises:
        CheckpointError: the newest one is complete, but damaged or in a newer format.

    Example:
        >>> import tempfile
        >>> latest_checkpoint(tempfile.mkdtemp()) is None
        True
    """
    for path in reversed(_steps(Path(parent))):
        try:
            _open_checkpoint(path).close()
        except _IncompleteError:
            continue
        return path
    return None


def host_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor of any dtype, which must outlive the view."""
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())).cast("B")


def staged_blocks(tensor: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Cut a 1-D tensor in blocks: begin, end, and host memory, which is the same each time."""
    step = BLOCK_BYTES // tensor.element_size()
    staging = torch.empty(min(step, tensor.numel()), dtype=tensor.dtype, device="cpu")
    for begin in range(0, tensor.numel(), step):
        end = min(begin + step, tensor.numel())
        yield begin, end, staging[: end - begin]


def _open_checkpoint(path: Path) -> Checkpoint:
    check_byte_order()
    with _reading(path):
        if not path.is_dir():
            raise _IncompleteError(f"{path}: there is no checkpoint")
        # Everything is opened below this handle, so that all files come from one folder.
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with ExitStack() as stack:
                index = _read_index(path / INDEX_NAME, folder)
                listed = indexed_files(index, str(path / INDEX_NAME))
                files = {}
                for file, (num_bytes, entries) in listed.items():
                    files[file] = _open_data(data_path(path, file), folder, num_bytes, stack)
                    check_same_tensors(files[file].plan.entries, entries, files[file].path)
                stack.pop_all()
        finally:
            os.close(folder)
    return Checkpoint(path, index, files)


def _read_index(path: Path, folder: int) -> dict[str, Any]:
    try:
        handle = _open_in(folder, path)
    except FileNotFoundError:
        raise _IncompleteError(
            f"{path.parent}: no {INDEX_NAME}, so it is no complete checkpoint"
        ) from None
    with handle:
        return decode_index(handle.readall(), str(path))


def _open_data(path: Path, folder: int, indexed_bytes: int, stack: ExitStack) -> _DataFile:
    try:
        handle = stack.enter_context(_open_in(folder, path))
    except FileNotFoundError:
        raise _IncompleteError(f"{path}: missing: the index lists it") from None
    where, file_bytes = str(path), os.fstat(handle.fileno()).st_size
    try:
        prefix = os.pread(handle.fileno(), 8, 0)
        num_bytes = header_num_bytes(prefix, file_bytes=file_bytes, where=where)
        header = os.pread(handle.fileno(), num_bytes, 0)
        plan = parse_header(header, file_bytes=file_bytes, where=where)
    except CheckpointError as error:
        if file_bytes < indexed_bytes:
            raise _IncompleteError(
                f"{where}: truncated: expected {indexed_bytes} bytes, got {file_bytes}"
            ) from error
        raise
    return _DataFile(handle=handle, plan=plan, path=where)


def _open_in(folder: int, path: Path) -> FileIO:
    return FileIO(path.name, opener=lambda name, flags: os.open(name, flags, dir_fd=folder))


def _check_out(entry: TensorEntry, start: int, out: Tensor) -> None:
    if out.dim() != 1 or not out.is_contiguous() or out.is_meta:
        raise ValueError(
            f"{entry.name}: out must be 1-D, contiguous and have memory, got {out.device} tensor of"
            f" shape {list(out.shape)}, stride {list(out.stride())}"
        )
    if str(out.dtype) != f"torch.{torch_dtype_name(entry.dtype)}":
        raise TypeError(f"{entry.name}: out must be {entry.dtype}, as stored, got {out.dtype}")
    if start < 0 or start + out.numel() > entry.numel:
        raise ValueError(
            f"{entry.name}: expected a range inside its {entry.numel} elements, got"
            f" [{start}, {start + out.numel()})"
        )


def _fill(source: _DataFile, memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        block = memory[done : done + BLOCK_BYTES]
        with _reading(source.path):
            num_bytes = os.preadv(source.handle.fileno(), [block], offset + done)
        if num_bytes == 0:
            raise CheckpointError(
                f"{source.path}: truncated while open: expected {len(memory)} bytes at byte"
                f" {offset}, got {done}"
            )
        done += num_bytes


def _steps(parent: Path) -> list[Path]:
    """The ``step-N`` folders of a run, by N."""
    if not parent.is_dir():
        return []
    numbered = [
        (int(path.name[5:]), path)
        for path in parent.iterdir()
        if re.fullmatch(r"step-[0-9]+", path.name) and path.is_dir()
    ]
    return [path for _, path in sorted(numbered)]


def _advice(path: Path) -> str:
    """What to load instead of a checkpoint that is not there or not whole."""
    if path.is_file():
        return f"it is a file: give the folder of a checkpoint, perhaps {path.parent}"
    if _steps(path):
        return f"it is the folder of a run: load one of {_names(path)}"
    if not path.exists() and old_path(path).is_dir():
        previous = f"{old_path(path)}: rename it to {path.name} to load it"
        return f"an overwrite was interrupted; the previous checkpoint is {previous}"
    if not path.exists() and tmp_path(path).is_dir():
        return f"the save was interrupted ({tmp_path(path)}); {_latest(path.parent, 'previous')}"
    if not path.parent.is_dir():
        return f"{path.parent} is missing too"
    return _latest(path.parent, "latest complete")


def _latest(parent: Path, kind: str) -> str:
    try:
        latest = latest_checkpoint(parent)
    except CheckpointError as error:
        return f"the newest checkpoint in {parent} cannot be loaded: {error}"
    if latest is None:
        return f"{parent} holds no complete checkpoint"
    return f"the {kind} checkpoint is {latest}; {parent} holds {_names(parent)}"


def _names(parent: Path) -> str:
    names = [path.name for path in _steps(parent)]
    return ", ".join(names if len(names) <= 6 else [names[0], "...", *names[-4:]])


@contextmanager
def _reading(path: Path | str) -> Iterator[None]:
    """Name the file in the system's own errors."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
