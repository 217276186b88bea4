"""What every benchmark reports: the machine, the commit, the command, figures and rows."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """What the figures were measured on; the load says whether anybody else was working."""
    described: dict[str, Any] = {
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory": _first_value(Path("/proc/meminfo"), "MemTotal"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    if sys.platform != "win32":
        described["load"] = round(os.getloadavg()[0], 1)
    return described


def commit() -> str:
    """The commit that was measured, and whether the files differ from it."""
    if shutil.which("git") is None:
        return "unknown"
    name = _git("rev-parse", "--short=12", "--verify", "HEAD") or "none"
    return f"{name} and uncommitted changes" if _git("status", "--porcelain") else name


def command() -> str:
    """The command line, as one types it in the root of the repository."""
    script = Path(sys.argv[0]).resolve()
    inside = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script
    return shlex.join(["python", inside.as_posix(), *sys.argv[1:]])


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows below a header; the first column is aligned left, the others right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def options_of(description: str | None, *, quick: str) -> argparse.Namespace:
    """Read ``--quick`` and ``--json FILE``; a folder that is not there is refused at once.

    Args:
        description: The script's docstring.
        quick: What ``--quick`` leaves out.
    """
    parser = parser_of(description, quick=quick)
    options = parser.parse_args()
    check_folder(parser, options)
    return options


def parser_of(description: str | None, *, quick: str) -> argparse.ArgumentParser:
    """The parser of `options_of`, for a script that takes more."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and rows here")
    return parser


def check_folder(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse a ``--json FILE`` in a folder that is not there."""
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}")


def print_figures(figures: Mapping[str, float]) -> None:
    """One figure a line."""
    width = max((len(name) for name in figures), default=0)
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:.6g}")


def write_json(
    path: Path,
    *,
    machine: Mapping[str, Any],
    figures: Mapping[str, float],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Write what `--json FILE` asks for.

    Args:
        path: The file.
        machine: `machine()` as it was when the benchmark began.
        figures: Numbers by the names that the issues give them.
        rows: One for each line of the table, with everything measured.
    """
    report = {
        "machine": machine,
        "commit": commit(),
        "command": command(),
        "figures": figures,
        "rows": rows,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _first_value(path: Path, key: str) -> str | None:
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _git(*words: str) -> str:
    found = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() if found.returncode == 0 else ""
