"""Whenever a save is killed or the disk is full, the old or the new checkpoint loads."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import (
    NEW,
    OLD,
    fail_with,
    index_of,
    previous_checkpoint_stays,
    save,
    tree,
)
from zero_partition._checkpoint_plan import TensorEntry
from zero_partition._checkpoint_read import read_tensor
from zero_partition._checkpoint_write import Piece, write_checkpoint
from zero_partition._errors import CheckpointError


def test_the_rest_of_a_killed_save_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "step-1.tmp").mkdir()
    (tmp_path / "step-1.tmp" / "model.safetensors").write_bytes(b"half")
    save(tmp_path / "step-1", OLD)
    assert list(tmp_path.iterdir()) == [tmp_path / "step-1"]


def interrupted_overwrite(folder: Path) -> None:
    """What a kill between the two renames of an overwrite leaves."""
    save(folder / "step-1", OLD)
    (folder / "step-1" / "replaced").touch()
    (folder / "step-1").rename(folder / "step-1.old")


def test_a_save_beside_a_lone_old_checkpoint_is_refused_without_overwrite(tmp_path: Path) -> None:
    interrupted_overwrite(tmp_path)
    before = tree(tmp_path)
    message = "step-1.old is the previous checkpoint, left there .*; rename it to step-1 to keep it"
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "step-1", NEW)
    assert tree(tmp_path) == before


def test_an_overwrite_takes_up_where_an_interrupted_one_stopped(tmp_path: Path) -> None:
    interrupted_overwrite(tmp_path)
    save(tmp_path / "step-1", NEW, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert torch.equal(read_tensor(tmp_path / "step-1", "a"), NEW["model"]["a"])


def test_an_overwrite_that_fails_gives_a_lone_old_checkpoint_its_name_back(tmp_path: Path) -> None:
    interrupted_overwrite(tmp_path)
    entry = TensorEntry("a", (6,), "F32")
    with pytest.raises(TypeError, match="a: a piece must be F32"):
        write_checkpoint(
            tmp_path / "step-1",
            files={"model": [entry]},
            pieces={"model": [Piece("a", 0, torch.ones(1).half())]},
            index=index_of([entry]),
            rank=0,
            agree=lambda _: None,
            overwrite=True,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert torch.equal(read_tensor(tmp_path / "step-1", "a"), OLD["model"]["a"])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_what_is_needed_and_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    with previous_checkpoint_stays(tmp_path):
        save(tmp_path / "step-2", NEW)
        needed = sum(p.stat().st_size for p in (tmp_path / "step-2").glob("*.safetensors"))
        shutil.rmtree(tmp_path / "step-2")
        monkeypatch.setattr(os, "posix_fallocate", fail_with(code))
        message = f"{needed} bytes are needed, [0-9]+ are free on {tmp_path}; earlier checkpoints"
        with pytest.raises(CheckpointError, match=f"{os.strerror(code)}: {message}"):
            save(tmp_path / "step-2", NEW)


def test_a_real_limit_on_file_size_fails_before_any_tensor_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    pwrite = os.pwrite

    def record(handle: int, data: memoryview, offset: int) -> int:
        written.append(len(data))
        return pwrite(handle, data, offset)

    with previous_checkpoint_stays(tmp_path):
        monkeypatch.setattr(os, "pwrite", record)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
        try:
            with pytest.raises(CheckpointError, match=r"File too large: [0-9]+ bytes are needed"):
                save(tmp_path / "step-2", {"model": {"a": torch.zeros(2**15)}})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert written == []


FILL_DISK = """
import sys, torch
from pathlib import Path
from checkpoints import save
from zero_partition._checkpoint_read import latest_checkpoint
from zero_partition._errors import CheckpointError
folder = Path(sys.argv[1])
save(folder / "step-1", {"model": {"a": torch.zeros(2**18)}})
try:
    small, big = {"a": torch.zeros(2**16)}, {"a": torch.zeros(2**19)}
    save(folder / "step-2", {"master": small, "model": big})
except CheckpointError as error:
    print(error)
