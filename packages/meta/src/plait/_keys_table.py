"""The table of DeepSpeed's keys as a page of the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable

from plait._key import Key, Use
from plait._keys import ALIASES, DEEPSPEED_KEYS, DEPRECATED
from plait._optimizer_keys import OPTIMIZER_KEYS

__all__ = ["default_said", "keys_page"]

_HEAD = """\
# DeepSpeed's keys, and what plait does with each

Made by `plait config --keys` from the table that the reader checks against. Every key of DeepSpeed
0.19's JSON is here; a key that is not is an error that names the nearest one. `plait config FILE`
says what became of the keys of a file. [Training with plait](plait.md) has the keys of `plait
train` itself, and the parameters of the schedules.

`"auto"` means the same as leaving a key out. Where nothing can be derived (`optimizer.params.lr`,
`optimizer.params.weight_decay`, `scheduler.params.warmup_num_steps`, the batch sizes of
`plait.initialize`, ...) it is an error that says so.
"""
_HONOURED = """\
Their values are used. The default of `zero_optimization.stage` is 3 for `plait train` and, as in
DeepSpeed, 0 for `plait.initialize`, which also wants one of the first two batch sizes. The smaller
of the two bucket sizes counts.
"""
_DECIDED = """\
Their values are checked and then left alone: they tune what plait decides itself. None of them
changes a number.
"""
_ASKS = """\
Their features are not built. The values in the second column ask for nothing and are taken; any
other is refused by name.
"""
_USES = {
    Use.HONOURED: ("Honoured", _HONOURED),
    Use.DECIDED: ("Decided by plait", _DECIDED),
    Use.ASKS: ("Refused when they ask", _ASKS),
}


def keys_page() -> str:
    """The page in Markdown."""
    keys = (*DEEPSPEED_KEYS, *OPTIMIZER_KEYS)
    parts = [_HEAD]
    for use, (title, said) in _USES.items():
        rows = _table(use, [key for key in keys if key.use is use])
        parts += [f"## {title}\n", said, "\n".join(rows) + "\n"]
    parts += ["## Parts of what is not built\n", _PARTS_SAID, "\n".join(_parts(keys)) + "\n"]
    parts += ["## Other names\n", "\n".join(_names()) + "\n"]
    return "\n".join(parts)


_PARTS_SAID = """\
They say how a feature works. Where the feature is off they are taken and do nothing.
"""


def default_said(key: Key) -> str:
    """The default of a key as the documentation has it."""
    return key.default_said or f"`{json.dumps(key.default)}`"


def _table(use: Use, keys: Iterable[Key]) -> list[str]:
    if use is Use.HONOURED:
        rows = [f"| `{key.path}` | {default_said(key)} | {key.meaning} |" for key in keys]
        return ["| key | default | meaning |", "|---|---|---|", *rows]
    if use is Use.DECIDED:
        rows = [f"| `{key.path}` | {key.kind.expected} | {key.meaning} |" for key in keys]
        return ["| key | takes | what plait does |", "|---|---|---|", *rows]
    rows = [f"| `{key.path}` | {_off(key)} | {key.meaning} | {key.instead} |" for key in keys]
    return ["| key | asks for nothing | feature | instead |", "|---|---|---|---|", *rows]


def _off(key: Key) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in key.off)


def _parts(keys: Iterable[Key]) -> list[str]:
    by_need: dict[str, list[str]] = {}
    for key in keys:
        if key.use is Use.PART:
            by_need.setdefault(key.needs, []).append(f"`{key.path}`")
    rows = [f"| `{needs}` | {', '.join(paths)} |" for needs, paths in by_need.items()]
    return ["| of | keys |", "|---|---|", *rows]


def _names() -> list[str]:
    rows = []
    for alias, path in ALIASES.items():
        note = "deprecated" if alias in DEPRECATED else ""
        rows.append(f"| `{alias}` | `{path}` | {note} |")
    return ["| name | is | |", "|---|---|---|", *rows]
