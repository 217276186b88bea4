"""Data files are laid out so that every safetensors reader loads them, and read back strictly."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save

from checkpoints import DTYPES, cut_entries, same_bits, tensor_entries, values_of
from zero_partition import _checkpoint_plan
from zero_partition._checkpoint_plan import (
    ALIGN_BYTES,
    FilePlan,
    TensorEntry,
    check_byte_order,
    check_coverage,
    data_path,
    entry_of,
    old_path,
    parse_header,
    plan_file,
    tmp_path,
    torch_dtype_name,
)
from zero_partition._errors import CheckpointError


def file_of(plan: FilePlan) -> bytes:
    data = bytearray(plan.total_bytes)
    data[: len(plan.header)] = plan.header
    for name, entry in plan.entries.items():
        raw = bytes(values_of(entry).reshape(-1).view(torch.uint8).tolist())
        data[plan.offsets[name] : plan.offsets[name] + entry.num_bytes] = raw
    return bytes(data)


def header_of(table: Any) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text


@given(tensor_entries())
def test_safetensors_loads_every_planned_file_bitwise(entries: list[TensorEntry]) -> None:
    with NamedTemporaryFile(suffix=".safetensors") as file:
        Path(file.name).write_bytes(file_of(plan_file(entries)))
        loaded = load_file(file.name)
    assert loaded.keys() == {entry.name for entry in entries}
    assert all(same_bits(loaded[entry.name], values_of(entry)) for entry in entries)


def test_transformers_finds_the_format_it_asks_for(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_of(plan_file([TensorEntry("a", (2,), "F32")])))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@given(tensor_entries())
def test_every_tensor_lies_on_a_multiple_of_its_width(entries: list[TensorEntry]) -> None:
    plan = plan_file(entries)
    assert len(plan.header) % ALIGN_BYTES == 0
    assert all(plan.offsets[entry.name] % entry.width == 0 for entry in entries)


@given(tensor_entries())
def test_wide_tensors_come_first_and_equals_keep_their_order(entries: list[TensorEntry]) -> None:
    expected = [e for width in (8, 4, 2, 1) for e in entries if e.width == width]
    assert list(plan_file(entries).entries.values()) == expected


@given(tensor_entries())
def test_files_have_no_hole_and_no_tail(entries: list[TensorEntry]) -> None:
    plan = plan_file(entries)
    assert plan.total_bytes == len(plan.header) + sum(entry.num_bytes for entry in entries)


@given(tensor_entries())
def test_parsing_a_planned_header_gives_the_plan_back(entries: list[TensorEntry]) -> None:
    plan = plan_file(entries)
    parsed = parse_header(plan.header, file_bytes=plan.total_bytes, where="f")
    assert parsed.header == plan.header
    assert parsed.entries == plan.entries
    assert parsed.offsets == plan.offsets
    assert parsed.total_bytes == plan.total_bytes


@given(tensor_entries(), st.data())
def test_a_file_cut_anywhere_is_called_truncated(
    entries: list[TensorEntry], data: st.DataObject
) -> None:
    plan = plan_file(entries)
    file_bytes = data.draw(st.integers(0, plan.total_bytes - 1))
    with pytest.raises(CheckpointError, match=rf"^run/f: truncated: .* got .*{file_bytes}$"):
        parse_header(plan.header[:file_bytes], file_bytes=file_bytes, where="run/f")


@given(tensor_entries(), st.integers(1, 1000))
def test_a_file_with_a_tail_is_refused(entries: list[TensorEntry], tail_bytes: int) -> None:
    plan = plan_file(entries)
    file_bytes = plan.total_bytes + tail_bytes
    with pytest.raises(CheckpointError, match=f"^f: trailing bytes: .* got {file_bytes}$"):
        parse_header(plan.header, file_bytes=file_bytes, where="f")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["F32", "BF16", "U8", "F4", "nothing"]),
            st.lists(st.integers(0, 3), max_size=2),
            st.integers(0, 8),
            st.integers(0, 16),
        ),
        max_size=3,
    ),
    st.integers(0, 32),
)
@example([("F32", [1], 0, 4), ("F32", [1], 4, 8)], 8)
@example([("F32", [1], 4, 8), ("F32", [1], 0, 4)], 8)
@example([("F32", [0], 4, 4), ("F32", [1], 0, 4)], 4)
@example([("F32", [0], 2, 2), ("F32", [1], 0, 4)], 4)
@example([("F32", [1], 0, 4), ("F32", [1], 0, 4)], 4)
@example([("F32", [1], 0, 4), ("F32", [1], 5, 9)], 9)
@example([("F32", [2], 0, 4)], 4)
@example([("F32", [1], 8, 4)], 4)
def test_a_header_is_refused_exactly_when_safetensors_refuses_it(
    rows: list[tuple[str, list[int], int, int]], data_bytes: int
) -> None:
    table = {
        f"t{i}": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        for i, (dtype, shape, begin, end) in enumerate(rows)
    }
    header = header_of(table)

    def ours() -> bool:
        try:
            parse_header(header, file_bytes=len(header) + data_bytes, where="f")
        except CheckpointError:
            return False
        return True

    def theirs() -> bool:
        try:
            load(header + bytes(data_bytes))
        except (SafetensorError, KeyError):  # KeyError: a dtype that torch does not have
            return False
        return True

    assert ours() == theirs()


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"{", "f: the header is damaged: Expecting"),
        (b"\xff{}", "f: the header is damaged: 'utf-8' codec"),
        (b"[" * 50_000, "f: the header is damaged: "),
        ([], "f: the header is damaged: expected an object, got list"),
        ({"a": 3}, "f: the header is damaged: a: expected two data_offsets, got 3"),
        ({"a": {"data_offsets": [0, 8]}}, "f: the header is damaged: a: expected a dtype and a"),
        ({"a": ONE | {"dtype": "F4"}}, "f: the header is damaged: a: dtype must be one of F64"),
        ({"a": ONE | {"shape": [-2]}}, r"f: the header is damaged: a: shape must hold integers"),
        (
            b'{"a": %(a)s, "a": %(a)s}' % {b"a": json.dumps(ONE).encode()},
            "f: the header is damaged: a name appears twice",
        ),
        (
            {"a": ONE | {"data_offsets": [0, 4]}},
            r"f: a: F32 \[2\] takes 8 bytes, its offsets span 4",
        ),
        ({"a": ONE, "b": ONE}, "f: b overlaps a: expected it at byte 8 of the data, got 0"),
        (
            {"a": ONE, "b": ONE | {"data_offsets": [9, 17]}},
            "f: b leaves a hole after a: expected it at byte 8 of the data, got 9",
        ),
        (
            {"a": ONE | {"data_offsets": [8, 16]}},
            "f: a leaves a hole after the header: expected it at byte 0 of the data, got 8",
        ),
    ],
)
def test_a_damaged_header_is_refused_with_the_reason(table: Any, message: str) -> None:
    header = header_of(table)
    with pytest.raises(CheckpointError, match=f"^{message}"):
        parse_header(header, file_bytes=len(header) + 8, where="f")


def test_a_file_of_another_kind_is_not_read_as_a_header() -> None:
    with pytest.raises(CheckpointError, match=r"^f: not a safetensors file: .* says [0-9]{19}$"):
        parse_header(b"PK\3\4stuff", file_bytes=10**9, where="f")


def test_two_tensors_of_one_name_are_refused() -> None:
    entries = [TensorEntry("a", (2,), "F32"), TensorEntry("a", (2,), "BF16")]
    with pytest.raises(ValueError, match=r"^two tensors are named 'a'; store a tie once"):
        plan_file(entries)


def test_a_header_that_nobody_could_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_file([TensorEntry("a", (2,), "F32")])
    length = len(plan.header) - 8
    monkeypatch.setattr(_checkpoint_plan, "MAX_HEADER_BYTES", length)
    assert plan_file(plan.entries.values()) == plan
    monkeypatch.setattr(_checkpoint_plan, "MAX_HEADER_BYTES", length - 1)
    message = f"^the header of 1 tensors takes {length} bytes, at most {length - 1} can be loaded"
    with pytest.raises(ValueError, match=message):
        plan_file(plan.entries.values())


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "message"),
    [
        ("__metadata__", (), "F32", "tensor name '__metadata__' is reserved"),
        ("a\ud800", (), "F32", r"tensor name 'a\\ud800' is not valid Unicode"),
        ("a", (), "float32", "a: dtype must be one of F64, .*, got 'float32'"),
        ("a", (2, -1), "F32", r"a: shape must hold integers >= 0, got \[2, -1\]"),
        ("a", (2.0,), "F32", r"a: shape must hold integers >= 0, got \[2.0\]"),
        ("a", (2**40, 0, 2**40), "U8", r"a: shape \[.*\] exceeds 2\*\*63 - 1 bytes"),
    ],
)
def test_a_tensor_that_no_file_can_hold_is_refused(
    name: str, shape: tuple[Any, ...], dtype: str, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        TensorEntry(name, shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_codes_are_those_of_the_safetensors_library(dtype: torch.dtype) -> None:
    saved = save({"a": torch.zeros(1, dtype=torch.uint8).new_zeros(8).view(dtype)})
    code = json.loads(saved[8 : 8 + struct.unpack("<Q", saved[:8])[0]])["a"]["dtype"]
    entry = entry_of("a", torch.Size([3, 2]), dtype)
    assert entry == TensorEntry("a", (3, 2), code)
    assert entry.num_bytes == 6 * dtype.itemsize
    assert getattr(torch, torch_dtype_name(code)) is dtype


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32, torch.qint8])
def test_a_dtype_without_a_code_is_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"^h.w: {dtype} has no safetensors code; cast"):
        entry_of("h.w", (), dtype)


@pytest.mark.parametrize("file", ["", ".hidden", "a/b", "../a", "a\0", "\ud800"])
def test_a_file_name_cannot_leave_the_folder(file: str) -> None:
    with pytest.raises(ValueError, match=r"^file must be a plain file name without suffix"):
        data_path(Path("run"), file)


def test_names_beside_and_inside_a_checkpoint() -> None:
    folder = Path("run/step-1.5")
    assert data_path(folder, "optimizer.exp_avg").name == "optimizer.exp_avg.safetensors"
    assert tmp_path(folder) == Path("run/step-1.5.tmp")
    assert old_path(folder) == Path("run/step-1.5.old")


def test_a_big_endian_machine_is_refused() -> None:
    check_byte_order("little")
    with pytest.raises(CheckpointError, match="little-endian, this machine is big-endian"):
        check_byte_order("big")


@given(tensor_entries(), st.integers(1, 4), st.data())
def test_any_exact_cover_passes_and_one_piece_less_or_more_does_not(
    entries: list[TensorEntry], num_ranks: int, data: st.DataObject
) -> None:
    pieces = [piece[1:] for piece in data.draw(cut_entries(entries, num_ranks))]
    check_coverage(entries, pieces)
    solid = [piece for piece in pieces if piece[2]]
    if solid:
        changed = data.draw(st.sampled_from(solid))
        with pytest.raises(ValueError, match="come twice"):
            check_coverage(entries, [*pieces, changed])
        with pytest.raises(ValueError, match="nobody has elements"):
            check_coverage(entries, [piece for piece in pieces if piece != changed])


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([("a", 0, 3), ("b", 0, 1)], "b: a piece of it came, the file has no such tensor"),
        ([("a", 0, 4)], r"a: a piece spans \[0, 4\), the tensor has 3 elements"),
        ([("a", -1, 4)], r"a: a piece spans \[-1, 3\), the tensor has 3 elements"),
        ([("a", 0, 2), ("a", 1, 2)], "a: elements from 1 to 2 come twice"),
        ([("a", 0, 1), ("a", 2, 1)], "a: nobody has elements 1 to 2"),
        ([], "a: nobody has elements 0 to 3"),
    ],
)
def test_a_wrong_cover_is_named(pieces: list[tuple[str, int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_coverage([TensorEntry("a", (3,), "F32")], pieces)
