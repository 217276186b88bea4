"""What is missing, not whole, damaged or newer is refused with what to do."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from checkpoints import (
    RUN_FILES,
    refusal,
    save,
    save_run,
    unsynced,
)
from zero_partition import _checkpoint_read
from zero_partition._checkpoint_read import Checkpoint, latest_checkpoint, read_tensor
from zero_partition._errors import CheckpointError


@pytest.fixture(scope="module", autouse=True)
def no_sync() -> Iterator[None]:
    """Nothing here is about power cuts, and syncing is slow."""
    with unsynced():
        yield


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with steps 1, 2 and 10, to do anything with."""
    return save_run(tmp_path)


def test_an_unknown_tensor_is_refused_with_those_of_similar_name(run: Path) -> None:
    message = refusal(run / "step-1", "wte.weight")
    path = run / "step-1" / "model.safetensors"
    assert message.startswith(f"{path}: expected a tensor 'wte.weight', it has none; it holds 3 ")
    assert refusal(run / "step-1", "wto").endswith("of similar name: wte")
    assert refusal(run / "step-1", "@@@@").endswith("of similar name: nothing")


def test_an_unknown_file_is_refused_with_those_there_are(run: Path) -> None:
    message = "expected a data file 'exp_avg'; it has model, optimizer.exp_avg"
    assert refusal(run / "step-1", file="exp_avg") == f"{run / 'step-1'}: {message}"


def test_a_missing_checkpoint_names_its_siblings_and_the_latest(run: Path) -> None:
    latest = run / "step-10"
    assert refusal(run / "step-3") == (
        f"{run / 'step-3'}: there is no checkpoint; the latest complete checkpoint is {latest};"
        f" {run} holds step-1, step-2, step-10"
    )
    for step in range(11, 16):
        shutil.copytree(latest, run / f"step-{step}")
    listed = "holds step-1, ..., step-12, step-13, step-14, step-15"
    assert refusal(run / "step-3").endswith(listed)


def test_a_missing_run_says_so(tmp_path: Path) -> None:
    path, parent = tmp_path / "run" / "step-1", tmp_path / "run"
    assert refusal(path) == f"{path}: there is no checkpoint; {parent} is missing too"
    parent.mkdir()
    assert refusal(path).endswith(f"there is no checkpoint; {parent} holds no complete checkpoint")


def test_the_folder_of_a_run_is_told_from_a_checkpoint(run: Path) -> None:
    message = (
        "so it is no complete checkpoint; it is the folder of a run: load one of step-1, step-2"
    )
    assert f"{run}: no index.json, {message}, step-10" in refusal(run)


def test_a_file_is_told_from_a_folder(run: Path) -> None:
    path = run / "step-1" / "model.safetensors"
    assert f"it is a file: give the folder of a checkpoint, perhaps {path.parent}" in refusal(path)


def test_an_interrupted_save_names_the_previous_checkpoint(run: Path) -> None:
    (run / "step-20.tmp").mkdir()
    assert refusal(run / "step-20") == (
        f"{run / 'step-20'}: there is no checkpoint; the save was interrupted"
        f" ({run / 'step-20.tmp'}); the previous checkpoint is {run / 'step-10'}; {run} holds"
        " step-1, step-2, step-10"
    )


def test_an_interrupted_first_save_says_that_there_is_no_previous_one(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    (tmp_path / "step-1.tmp").mkdir()
    message = refusal(path)
    assert message.endswith(
        f"was interrupted ({path}.tmp); {tmp_path} holds no complete checkpoint"
    )


def test_an_interrupted_overwrite_says_where_the_previous_checkpoint_is(run: Path) -> None:
    (run / "step-10").rename(run / "step-10.old")
    (run / "step-10.tmp").mkdir()
    message = refusal(run / "step-10")
    assert f"the previous checkpoint is {run / 'step-10.old'}: rename it to step-10" in message
    (run / "step-10.old").rename(run / "step-10")
    assert torch.equal(read_tensor(run / "step-10", "wte"), RUN_FILES["model"]["wte"])


def test_a_folder_without_index_is_incomplete(run: Path) -> None:
    (run / "step-10" / "index.json").unlink()
    assert refusal(run / "step-10") == (
        f"{run / 'step-10'}: no index.json, so it is no complete checkpoint; the latest complete"
        f" checkpoint is {run / 'step-2'}; {run} holds step-1, step-2, step-10"
    )


def test_a_missing_data_file_is_named(run: Path) -> None:
    path = run / "step-10" / "optimizer.exp_avg.safetensors"
    path.unlink()
    assert refusal(run / "step-10").startswith(f"{path}: missing: the index lists it; the latest")


@pytest.mark.parametrize("left_bytes", [0, 7, 8, 100, -1])
def test_a_truncated_data_file_is_named_with_both_sizes(run: Path, left_bytes: int) -> None:
    path = run / "step-10" / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, left_bytes % size)
    message = f"{path}: truncated: expected {size} bytes, got {left_bytes % size}; the latest"
    assert refusal(run / "step-10").startswith(message)


