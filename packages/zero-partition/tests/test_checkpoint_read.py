"""Any range of any tensor is read bitwise, from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from checkpoints import (
    DTYPES,
    RUN_FILES,
    Elsewhere,
    same_bits,
    save,
    save_run,
    tensor_entries,
    unsynced,
    values_of,
)
from zero_partition import _checkpoint_read
from zero_partition._checkpoint_plan import TensorEntry
from zero_partition._checkpoint_read import Checkpoint, read_tensor


@pytest.fixture(scope="module", autouse=True)
def no_sync() -> Iterator[None]:
    """Nothing here is about power cuts, and syncing is slow."""
    with unsynced():
        yield


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with steps 1, 2 and 10, to do anything with."""
    return save_run(tmp_path)


@given(tensor_entries(), st.data())
def test_any_range_of_any_tensor_is_read_bitwise(
    entries: list[TensorEntry], data: st.DataObject
) -> None:
    values = {entry.name: values_of(entry) for entry in entries}
    with TemporaryDirectory() as parent:
        save(Path(parent) / "c", {"model": values})
        with Checkpoint.open(Path(parent) / "c") as checkpoint:
            assert dict(checkpoint.entries("model")) == {entry.name: entry for entry in entries}
            for entry in entries:
                start = data.draw(st.integers(0, entry.numel))
                end = data.draw(st.integers(start, entry.numel))
                wanted = values[entry.name].view(-1)[start:end]
                out = torch.empty_like(wanted)
                checkpoint.read_into("model", entry.name, start, out)
                assert same_bits(out, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_any_dtype_comes_back_whole(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.zeros(8 * 6, dtype=torch.uint8).random_(0, 2).view(dtype)[:6].view(2, 3)
    save(tmp_path / "c", {"model": {"a": tensor}})
    assert same_bits(read_tensor(tmp_path / "c", "a"), tensor)


def test_one_moment_is_read_without_a_process_group(run: Path) -> None:
    assert not torch.distributed.is_initialized()
    tensor = read_tensor(run / "step-2", "ln", file="optimizer.exp_avg")
    assert torch.equal(tensor, RUN_FILES["optimizer.exp_avg"]["ln"])


def test_a_tie_is_read_by_any_of_its_names_in_every_file(run: Path) -> None:
    for file in RUN_FILES:
        assert torch.equal(read_tensor(run / "step-1", "head", file=file), RUN_FILES[file]["wte"])


def test_a_tensor_lands_in_host_memory_whatever_the_default_device(run: Path) -> None:
    with torch.device("meta"):
        tensor = read_tensor(run / "step-1", "seen")
    assert tensor.item() == 7


def test_what_the_caller_saved_comes_back(run: Path) -> None:
    with Checkpoint.open(run / "step-10") as checkpoint:
        assert checkpoint.index["state"] == {"step": 10}
        assert checkpoint.files == ("model", "optimizer.exp_avg")
        assert checkpoint.directory == run / "step-10"


MEMORY = """
import sys
from zero_partition._checkpoint_read import read_tensor
def peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
read_tensor(sys.argv[1], "small")
before = peak_bytes()
read_tensor(sys.argv[1], "big", file="optimizer.exp_avg")
print(peak_bytes() - before)
"""


def test_reading_one_moment_takes_the_memory_of_one_tensor(tmp_path: Path) -> None:
    big = torch.ones(2**22)
    others = {f"other{i}": torch.ones(2**22) for i in range(3)}
    save(
        tmp_path / "c",
        {"model": {"small": torch.ones(1)}, "optimizer.exp_avg": others | {"big": big}},
    )
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "c")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    used = int(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    assert 0.5 * big.nbytes < used < 1.1 * big.nbytes


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 100])
def test_tensors_on_a_device_pass_through_staging_memory_of_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numel: int
) -> None:
    tensor = torch.arange(120).bfloat16()
    save(tmp_path / "c", {"model": {"a": tensor}})
    monkeypatch.setattr(_checkpoint_read, "BLOCK_BYTES", 32)
    out = torch.empty(numel, dtype=torch.bfloat16)
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        checkpoint.read_into("model", "a", 5, out.as_subclass(Elsewhere))
    assert torch.equal(out, tensor[5 : 5 + numel])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
def test_tensors_on_an_accelerator_are_filled(tmp_path: Path) -> None:
    tensor = torch.randn(5_000_000)
    save(tmp_path / "c", {"model": {"a": tensor}})
    out = torch.empty(4_999_999, device=torch.accelerator.current_accelerator())
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        checkpoint.read_into("model", "a", 1, out)
    assert torch.equal(out.cpu(), tensor[1:])


def test_reads_that_the_system_cuts_short_are_continued(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, blocks, at: preadv(fd, [blocks[0][:5]], at))
    assert torch.equal(read_tensor(run / "step-1", "wte"), RUN_FILES["model"]["wte"])


def test_a_parameter_that_requires_grad_can_be_filled(run: Path) -> None:
    out = torch.nn.Parameter(torch.empty(12))
    with Checkpoint.open(run / "step-1") as checkpoint:
        checkpoint.read_into("model", "wte", 0, out)
    assert torch.equal(out.view(4, 3), RUN_FILES["model"]["wte"])


@pytest.mark.parametrize(
    ("start", "out", "error", "message"),
    [
        (
            0,
            torch.empty(4, 3),
            ValueError,
            r"wte: out must be 1-D, .* cpu tensor of shape \[4, 3\]",
        ),
        (0, torch.empty(8)[::2], ValueError, r"wte: out must be 1-D, contiguous .* stride \[2\]"),
        (0, torch.empty(3, device="meta"), ValueError, "wte: out must .* memory, got meta tensor"),
        (
            0,
            torch.empty(3).double(),
            TypeError,
            "wte: out must be F32, as stored, got torch.float64",
        ),
        (11, torch.empty(2), ValueError, r"wte: expected a range .* 12 elements, got \[11, 13\)"),
        (-1, torch.empty(2), ValueError, r"wte: expected a range .* 12 elements, got \[-1, 1\)"),
    ],
)
def test_a_wrong_place_to_read_into_is_refused(
    run: Path, start: int, out: Any, error: type[Exception], message: str
) -> None:
    with Checkpoint.open(run / "step-1") as checkpoint, pytest.raises(error, match=f"^{message}"):
        checkpoint.read_into("model", "head", start, out)


def test_a_folder_replaced_while_it_is_open_still_reads_as_it_was(run: Path) -> None:
    out = torch.empty(12)
    with Checkpoint.open(run / "step-1") as checkpoint:
        save(run / "step-1", {"model": {"wte": torch.ones(4, 3)}}, overwrite=True)
        checkpoint.read_into("model", "wte", 0, out)
    assert torch.equal(out.view(4, 3), RUN_FILES["model"]["wte"])
    assert torch.equal(read_tensor(run / "step-1", "wte"), torch.ones(4, 3))


def test_a_relative_path_and_a_trailing_slash_are_paths(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run / "step-1")
    assert read_tensor(".", "seen").item() == 7
    assert read_tensor("../step-1/", "seen").item() == 7


def test_weights_written_again_by_another_program_are_read(run: Path) -> None:
    changed = {name: tensor + 1 for name, tensor in RUN_FILES["model"].items()}
    save_file(changed, run / "step-1" / "model.safetensors")
    assert torch.equal(read_tensor(run / "step-1", "wte"), changed["wte"])
