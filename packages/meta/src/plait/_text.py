"""The text to train on: bytes, cut into a training part and a held-out part."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import stat
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Text", "TextError", "batch_starts", "held_out_starts", "load_text", "windows"]

_HELD_OUT_EVERY = 20
_CHUNK_BYTES = 16384
_BINARY_PROBE_BYTES = 8192


class TextError(ValueError):
    """Text that cannot be trained on; the message says where and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Training and held-out text.

    Args:
        name: What it is, for the report.
        train: uint8, one dimension.
        held_out: uint8, one dimension; no byte of it is in `train`.
        sha256: Of the whole text, to recognise it again.
        note: What was skipped, or empty.
    """

    name: str
    train: Tensor
    held_out: Tensor
    sha256: str
    note: str = ""


def load_text(path: str | None, *, context_length: int) -> Text:
    """Load a file, a folder (recursively, in sorted order), or the text that ships with Python.

    The text is cut into chunks of equal length, at most 16 KiB, and every 20th is held out.

    Args:
        path: File or folder; None for Python's documentation topics and library sources.
        context_length: Bytes the model sees at once; both parts hold at least one more.

    Raises:
        TextError: The text is missing, empty, binary, not readable or too short.
    """
    note = ""
    if path is None:
        name, documents = "text that ships with Python", _python_text()
    elif Path(path).is_dir():
        name, (documents, note) = path, _folder(Path(path))
    else:
        name, documents = path, [_file(Path(path))]
    whole = b"\n".join(documents)
    window = context_length + 1
    if len(whole) < 2 * window:
        raise TextError(
            f"data.path: {name} holds {len(whole)} bytes; model.context_length {context_length} "
            f"needs at least {2 * window}, half of them to train on and half held out"
        )
    chunk = max(window, min(_CHUNK_BYTES, len(whole) // _HELD_OUT_EVERY))
    train, held_out = _split(whole, chunk)
    return Text(
        name=name,
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        held_out=torch.frombuffer(bytearray(held_out), dtype=torch.uint8),
        sha256=hashlib.sha256(whole).hexdigest(),
        note=note,
    )


def _split(whole: bytes, chunk: int) -> tuple[bytes, bytes]:
    """Every 20th chunk, or the last whole one where there are fewer, and the rest."""
    num_chunks = len(whole) // chunk
    chunks = [whole[i * chunk : (i + 1) * chunk] for i in range(num_chunks - 1)]
    chunks.append(whole[(num_chunks - 1) * chunk :])
    held = {i for i in range(num_chunks) if i % _HELD_OUT_EVERY == _HELD_OUT_EVERY // 2}
    held = held or {num_chunks - 1}
    train = b"".join(chunks[i] for i in range(num_chunks) if i not in held)
    return train, b"".join(chunks[i] for i in sorted(held))


def _python_text() -> list[bytes]:
    """The topics of ``help()``, then the top-level modules of the standard library, each sorted."""
    documents = []
    topics: dict[str, str] = {}
    with contextlib.suppress(ImportError):  # some distributions ship Python without it
        topics = importlib.import_module("pydoc_data.topics").topics
    documents += [topics[name].encode() for name in sorted(topics)]
    library = Path(sysconfig.get_paths()["stdlib"])
    documents += [path.read_bytes() for path in sorted(library.glob("*.py")) if path.is_file()]
    if not documents:
        raise TextError(
            f"this Python ships neither documentation topics nor sources ({library}); "
            "set data.path to a text file or folder"
        )
    return documents


def _file(path: Path) -> bytes:
    """One file given by name."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise TextError(f"data.path: {path} is not a file or folder")
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise TextError(f"data.path: {path} cannot be read: {reason}") from None
    if not content.strip():
        raise TextError(f"data.path: {path} is empty")
    if _is_binary(content):
        raise TextError(f"data.path: {path} is binary (it holds zero bytes), expected text")
    return content


def _folder(folder: Path) -> tuple[list[bytes], str]:
    """Every text file under a folder, and a note on what was skipped."""
    documents: list[bytes] = []
    skipped = {"binary": 0, "unreadable": 0, "empty": 0}

    def unreadable(_: OSError) -> None:
        skipped["unreadable"] += 1

    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders.sort()
        for path in (Path(parent, name) for name in sorted(names)):
            try:
                if not path.is_file():
                    continue
                content = path.read_bytes()
            except OSError:
                skipped["unreadable"] += 1
                continue
            if not content.strip():
                skipped["empty"] += 1
            elif _is_binary(content):
                skipped["binary"] += 1
            else:
                documents.append(content)
    said = ", ".join(f"{count} {kind}" for kind, count in skipped.items() if count)
    if not documents:
        found = f"only files that cannot be used ({said})" if said else "no files"
        raise TextError(f"data.path: {folder} holds {found}, expected text files")
    return documents, f"skipped files: {said}" if said else ""


def _is_binary(content: bytes) -> bool:
    return b"\0" in content[:_BINARY_PROBE_BYTES]


def batch_starts(*, seed: int, step: int, samples: Sequence[int], num_starts: int) -> list[int]:
    """Where the given samples of a step's global batch begin.

    Sample i depends on (seed, step, i) alone, so any number of ranks sees the same global batch.

    Args:
        seed: ``run.seed``.
        step: Number of the update.
        samples: Indices into the global batch.
        num_starts: Number of possible beginnings.

    Example:
        >>> batch_starts(seed=0, step=3, samples=[0, 1], num_starts=10)[1:] == batch_starts(
        ...     seed=0, step=3, samples=[1], num_starts=10
        ... )
        True
    """
    digests = (
        hashlib.blake2b(f"{seed}/{step}/{i}".encode(), digest_size=8).digest() for i in samples
    )
    return [int.from_bytes(digest, "big") % num_starts for digest in digests]


def held_out_starts(*, held_out_numel: int, context_length: int, num_windows: int) -> list[int]:
    """Where the windows of an evaluation begin: spread evenly, without overlap.

    Fewer than `num_windows` where the text does not hold as many.
    """
    count = min(num_windows, (held_out_numel - 1) // context_length)
    last = held_out_numel - 1 - context_length
    return [i * last // max(1, count - 1) for i in range(count)]


def windows(text: Tensor, starts: Sequence[int], *, context_length: int) -> tuple[Tensor, Tensor]:
    """Inputs and next bytes of the windows that begin at `starts`.

    Returns:
        tokens_BT, targets_BT: int64, shape ``(len(starts), context_length)``.
    """
    offsets = torch.arange(context_length + 1)
    window_BT = text[torch.tensor(starts, dtype=torch.long)[:, None] + offsets].long()
    return window_BT[:, :-1], window_BT[:, 1:]
