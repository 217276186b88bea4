"""The `plait` command."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import plait

__all__ = ["main"]

_TRAIN_EPILOG = """\
examples:
  plait train                                  a small GPT on text that ships with Python
  plait train my.json --ranks 4                your configuration, on four ranks
  plait train --set data.path=book.txt --set run.steps=500
  plait train --resume                         go on with the newest run here
  plait train --resume plait-run-3 --ranks 1   go on with that one, on another number of ranks
  torchrun --nproc-per-node 2 -m plait train   the same under torchrun

Keys are those of the guide (docs/plait.md); every error in a configuration is listed at once.
Exit codes: 0 done, 1 the run failed, 2 refused before it began, 130 stopped by Ctrl-C.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="plait",
        description="Train models that do not fit, with the numbers of plain data parallelism.",
    )
    parser.add_argument("--version", action="version", version=f"plait {plait.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    train = commands.add_parser(
        "train",
        help="train a language model on several ranks",
        description="Train a byte-level language model, sharded over the ranks it starts "
        "(or finds, under torchrun).",
        epilog=_TRAIN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_configuration(train)
    train.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="continue from a run folder's newest checkpoint (default: the newest run here), "
        "or from a checkpoint folder",
    )
    doctor = commands.add_parser(
        "doctor",
        help="say what of plait works on this machine",
        description="Look at devices, collectives, memory, disk and libraries, let two ranks meet, "
        "and say what of plait works here, with the remedy for what does not.",
        epilog="Exit codes: 0 nothing fails, 1 something does.",
    )
    doctor.add_argument("--json", action="store_true", help="print findings and facts as JSON")
    _add_config_command(commands)
    return parser


def _add_configuration(command: argparse.ArgumentParser) -> None:
    """The arguments that make a configuration."""
    command.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG.json",
        help="configuration; every key has a default",
    )
    command.add_argument(
        "--ranks",
        type=_positive,
        metavar="N",
        help="processes to train on (default: one per GPU, or 2 on CPUs)",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="KEY=VALUE",
        help="change a key of the configuration, such as run.steps=100; may come several times",
    )


def _add_config_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    config = commands.add_parser(
        "config",
        help="print a configuration as plait understands it",
        description="Print the configuration as it is understood, and what became of every key.",
        epilog="Exit codes: 0 done, 2 the configuration is refused (every error is listed).",
    )
    _add_configuration(config)
    config.add_argument(
        "--initialize",
        action="store_true",
        help="read it as plait.initialize does: what is absent means what it means in DeepSpeed",
    )
    config.add_argument("--json", action="store_true", help="print one JSON object")
    instead = config.add_mutually_exclusive_group()
    instead.add_argument(
        "--schema", action="store_true", help="print the JSON schema for editors instead"
    )
    instead.add_argument(
        "--keys", action="store_true", help="print the table of DeepSpeed's keys instead"
    )


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Args:
        arguments: Without the program's name; None takes those of the process.
    """
    given = _parser().parse_args(arguments)
    if given.command != "train":
        return _printed(given)
    try:
        from plait._run_command import run_train  # noqa: PLC0415  # --help need not wait for it

        return run_train(
            given.config, overrides=given.overrides, num_ranks=given.ranks, resume=given.resume
        )
    except KeyboardInterrupt:
        print("plait: stopped by Ctrl-C before the training began", file=sys.stderr)
        return 128 + signal.SIGINT


def _printed(given: argparse.Namespace) -> int:
    """Run a command that only prints; a reader that has seen enough (``| head``) ends it."""
    try:
        code = _doctor(given) if given.command == "doctor" else _config(given)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # flushed once more at exit
        return 128 + signal.SIGPIPE
    return code


def _doctor(given: argparse.Namespace) -> int:
    from plait._doctor_command import run_doctor  # noqa: PLC0415  # --help need not wait for it

    return run_doctor(as_json=given.json)


def _config(given: argparse.Namespace) -> int:
    from plait import _config_command  # noqa: PLC0415  # --help need not wait for it

    if given.schema:
        return _config_command.print_schema()
    if given.keys:
        return _config_command.print_keys()
    return _config_command.run_config(
        given.config,
        overrides=given.overrides,
        num_ranks=given.ranks,
        as_json=given.json,
        for_initialize=given.initialize,
    )