print(sorted(path.name for path in folder.iterdir()), latest_checkpoint(folder).name)
"""


def test_a_disk_that_is_really_full_keeps_the_previous_checkpoint(tmp_path: Path) -> None:
    mount = (
        f"mount -t tmpfs -o size=2m tmpfs {tmp_path} && exec {sys.executable} -c '{FILL_DISK}' $0"
    )
    isolated = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    trial = [*isolated, f"mount -t tmpfs t {tmp_path}"]
    if subprocess.run(trial, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk here")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [*isolated, mount, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    error, state = run.stdout.splitlines()
    found = re.search(
        "No space left on device: ([0-9]+) bytes are needed, ([0-9]+) are free", error
    )
    assert found
    needed, free = map(int, found.groups())
    assert 0 < needed - 2**18 - 2**21 < 1000
    assert 2**20 - 2**16 < free < 2**20
    assert state == "['step-1'] step-1"


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_that_cannot_reserve_space_still_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail_with(code))
    save(tmp_path / "step-1", NEW)
    assert load_file(tmp_path / "step-1" / "model.safetensors")["a"].sum() == 1000


@pytest.mark.parametrize("failing_call", range(1, 5))
def test_a_disk_that_fills_while_writing_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    pwrite, calls = os.pwrite, 0

    def fill(*args: Any) -> int:
        nonlocal calls
        calls += 1
        return fail_with(errno.ENOSPC)() if calls == failing_call else pwrite(*args)

    with previous_checkpoint_stays(tmp_path):
        monkeypatch.setattr(os, "posix_fallocate", fail_with(errno.EOPNOTSUPP))
        monkeypatch.setattr(os, "pwrite", fill)
        with pytest.raises(CheckpointError, match=r"cannot save .*/step-1: .*No space left"):
            save(tmp_path / "step-1", NEW, overwrite=True)


def test_what_cannot_be_removed_after_the_commit_is_said_and_the_new_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "step-1", OLD)
    rmtree = shutil.rmtree
    denied = fail_with(errno.EACCES)
    monkeypatch.setattr(
        shutil, "rmtree", lambda p, **k: denied() if p.name.endswith(".old") else rmtree(p, **k)
    )
    message = "step-1 is saved, but .*step-1.old, .*cannot be removed: .*Permission.*by hand"
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "step-1", NEW, overwrite=True)
    assert torch.equal(read_tensor(tmp_path / "step-1", "a"), NEW["model"]["a"])
    monkeypatch.undo()
    save(tmp_path / "step-1", OLD, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_failed_second_rename_gives_the_previous_checkpoint_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def refuse_tmp(source: Path, target: Path) -> None:
        if source.name == "step-1.tmp":
            fail_with(errno.EIO)()
        rename(source, target)

    save(tmp_path / "step-1", OLD)
    monkeypatch.setattr(os, "rename", refuse_tmp)
    with pytest.raises(CheckpointError, match=r"cannot save .*/step-1: .*Input/output error"):
        save(tmp_path / "step-1", NEW, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert torch.equal(read_tensor(tmp_path / "step-1", "a"), OLD["model"]["a"])


def test_everything_is_synced_before_the_rename_and_the_rename_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def recorded_fsync(handle: int) -> None:
        events.append("sync " + Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    def recorded_rename(source: Any, target: Any) -> None:
        events.append(f"rename {Path(source).name} {Path(target).name}")
        rename(source, target)

    save(tmp_path / "step-1", OLD)
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    save(tmp_path / "step-1", NEW, overwrite=True)
    assert events == [
        "sync model.safetensors",
        "sync optimizer.m.safetensors",
        "sync index.json",
        "sync step-1.tmp",
        "rename step-1 step-1.old",
        "rename step-1.tmp step-1",
        f"sync {tmp_path.name}",
    ]


# Runs in a process of its own: forks a save, and kills it at its n-th call to the system.
KILLED_SAVES = """
import json, os, shutil, sys, torch
from pathlib import Path
from checkpoints import save
from zero_partition._checkpoint_read import Checkpoint, latest_checkpoint, read_tensor
from zero_partition._errors import CheckpointError
folder, name = Path(sys.argv[1]), sys.argv[2]
old = {"model": {"a": torch.zeros(5)}}
new = {"model": {"a": torch.ones(5)}, "optimizer.m": {"a": torch.ones(5)}}
torch.set_num_threads(1)
os.fsync = lambda handle: None  # a kill, not a power cut

def killed_at(limit):
    count = 0
    def counted(call):
        def run(*args, **kwargs):
            nonlocal count
            count += 1
            if count == limit:
                os._exit(9)
            return call(*args, **kwargs)
        return run
    for call in ("open", "mkdir", "posix_fallocate", "pwrite", "fsync", "rename", "close", "unlink",
                 "rmdir"):
        setattr(os, call, counted(getattr(os, call)))
    save(folder / name, new, overwrite=True)
    os._exit(0)

outcomes = []
for limit in range(1, 200):
    shutil.rmtree(folder, ignore_errors=True)
    save(folder / "step-1", old)
    child = os.fork()
    if child == 0:
        killed_at(limit)
    finished = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    latest = latest_checkpoint(folder)
    try:
        value = read_tensor(folder / name, "a")[0].item()
    except CheckpointError as error:
        value = str(error)
    latest_value = read_tensor(latest, "a")[0].item() if latest else None
    save(folder / name, new, overwrite=True)
    mended = read_tensor(folder / name, "a")[0].item() == 1 and not list(folder.glob("*.*"))
    outcomes.append([latest_value, value, mended])
    if finished:
        break
print(json.dumps(outcomes))
"""


@pytest.fixture(scope="module", params=["step-1", "step-2"])
def killed_saves(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[list[Any]]]:
    """For a kill at each system call: value in the latest, value or error of the target, mended."""
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            KILLED_SAVES,
            tmp_path_factory.mktemp("kill") / "run",
            request.param,
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return request.param, json.loads(run.stdout)


def test_a_save_killed_at_any_moment_leaves_the_old_or_the_new_checkpoint(
    killed_saves: tuple[str, list[list[Any]]],
) -> None:
    target, outcomes = killed_saves
    assert len(outcomes) > 20
    assert outcomes[-1][:2] == [1, 1]
    moment_between_renames = [o for o in outcomes if o[0] is None]
    assert len(moment_between_renames) == (1 if target == "step-1" else 0)
    for latest_value, value, _ in outcomes:
        if target == "step-1":
            assert value == latest_value or "rename it to step-1 to load it" in value
        elif value == 1:
            assert latest_value == 1
        else:
            assert latest_value == 0
            assert "the previous checkpoint is" in value or "there is no checkpoint" in value


def test_after_a_save_killed_at_any_moment_the_next_one_works_and_tidies_up(
    killed_saves: tuple[str, list[list[Any]]],
) -> None:
    assert all(mended for _, _, mended in killed_saves[1])
