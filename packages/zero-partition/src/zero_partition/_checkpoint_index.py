"""The index of a checkpoint, ``index.json``: what was saved, by whom. No torch, no I/O.

Format version 1; a later version may add keys, and a reader refuses a version newer than its own::

    format         "zero-partition"
    version        1
    files          {file: {"bytes": size, "tensors": {name: {"dtype": code, "shape": [...]}}}}
    tensors        parameters: {name: {"dtype": code, "shape": [...], "aliases": [its other names]}}
    buffers        the same, of buffers
    optimizer      null, or {"class": name, "states": {state: "elementwise" | "scalar"},
                   "groups": [{"names": [...], "options": {...}}]}
    random_states  [base64 text, one a rank]
    wire           null, or {"layout": digest}: the data file "wire" has what each rank's wire keeps
                   for later messages, which fits the same number of ranks and buffers alone
    state          the caller's own JSON value: step, data position
    num_ranks      who saved; any other number
    stage          and stage loads it
    checksums      null; room for one checksum a piece: {file: [[begin, end, digest], ...]}
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_partition._checkpoint_plan import FilePlan, TensorEntry, data_path, describe, entry_from
from zero_partition._errors import CheckpointError

FORMAT_NAME = "zero-partition"
FORMAT_VERSION = 1
INDEX_NAME = "index.json"

_KEYS: dict[str, tuple[type, ...]] = {
    "files": (dict,),
    "tensors": (dict,),
    "buffers": (dict,),
    "optimizer": (dict, type(None)),
    "random_states": (list,),
    "state": (object,),
    "num_ranks": (int,),
    "stage": (int,),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """One parameter group: the logical names in it, and its options as JSON values."""

    names: Sequence[str]
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerRecord:
    """What the index says of an optimizer; `states`: name -> "elementwise" or "scalar"."""

    class_name: str
    states: Mapping[str, str]
    groups: Sequence[GroupRecord]

    def __post_init__(self) -> None:
        for state, kind in self.states.items():
            if kind not in ("elementwise", "scalar"):
                raise ValueError(
                    f"optimizer state {state!r} must be 'elementwise' or 'scalar', got {kind!r}"
                )


def build_index(
    *,
    tensors: Iterable[TensorEntry],
    buffers: Iterable[TensorEntry],
    aliases: Mapping[str, Sequence[str]],
    optimizer: OptimizerRecord | None,
    random_states: Sequence[bytes],
    wire_layout: str | None = None,
    state: Any,
    num_ranks: int,
    stage: int,
) -> dict[str, Any]:
    """Build the index of this module's docstring; the writer adds `files`.

    Args:
        tensors: Parameters, each once.
        buffers: Buffers, each once.
        aliases: Stored name -> the other names of the same tensor.
        optimizer: None if it is not saved.
        random_states: One byte string a rank, or none at all.
        wire_layout: Digest of the buffers to which the states of the wires belong; None without.
        state: The caller's own; that it is JSON is checked by `encode_index`, where an error on
            rank 0 alone reaches everybody.
        num_ranks: Ranks that save.
        stage: Their ZeRO stage.

    Raises:
        ValueError: a name stands for two tensors, an alias for none, or a random state is missing.
    """
    parameters, others = list(tensors), list(buffers)
    uses = Counter(entry.name for entry in (*parameters, *others))
    if unknown := sorted(aliases.keys() - uses.keys()):
        raise ValueError(f"aliases are given of {unknown}, which are not saved")
    uses.update(alias for names in aliases.values() for alias in names)
    if twice := sorted(name for name, count in uses.items() if count > 1):
        raise ValueError(f"a name stands for one tensor, these stand for several: {twice}")
    if random_states and len(random_states) != num_ranks:
        raise ValueError(
            f"expected {num_ranks} random states, one a rank, got {len(random_states)}"
        )

    def described(entries: list[TensorEntry]) -> dict[str, Any]:
        return {e.name: describe(e) | {"aliases": list(aliases.get(e.name, ()))} for e in entries}

    return {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "tensors": described(parameters),
        "buffers": described(others),
        "optimizer": None if optimizer is None else _optimizer_json(optimizer),
        "random_states": [base64.b64encode(data).decode() for data in random_states],
        "wire": None if wire_layout is None else {"layout": wire_layout},
        "state": state,
        "num_ranks": num_ranks,
        "stage": stage,
        "checksums": None,
    }


def encode_index(index: Mapping[str, Any], plans: Mapping[str, FilePlan]) -> bytes:
    """Write the index as JSON text, one line a tensor, with the `files` that the plans describe.

    Tuples become lists. Infinite and NaN floats are written as Python's json reads them.

    Raises:
        TypeError: something in it is not JSON; the message says where.
    """
    files = {
        file: {
            "bytes": plan.total_bytes,
            "tensors": {name: describe(entry) for name, entry in plan.entries.items()},
        }
        for file, plan in plans.items()
    }
    whole = {**index, "files": files}
    _check_json(whole, "index")
    lines = []
    for key, value in whole.items():
        text = json.dumps(value)
        if key in ("tensors", "buffers") and value:
            rows = (f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in value.items())
            text = "{\n" + ",\n".join(rows) + "\n }"
        lines.append(f" {json.dumps(key)}: {text}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def decode_index(data: bytes, where: str) -> dict[str, Any]:
    """Read an index back; `where` is its path, for messages.

    Raises:
        CheckpointError: it is damaged, of another program, or of a newer version.
    """
    try:
        index: Any = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: damaged: not JSON: {error}") from error
    found = index.get("format") if isinstance(index, dict) else None
    if found != FORMAT_NAME:
        raise CheckpointError(
            f"{where}: not a checkpoint's index: expected format {FORMAT_NAME!r}, got {found!r}"
        )
    version = index.get("version")
    if not isinstance(version, int) or version < 1:
        raise CheckpointError(f"{where}: damaged: version must be an integer >= 1, got {version!r}")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{where}: written in format version {version}, this zero-partition reads up to"
            f" {FORMAT_VERSION}; upgrade it"
        )
    for key, kinds in _KEYS.items():
        if key not in index or not isinstance(index[key], kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            came = type(index[key]).__name__ if key in index else "nothing"
            raise CheckpointError(f"{where}: damaged: {key!r} must be {expected}, got {came}")
    for table in (index["tensors"], index["buffers"]):
        for name, description in table.items():
            match description:
                case {"aliases": [*_]}:
                    continue
                case _:
                    raise CheckpointError(f"{where}: damaged: {name}: expected a list of aliases")
    return dict(index)


def random_states(index: Mapping[str, Any]) -> list[bytes]:
    """Each saving rank's random state, as given to `build_index`."""
    try:
        return [base64.b64decode(text, validate=True) for text in index["random_states"]]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{INDEX_NAME}: random_states are damaged: {error}") from error


