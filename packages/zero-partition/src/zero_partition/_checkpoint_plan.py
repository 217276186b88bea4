"""The data files of a checkpoint as arithmetic: names, headers, byte offsets. No torch, no I/O.

A checkpoint is a folder::

    step-100/
      model.safetensors              parameters and buffers, each whole, under its logical name
      master.safetensors             fp32 masters of 16-bit parameters
      optimizer.exp_avg.safetensors  one file for each optimizer state
      wire.safetensors               what each rank's wire keeps for later messages
      index.json                     written last: a folder without it is incomplete

Beside it, while a save runs or after one was killed: ``step-100.tmp`` (being written) and
``step-100.old`` (the folder that an overwrite is replacing).

Each data file is ordinary safetensors: 8 bytes with the length N of the header (little-endian), N
bytes of JSON padded with spaces, then the tensors without holes. Wide dtypes come first, so that
every tensor lies on a multiple of its element's width.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_partition._errors import CheckpointError

ALIGN_BYTES = 64
MAX_HEADER_BYTES = 100_000_000  # the safetensors library loads no longer one
_MAX_TENSOR_BYTES = 2**63 - 1

# safetensors code -> name of the torch dtype, bytes an element
_DTYPES = {
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "C64": ("complex64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_CODES = {name: code for code, (name, _) in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: logical name, whole shape, safetensors dtype code ("F32", "BF16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.name == "__metadata__":
            raise ValueError("tensor name '__metadata__' is reserved by safetensors; rename it")
        if not _is_utf8(self.name):
            raise ValueError(f"tensor name {self.name!r} is not valid Unicode; rename it")
        if self.dtype not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise ValueError(f"{self.name}: dtype must be one of {known}, got {self.dtype!r}")
        if any(type(dim) is not int or dim < 0 for dim in self.shape):
            raise ValueError(f"{self.name}: shape must hold integers >= 0, got {list(self.shape)}")
        if math.prod(max(dim, 1) for dim in self.shape) * self.width > _MAX_TENSOR_BYTES:
            raise ValueError(f"{self.name}: shape {list(self.shape)} exceeds 2**63 - 1 bytes")

    @property
    def width(self) -> int:
        """Bytes an element."""
        return _DTYPES[self.dtype][1]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.width


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePlan:
    """Where everything lies in one data file.

    `header` is the first bytes of the file, length field and padding included. `entries` are in
    file order. `offsets` count from the start of the file.
    """

    header: bytes
    entries: Mapping[str, TensorEntry]
    offsets: Mapping[str, int]
    total_bytes: int


def entry_of(name: str, shape: Sequence[int], dtype: object) -> TensorEntry:
    """Describe a tensor; `dtype` is a torch dtype, known by how it prints ("torch.float32")."""
    code = _CODES.get(str(dtype).removeprefix("torch."))
    if code is None:
        raise TypeError(f"{name}: {dtype} has no safetensors code; cast the tensor before saving")
    return TensorEntry(name, tuple(shape), code)


def torch_dtype_name(dtype: str) -> str:
    """Name under which torch has a dtype code: "BF16" -> "bfloat16"."""
    return _DTYPES[dtype][0]


def check_byte_order(byte_order: str = sys.byteorder) -> None:
    """Refuse machines whose tensors in memory are not what safetensors files hold."""
    if byte_order != "little":
        raise CheckpointError(
            f"checkpoint files are little-endian, this machine is {byte_order}-endian;"
            " save and load on a little-endian one"
        )


def data_path(directory: Path, file: str) -> Path:
    """Path of one data file: "optimizer.exp_avg" -> <directory>/optimizer.exp_avg.safetensors."""
    if not file or file.startswith(".") or "/" in file or "\0" in file or not _is_utf8(file):
        raise ValueError(f"file must be a plain file name without suffix, got {file!r}")
    return directory / f"{file}.safetensors"


def tmp_path(directory: Path) -> Path:
    """Folder in which a save builds `directory`."""
    return directory.with_name(directory.name + ".tmp")


def old_path(directory: Path) -> Path:
    """Folder in which an overwrite keeps the former `directory` until the new one is in place."""
    return directory.with_name(directory.name + ".old")


def plan_file(entries: Iterable[TensorEntry]) -> FilePlan:
    """Lay tensors out in one safetensors file: wide dtypes first, otherwise in the order given.

    Raises:
        ValueError: two entries have one name, or the header outgrows what safetensors loads.
    """
    ordered: dict[str, TensorEntry] = {}
    begins: dict[str, int] = {}
    position = 0
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for this
    for entry in sorted(entries, key=lambda entry: -entry.width):
        if entry.name in ordered:
            raise ValueError(
                f"two tensors are named {entry.name!r}; store a tie once, with aliases in the index"
            )
        ordered[entry.name] = entry
        begins[entry.name] = position
        position += entry.num_bytes
        offsets = [begins[entry.name], position]
        table[entry.name] = describe(entry) | {"data_offsets": offsets}
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    header_bytes = -(-(8 + len(text)) // ALIGN_BYTES) * ALIGN_BYTES
    if header_bytes - 8 > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header of {len(ordered)} tensors takes {header_bytes - 8} bytes, at most"
            f" {MAX_HEADER_BYTES} can be loaded; shorten the names"
        )
    return FilePlan(
        header=struct.pack("<Q", header_bytes - 8) + text.ljust(header_bytes - 8),
        entries=ordered,
        offsets={name: header_bytes + begin for name, begin in begins.items()},
        total_bytes=header_bytes + position,
    )


def header_num_bytes(prefix: bytes, *, file_bytes: int, where: str) -> int:
    """Bytes of the whole header, from the first 8 bytes of a file of `file_bytes` bytes."""
    if len(prefix) < 8:
        raise CheckpointError(
            f"{where}: truncated: expected at least the 8 bytes that begin a safetensors file,"
            f" got {file_bytes}"
        )
    length: int = struct.unpack("<Q", prefix[:8])[0]
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where}: not a safetensors file: expected a header of at most {MAX_HEADER_BYTES}"
            f" bytes, its length field says {length}"
        )
    if 8 + length > file_bytes:
        raise CheckpointError(
            f"{where}: truncated: expected at least {8 + length} bytes of header, got {file_bytes}"
        )
    return 8 + length


def parse_header(header: bytes, *, file_bytes: int, where: str) -> FilePlan:
    """Read back the plan of a file and check that its bytes are all there, once each.

    Args:
        header: The file's first bytes, at least to the end of its header.
        file_bytes: Size of the file.
        where: Path of the file, for messages.

    Raises:
        CheckpointError: the file is truncated or too long, or its tensors overlap or leave holes.
    """
    num_bytes = header_num_bytes(header[:8], file_bytes=file_bytes, where=where)
    spans = _parse_table(header[8:num_bytes], where)
    entries: dict[str, TensorEntry] = {}
    offsets: dict[str, int] = {}
    position, last = 0, "the header"
    for begin, end, entry in sorted(spans, key=lambda span: span[:2]):
        if end - begin != entry.num_bytes:
            raise CheckpointError(
                f"{where}: {entry.name}: {entry.dtype} {list(entry.shape)} takes {entry.num_bytes}"
                f" bytes, its offsets span {end - begin}"
            )
        if begin != position:
            fault = "overlaps" if begin < position else "leaves a hole after"
            raise CheckpointError(
                f"{where}: {entry.name} {fault} {last}: expected it at byte {position} of the data,"
                f" got {begin}"
            )
        entries[entry.name] = entry
        offsets[entry.name] = num_bytes + begin
        position, last = end, entry.name
    total_bytes = num_bytes + position
    if file_bytes != total_bytes:
        fault = "truncated" if file_bytes < total_bytes else "trailing bytes"
        raise CheckpointError(f"{where}: {fault}: expected {total_bytes} bytes, got {file_bytes}")
    return FilePlan(
        header=header[:num_bytes], entries=entries, offsets=offsets, total_bytes=total_bytes
    )


def check_coverage(entries: Iterable[TensorEntry], pieces: Iterable[tuple[str, int, int]]) -> None:
    """Check that pieces (name, start, numel) of all ranks together cover each element exactly once.

    Raises:
        ValueError: an element is covered twice or by nobody, or a piece leaves its tensor.
    """
    numels = {entry.name: entry.numel for entry in entries}
    ends = dict.fromkeys(numels, 0)
    for name, start, numel in sorted(pieces):
        if name not in numels:
            raise ValueError(f"{name}: a piece of it came, the file has no such tensor")
        if start < 0 or start + numel > numels[name]:
            span = f"[{start}, {start + numel})"
            raise ValueError(
                f"{name}: a piece spans {span}, the tensor has {numels[name]} elements"
            )
        if numel and start < ends[name]:
            raise ValueError(f"{name}: elements from {start} to {ends[name]} come twice")
        if numel and start > ends[name]:
            raise ValueError(f"{name}: nobody has elements {ends[name]} to {start}")
        ends[name] += numel
    for name, end in ends.items():
        if end < numels[name]:
            raise ValueError(f"{name}: nobody has elements {end} to {numels[name]}")


def describe(entry: TensorEntry) -> dict[str, Any]:
    """Dtype and shape as headers and the index hold them."""
    return {"dtype": entry.dtype, "shape": list(entry.shape)}


def entry_from(name: str, description: Any) -> TensorEntry:
    """Inverse of `describe`.

    Raises:
        ValueError: `description` is not one.
    """
    match description:
        case {"dtype": str(dtype), "shape": [*shape]}:
            return TensorEntry(name, tuple(shape), dtype)
        case _:
            raise ValueError(f"{name}: expected a dtype and a shape, got {description!r:.100}")


def _parse_table(text: bytes, where: str) -> list[tuple[int, int, TensorEntry]]:
    """(begin, end, entry) of each tensor in a header's JSON."""
    try:
        table = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
        return [_span(name, row) for name, row in _items(table) if name != "__metadata__"]
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: the header is damaged: {error}") from error


def _items(table: Any) -> Iterable[tuple[str, Any]]:
    match table:
        case dict():
            return table.items()
        case _:
            raise ValueError(f"expected an object, got {type(table).__name__}")


def _span(name: str, description: Any) -> tuple[int, int, TensorEntry]:
    match description:
        case {"data_offsets": [int(begin), int(end)]}:
            return begin, end, entry_from(name, description)
        case _:
            raise ValueError(f"{name}: expected two data_offsets, got {description!r:.100}")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a name appears twice")
    return table


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
