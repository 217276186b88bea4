"""The index says what was saved; what is damaged, foreign or newer is refused with the reason."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import index_of, tensor_entries
from zero_partition._checkpoint_index import (
    GroupRecord,
    OptimizerRecord,
    check_same_tensors,
    decode_index,
    encode_index,
    indexed_files,
    random_states,
    stored_name,
)
from zero_partition._checkpoint_plan import TensorEntry, plan_file
from zero_partition._errors import CheckpointError

A = TensorEntry("a", (2, 3), "F32")
B = TensorEntry("b", (), "I64")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def round_trip(index: dict[str, Any]) -> dict[str, Any]:
    return decode_index(encode_index(index, {}), "index.json")


def damaged(**changes: Any) -> bytes:
    whole = round_trip(index_of([A])) | changes
    return json.dumps({k: v for k, v in whole.items() if v is not ...}).encode()


@given(JSON)
def test_any_json_state_comes_back(state: Any) -> None:
    assert repr(round_trip(index_of([], state=state))["state"]) == repr(state)


def test_an_infinite_best_loss_is_a_state() -> None:
    assert math.isinf(round_trip(index_of([], state={"best_loss": math.inf}))["state"]["best_loss"])


@given(tensor_entries())
def test_the_index_lists_size_and_tensors_of_each_file(entries: list[TensorEntry]) -> None:
    plan = plan_file(entries)
    index = decode_index(encode_index(index_of(entries), {"model": plan}), "index.json")
    assert indexed_files(index, "index.json") == {"model": (plan.total_bytes, dict(plan.entries))}


def test_every_fact_of_a_save_is_in_the_index() -> None:
    optimizer = OptimizerRecord(
        class_name="AdamW",
        states={"exp_avg": "elementwise", "step": "scalar"},
        groups=[GroupRecord(names=["a"], options={"lr": 0.1, "betas": (0.9, 0.95)})],
    )
    index = index_of(
        [A],
        buffers=[B],
        aliases={"a": ["tied", "twice"]},
        optimizer=optimizer,
        random_states=[b"\0\xff", b""],
        wire_layout="c0ffee",
        state={"step": 5},
        num_ranks=2,
        stage=3,
    )
    assert round_trip(index) == {
        "format": "zero-partition",
        "version": 1,
        "tensors": {"a": {"dtype": "F32", "shape": [2, 3], "aliases": ["tied", "twice"]}},
        "buffers": {"b": {"dtype": "I64", "shape": [], "aliases": []}},
        "optimizer": {
            "class": "AdamW",
            "states": {"exp_avg": "elementwise", "step": "scalar"},
            "groups": [{"names": ["a"], "options": {"lr": 0.1, "betas": [0.9, 0.95]}}],
        },
        "random_states": ["AP8=", ""],
        "wire": {"layout": "c0ffee"},
        "state": {"step": 5},
        "num_ranks": 2,
        "stage": 3,
        "checksums": None,
        "files": {},
    }
    assert random_states(index) == [b"\0\xff", b""]
    assert [stored_name(index, name) for name in ("twice", "a", "b", "c")] == ["a", "a", "b", "c"]


def test_each_tensor_has_a_line_of_its_own() -> None:
    lines = encode_index(index_of([A, B]), {}).decode().splitlines()
    assert '  "a": {"dtype": "F32", "shape": [2, 3], "aliases": []},' in lines


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aliases": {"c": ["d"]}}, r"aliases are given of \['c'\], which are not saved"),
        ({"aliases": {"a": ["b"]}, "buffers": [B]}, r"a name stands for one .* several: \['b'\]"),
        ({"buffers": [A]}, r"a name stands for one tensor, these stand for several: \['a'\]"),
        ({"num_ranks": 2, "random_states": [b""]}, "expected 2 random states, one a rank, got 1"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        index_of([A], **changes)


def test_an_optimizer_state_of_unknown_kind_is_refused() -> None:
    message = "^optimizer state 'step' must be 'elementwise' or 'scalar', got 'vector'$"
    with pytest.raises(ValueError, match=message):
        OptimizerRecord(class_name="A", states={"step": "vector"}, groups=[])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"data": [1, {"rng": object()}]}, r"index.state.data\[1\].rng: expected a JSON .*object"),
        ({"seen": {1, 2}}, "index.state.seen: expected a JSON value .*, got set"),
        ({"epochs": {3: "x"}}, "index.state.epochs: keys must be str, got 3; JSON has no others"),
    ],
)
def test_a_state_that_json_would_change_is_refused_with_its_path(state: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        encode_index(index_of([], state=state), {})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "f: damaged: not JSON: Expecting value"),
        (damaged()[:-9], "f: damaged: not JSON: "),
        (b"\xff\xfe", "f: damaged: not JSON: 'utf-8' codec"),
        (b"[" * 50_000, "f: damaged: not JSON: "),
        (b"[]", "f: not a checkpoint's index: expected format 'zero-partition', got None"),
        (damaged(format="other"), "f: not a checkpoint's index: .* got 'other'"),
        (damaged(version="1"), "f: damaged: version must be an integer >= 1, got '1'"),
        (damaged(version=0), "f: damaged: version must be an integer >= 1, got 0"),
        (damaged(version=2), "f: written in format version 2, this .* up to 1; upgrade it"),
        (damaged(tensors=[]), "f: damaged: 'tensors' must be dict, got list"),
        (damaged(optimizer=3), "f: damaged: 'optimizer' must be dict or NoneType, got int"),
        (damaged(files=...), "f: damaged: 'files' must be dict, got nothing"),
        (damaged(state=...), "f: damaged: 'state' must be object, got nothing"),
        (damaged(buffers={"b": {}}), "f: damaged: b: expected a list of aliases"),
    ],
)
def test_a_damaged_or_newer_index_is_refused_with_the_reason(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{message}"):
        decode_index(data, "f")


def test_keys_that_a_later_writer_of_this_version_adds_are_ignored() -> None:
    assert decode_index(damaged(extra=1), "f")["extra"] == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"../model": {}}, "f: damaged: file must be a plain file name"),
        (
            {"model": {"bytes": 3}},
            "f: damaged: model: expected bytes and tensors, got {'bytes': 3}",
        ),
        ({"model": {"bytes": 3, "tensors": {"a": 1}}}, "f: damaged: a: expected a dtype and a"),
        (
            {"model": {"bytes": 3, "tensors": {"a": {"dtype": "F3", "shape": []}}}},
            "f: damaged: a: dtype must be one of",
        ),
    ],
)
def test_a_damaged_list_of_files_is_refused(files: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{message}"):
        indexed_files({"files": files}, "f")


def test_damaged_random_states_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^index.json: random_states are damaged"):
        random_states({"random_states": ["A"]})


def test_a_file_of_another_model_is_named_tensor_by_tensor() -> None:
    wanted = {name: TensorEntry(name, (2,), "F32") for name in "abcde"}
    came = {"a": wanted["a"], "b": TensorEntry("b", (2,), "F64"), "x": TensorEntry("x", (), "F32")}
    with pytest.raises(CheckpointError) as caught:
        check_same_tensors(came, wanted, "run/model")
    assert str(caught.value) == (
        "run/model does not match the index: b: expected F32 [2], got F64 [2]; c is missing;"
        " d is missing and 2 more; was it replaced? Save again, or restore the file"
    )