def stored_name(index: Mapping[str, Any], name: str) -> str:
    """Name under which a tensor is stored; `name` itself where it is no alias."""
    if name in index["tensors"] or name in index["buffers"]:
        return name
    for table in (index["tensors"], index["buffers"]):
        for stored, description in table.items():
            if name in description["aliases"]:
                return str(stored)
    return name


def indexed_files(
    index: Mapping[str, Any], where: str
) -> dict[str, tuple[int, dict[str, TensorEntry]]]:
    """Size in bytes and tensors of each file that the index lists.

    Raises:
        CheckpointError: the list is damaged.
    """
    files = {}
    try:
        for file, listed in index["files"].items():
            data_path(Path(), file)  # refuses what leaves the folder
            files[file] = _file_entries(file, listed)
    except ValueError as error:
        raise CheckpointError(f"{where}: damaged: {error}") from error
    return files


def check_same_tensors(
    came: Mapping[str, TensorEntry], expected: Mapping[str, TensorEntry], where: str
) -> None:
    """Check that a file holds the tensors that the index lists for it, in any order.

    Raises:
        CheckpointError: some are missing, unexpected, or of another shape or dtype.
    """
    faults = [f"{name} is missing" for name in expected.keys() - came.keys()]
    faults += [f"{name} is unexpected" for name in came.keys() - expected.keys()]
    for name in came.keys() & expected.keys():
        if came[name] != expected[name]:
            was, now = expected[name], came[name]
            faults.append(
                f"{name}: expected {was.dtype} {list(was.shape)}, got {now.dtype} {list(now.shape)}"
            )
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise CheckpointError(
            f"{where} does not match the index: {'; '.join(sorted(faults)[:3])}{more};"
            " was it replaced? Save again, or restore the file"
        )


def _file_entries(file: str, listed: Any) -> tuple[int, dict[str, TensorEntry]]:
    match listed:
        case {"bytes": int(num_bytes), "tensors": dict(tensors)}:
            return num_bytes, {name: entry_from(name, row) for name, row in tensors.items()}
        case _:
            raise ValueError(f"{file}: expected bytes and tensors, got {listed!r:.100}")


def _optimizer_json(optimizer: OptimizerRecord) -> dict[str, Any]:
    groups = [
        {"names": list(group.names), "options": dict(group.options)} for group in optimizer.groups
    ]
    return {"class": optimizer.class_name, "states": dict(optimizer.states), "groups": groups}


def _check_json(value: Any, where: str) -> None:
    match value:
        case None | bool() | int() | float() | str():
            return
        case list() | tuple():
            for position, item in enumerate(value):
                _check_json(item, f"{where}[{position}]")
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise TypeError(f"{where}: keys must be str, got {key!r}; JSON has no others")
                _check_json(item, f"{where}.{key}")
        case _:
            raise TypeError(
                f"{where}: expected a JSON value (None, bool, int, float, str, list, dict),"
                f" got {type(value).__name__}"
            )
