"""`plait config`: the configuration as it is understood, and what became of every key."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from plait._config_read import read_config_and_fates, read_training_config
from plait._devices import default_num_ranks
from plait._fates import Became, Fate
from plait._json import JsonObject, read_json
from plait._keys_table import keys_page
from plait._overrides import Origins, apply_override
from plait._problems import ConfigError, ProblemList, shown
from plait._schema import schema_text

__all__ = ["print_keys", "print_schema", "run_config"]

_REFUSED = 2
_WIDTH = 34  # of a value in the table


def run_config(
    path: str | None,
    *,
    overrides: Sequence[str],
    num_ranks: int | None,
    as_json: bool,
    for_initialize: bool,
) -> int:
    """Print a configuration and what became of its keys; returns the exit code.

    Args:
        path: The file; None is the default configuration.
        overrides: ``"a.b=value"`` each.
        num_ranks: The ranks to resolve it for.
        as_json: Print one JSON object instead.
        for_initialize: Read it as `plait.initialize` does.
    """
    try:
        if for_initialize:
            tree, fates = _for_initialize(path, overrides, num_ranks)
        else:
            config, fates = read_config_and_fates(path, overrides=overrides, num_ranks=num_ranks)
            tree = config.as_json()
            ranks, batch = config.run.ranks, config.training.batch
            tree["train_micro_batch_size_per_gpu"] = batch.micro_batch_size
            tree["run"] = {"ranks": ranks, **_section(tree, "run")}
    except ConfigError as error:
        print(f"plait: {error}", file=sys.stderr)
        return _REFUSED
    if as_json:
        keys = [
            {"path": fate.path, "value": fate.value, "became": fate.became, "note": fate.note}
            for fate in fates
        ]
        print(json.dumps({"config": tree, "keys": keys}, indent=2, ensure_ascii=False))
    else:
        print("\n".join(_lines(tree, fates)))
    return 0


def print_schema() -> int:
    """Print the JSON schema; returns the exit code."""
    print(schema_text())
    return 0


def print_keys() -> int:
    """Print the page on DeepSpeed's keys; returns the exit code."""
    print(keys_page(), end="")
    return 0


def _section(tree: dict[str, object], name: str) -> dict[str, object]:
    section = tree[name]
    assert isinstance(section, dict)
    return section


def _for_initialize(
    path: str | None, overrides: Sequence[str], num_ranks: int | None
) -> tuple[dict[str, object], tuple[Fate, ...]]:
    """The configuration as `plait.initialize` reads it."""
    tree = JsonObject() if path is None else read_json(Path(path))
    origins = Origins()
    problems = ProblemList(origins.of)
    for override in overrides:
        apply_override(tree, origins, override, problems)
    if problems.found:
        raise ConfigError(problems.found, str(path))
    ranks = num_ranks or default_num_ranks("auto")
    training, fates = read_training_config(tree, num_ranks=ranks)
    resolved = training.as_json()
    resolved["train_micro_batch_size_per_gpu"] = training.batch.micro_batch_size
    return resolved, fates


def _lines(tree: dict[str, object], fates: Sequence[Fate]) -> list[str]:
    """The resolved values, then the keys by what became of them."""
    rows = [(path, shown(value)) for path, value in _leaves(tree, "")]
    lines = ["the configuration as it is understood", "", *_aligned(rows)]
    for became, title in _TITLES.items():
        some = [fate for fate in fates if fate.became is became]
        if some:
            table = [(fate.path, _cut(shown(fate.value)), fate.note) for fate in some]
            lines += ["", title, "", *_aligned(table)]
    return lines


_TITLES = {
    Became.HONOURED: "honoured",
    Became.DERIVED: 'derived: absent or "auto", filled in',
    Became.DECIDED: "decided by plait: taken, but plait decides this itself",
    Became.OFF: "off: asks for nothing",
}


def _leaves(tree: dict[str, object], prefix: str) -> Iterable[tuple[str, object]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        elif value != {}:
            yield f"{prefix}{name}", value


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as columns of equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