def test_a_data_file_with_a_tail_is_refused(run: Path) -> None:
    path = run / "step-10" / "model.safetensors"
    with path.open("ab") as file:
        file.write(b"x")
    assert refusal(run / "step-10").startswith(f"{path}: trailing bytes: expected ")


def test_a_file_cut_while_it_is_open_is_an_error_not_old_memory(run: Path) -> None:
    path = run / "step-1" / "model.safetensors"
    with Checkpoint.open(run / "step-1") as checkpoint:
        os.truncate(path, path.stat().st_size - 7)
        with pytest.raises(
            CheckpointError, match=f"{path}: truncated while open: expected 6 bytes"
        ):
            checkpoint.read_into("model", "ln", 0, torch.empty(3, dtype=torch.bfloat16))


def test_an_error_of_the_system_names_the_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    path = run / "step-1" / "model.safetensors"
    assert refusal(run / "step-1") == f"{path}: cannot be read: Input/output error"


def test_a_data_file_of_another_model_is_refused(run: Path) -> None:
    changed = RUN_FILES["model"] | {"wte": torch.ones(5, 3)}
    save_file(changed, run / "step-1" / "model.safetensors")
    message = (
        "model.safetensors does not match the index: wte: expected F32 [4, 3], got F32 [5, 3];"
    )
    assert message in refusal(run / "step-1")


def test_a_damaged_index_is_named(run: Path) -> None:
    index = run / "step-1" / "index.json"
    index.write_text('{"format": "zero-')
    assert refusal(run / "step-1").startswith(f"{index}: damaged: not JSON: Unterminated string")


@given(st.data())
def test_no_damage_to_index_or_header_gets_past_checkpoint_error(data: st.DataObject) -> None:
    with TemporaryDirectory() as parent:
        folder = Path(parent) / "step-1"
        save(folder, {"model": {"a": torch.ones(2), "b": torch.tensor(True)}}, aliases={"a": ["c"]})
        path = folder / data.draw(st.sampled_from(["index.json", "model.safetensors"]))
        content = bytearray(path.read_bytes())
        header_bytes = len(content) - 9 if path.suffix == ".safetensors" else len(content)
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, header_bytes - 1))
            content[place] = data.draw(st.sampled_from(b'0123456789{}[]",:aFI\xff\0 '))
        path.write_bytes(content)
        with suppress(CheckpointError):
            assert torch.equal(read_tensor(folder, "c"), torch.ones(2))


def test_a_torch_without_the_dtype_says_so(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checkpoint_read, "torch_dtype_name", lambda _: "float3")
    assert (
        refusal(run / "step-1")
        == f"wte: torch {torch.__version__} has no dtype for F32; upgrade it"
    )


def test_latest_is_by_number_not_by_name_and_skips_what_is_incomplete(run: Path) -> None:
    for name in ("step-30.tmp", "step-30.old", "step-x", "best"):
        shutil.copytree(run / "step-1", run / name)
    (run / "step-40").touch()
    (run / "step-50").mkdir()
    shutil.copytree(run / "step-1", run / "step-60")
    os.truncate(run / "step-60" / "model.safetensors", 100)
    assert latest_checkpoint(run) == run / "step-10"


def test_latest_of_nothing_is_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None


def test_a_newer_format_is_refused_and_not_skipped(run: Path) -> None:
    index = run / "step-10" / "index.json"
    index.write_text(index.read_text().replace('"version": 1', '"version": 2'))
    message = f"{index}: written in format version 2, this zero-partition reads up to 1; upgrade it"
    assert refusal(run / "step-10") == message
    with pytest.raises(CheckpointError, match="format version 2"):
        latest_checkpoint(run)
    expected = f"; the newest checkpoint in {run} cannot be loaded: {message}"
    assert refusal(run / "step-3").endswith(expected)


def test_no_file_stays_open(run: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    Checkpoint.open(run / "step-1").close()
    os.truncate(run / "step-10" / "optimizer.exp_avg.safetensors", 9)
    refusal(run / "step-10")
    assert len(list(Path("/proc/self/fd").iterdir())) == before
