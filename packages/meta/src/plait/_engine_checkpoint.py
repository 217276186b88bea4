"""Checkpoints of an engine: a folder a tag, and a file `latest` that names the newest.

save_dir/
  latest              "global_step100"
  global_step100/     as `zero_partition` writes it; its state holds counts and schedule
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from plait._client_scheduler import Scheduler, scheduler_name
from plait._engine_facts import Counts
from plait._foreign_checkpoint import check_not_foreign
from plait._json_state import check_json, decode, encode
from plait._schedule import Schedule
from plait._together import agreed, from_rank_zero
from zero_partition import CheckpointError, Zero

__all__ = ["What", "load", "replace_file", "save"]

_LATEST = "latest"
_INDEX = "index.json"
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
State: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class What:
    """What is saved, or loaded into."""

    zero: Zero
    optimizer: Any
    scheduler: Scheduler | None
    counts: Counts


def save(
    what: What,
    save_dir: str | os.PathLike[str],
    tag: object,
    client_state: dict[str, Any] | None,
    *,
    save_latest: bool,
) -> None:
    """Write ``save_dir/tag`` and then `latest`; see `PlaitEngine.save_checkpoint`."""
    what.zero.sync()  # a rank that does something else is found out here, at once
    name = f"global_step{what.counts.global_steps}" if tag is None else str(tag)
    state = agreed(lambda: _state(what, name, {} if client_state is None else client_state))
    folder = Path(save_dir)
    what.zero.save(folder / name, what.optimizer, state=state, overwrite=True)
    if save_latest:
        from_rank_zero(lambda: replace_file(folder / _LATEST, lambda at: _write_text(at, name)))
    if what.counts.window_steps and dist.get_rank() == 0:
        warnings.warn(
            f"save_checkpoint() after {what.counts.window_steps} micro-batches of an update: their "
            "gradients are not saved; after loading, that update begins anew",
            stacklevel=3,
        )


def _state(what: What, name: str, client_state: dict[str, Any]) -> State:
    parts = PurePath(name).parts
    is_below = bool(parts) and not PurePath(name).is_absolute() and ".." not in parts
    if not is_below or parts[0] == _LATEST or name != name.strip() or not name.isprintable():
        raise ValueError(f"tag: expected a folder's name below save_dir, got {name!r}")
    if not isinstance(client_state, dict):
        raise TypeError(f"client_state: expected a dict, got {type(client_state).__name__}")
    try:
        check_json(client_state, "client_state")
    except RecursionError:
        raise ValueError("client_state: it holds itself, or is nested too deeply") from None
    scheduler, counts = what.scheduler, what.counts
    kept = None
    if scheduler is not None:
        where = "lr_scheduler.state_dict()"
        kept = [scheduler_name(scheduler), encode(scheduler.state_dict(), where)]
    return {
        "engine": {
            "global_steps": counts.global_steps,
            "global_samples": counts.global_samples,
            "skipped_steps": counts.skipped_steps,
            "micro_steps": counts.micro_steps - counts.window_steps,
        },
        "lr_scheduler": kept,
        "client_state": client_state,
    }


def load(
    what: What,
    load_dir: str | os.PathLike[str],
    tag: object,
    *,
    load_optimizer_states: bool,
    load_lr_scheduler_states: bool,
    load_module_only: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """Read ``load_dir/tag``; see `PlaitEngine.load_checkpoint`."""
    what.zero.sync()
    folder = Path(load_dir)
    chosen = from_rank_zero(lambda: _chosen(folder, None if tag is None else str(tag)))
    if chosen is None:
        if dist.get_rank() == 0:
            warnings.warn(
                f"load_checkpoint: {folder} has no file {_LATEST!r}, so nothing was loaded; pass "
                "tag=... to load one by name",
                stacklevel=3,
            )
        return None, None
    path = folder / chosen
    with_scheduler = None if load_module_only or not load_lr_scheduler_states else what.scheduler
    if not load_module_only:
        from_rank_zero(lambda: _check_state(path, with_scheduler))
    with_optimizer = load_optimizer_states and not load_module_only
    rates = _rates(what.optimizer)
    state = what.zero.load(path, what.optimizer if with_optimizer else None)
    what.counts.window_steps = what.counts.backwards = 0
    if load_module_only:
        return str(path), state["client_state"] if _is_engine_state(state) else {}
    counts, saved = what.counts, state["engine"]
    counts.global_steps, counts.global_samples = saved["global_steps"], saved["global_samples"]
    counts.micro_steps, counts.skipped_steps = saved["micro_steps"], saved["skipped_steps"]
    if with_scheduler is not None:
        with_scheduler.load_state_dict(decode(state["lr_scheduler"][1]))
    elif what.scheduler is not None:
        _set_rates(what.optimizer, rates)  # the schedule goes on from where it is
    elif with_optimizer and state["lr_scheduler"] is not None and dist.get_rank() == 0:
        warnings.warn(
            f"load_checkpoint: {path} holds the schedule of a {state['lr_scheduler'][0]}, this "
            f"engine has none: its learning rates stay at {_rates(what.optimizer)}",
            stacklevel=3,
        )
    return str(path), state["client_state"]


def _chosen(folder: Path, tag: str | None) -> str | None:
    """The tag to load; None where none is given and no `latest` is there."""
    said = ""
    if tag is None:
        if not (folder / _LATEST).is_file():
            check_not_foreign(folder)
            if (folder / _INDEX).is_file():
                parent, name = folder.absolute().parent, folder.absolute().name
                raise CheckpointError(
                    f"{folder} is a checkpoint itself; load_checkpoint() takes the folder above: "
                    f"load_checkpoint({str(parent)!r}, tag={name!r})"
                )
            return None
        tag, said = _named_by_latest(folder / _LATEST), f" (named by {_LATEST})"
    check_not_foreign(folder / tag)
    if not (folder / tag / _INDEX).is_file():
        known = sorted(path.parent.name for path in folder.glob(f"*/{_INDEX}"))
        raise CheckpointError(
            f"{folder / tag}{said} is not a complete checkpoint; there are "
            f"{', '.join(known) or 'none'} in {folder}"
        )
    return tag


def _named_by_latest(path: Path) -> str:
    try:
        name = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; pass tag=...") from None
    if not name:
        raise CheckpointError(f"{path} is empty; pass tag=...")
    return name


def _check_state(path: Path, scheduler: Scheduler | None) -> None:
    """Refuse a checkpoint whose state is not an engine's, before anything is loaded."""
    try:
        state = json.loads((path / _INDEX).read_text(encoding="utf-8"))["state"]
    except (ValueError, KeyError, TypeError):
        return  # `Zero.load` says what is wrong with it
    if not _is_engine_state(state):
        raise CheckpointError(
            f"{path} was not saved by an engine (but by `plait train`, for one); its parameters "
            "load with load_module_only=True"
        )
    counts, kept = state["engine"], state["lr_scheduler"]
    if not _are_counts(counts) or not _is_schedule(kept):
        raise CheckpointError(f"{path / _INDEX}: damaged: this is not the state of an engine")
    if scheduler is None:
        return
    mine = scheduler_name(scheduler)
    if kept is None or kept[0] != mine:
        theirs = "no schedule" if kept is None else f"the schedule of a {kept[0]}"
        raise CheckpointError(
            f"{path} holds {theirs}, this engine has a {mine}; pass the same one, or "
            "load_lr_scheduler_states=False"
        )
    if isinstance(scheduler, Schedule):
        try:
            scheduler.check_state_dict(decode(kept[1]))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from None


def _are_counts(value: object) -> bool:
    return isinstance(value, dict) and all(type(value.get(name)) is int for name in _COUNTS)


def _is_schedule(value: object) -> bool:
    """Whether it is nothing, or the name of a schedule and its state."""
    return value is None or (
        isinstance(value, list) and len(value) == 2 and isinstance(value[1], dict)
    )


def _is_engine_state(state: object) -> bool:
    return isinstance(state, dict) and {"engine", "lr_scheduler", "client_state"} <= state.keys()


def _rates(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    return [] if optimizer is None else [group["lr"] for group in optimizer.param_groups]


def _set_rates(optimizer: torch.optim.Optimizer, rates: list[Any]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file beside its place and put it there whole, in one move."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.tmp")
    try:
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
