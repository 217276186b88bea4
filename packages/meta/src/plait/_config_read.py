"""Reads a configuration (file, ``--set``, ``--ranks``) and reports everything that is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from plait._batch import Given
from plait._config import Config, DataConfig, ModelConfig, RunConfig, TrainingConfig
from plait._config_values import Values
from plait._devices import default_num_ranks
from plait._fates import Fate
from plait._json import JsonObject, parse_json, read_json
from plait._overrides import Origins, apply_override
from plait._problems import ConfigError, Problem, ProblemList
from plait._training_read import TrainingReader

__all__ = ["read_config", "read_config_and_fates", "read_training_config"]


def read_config(
    path: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    num_ranks: int | None = None,
    world_size: int | None = None,
) -> Config:
    """Read and check a configuration of `plait train`; without a file, the default one.

    Args:
        path: A JSON file; absent keys have their defaults.
        overrides: ``"a.b=value"``, applied in order on top of the file.
        num_ranks: Overrides ``run.ranks`` (the ``--ranks`` of the command line).
        world_size: Ranks that already run under a launcher; ``run.ranks`` must agree where given.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: Everything that is wrong, with the path of each.

    Example:
        >>> config = read_config(overrides=["train_batch_size=64"], num_ranks=4)
        >>> config.training.batch.micro_batch_size
        16
    """
    return read_config_and_fates(
        path, overrides=overrides, num_ranks=num_ranks, world_size=world_size
    )[0]


def read_config_and_fates(
    path: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    num_ranks: int | None = None,
    world_size: int | None = None,
) -> tuple[Config, tuple[Fate, ...]]:
    """As `read_config`, and what became of every key."""
    source = "the defaults" if path is None else str(path)
    tree = JsonObject() if path is None else read_json(Path(path))
    origins = Origins()
    problems = ProblemList(origins.of)
    for override in overrides:
        apply_override(tree, origins, override, problems)
    if num_ranks is not None:
        apply_override(tree, origins, f"run.ranks={num_ranks}", problems)
        origins.record("run.ranks", "--ranks")
    values = Values(tree, problems)
    ranks = _ranks(values, problems, origins, source, world_size)
    reader = TrainingReader(
        values, problems, origins, source, is_command=True, num_steps=values.int("run.steps")
    )
    training = reader.training(None if "run.ranks" in values.unfit else ranks)
    seed = _seed(values, problems)
    _check_heads(values, problems)
    if training is None or problems.found:
        raise ConfigError(problems.found, source)
    run = values.section("run") | {"ranks": ranks.value, "seed": seed}
    config = Config(
        model=ModelConfig(**values.section("model")),  # type: ignore[arg-type]  # see PLAIT_KEYS
        data=DataConfig(**values.section("data")),  # type: ignore[arg-type]  # see PLAIT_KEYS
        run=RunConfig(**run),  # type: ignore[arg-type]  # kinds checked by PLAIT_KEYS
        training=training,
    )
    return config, reader.fates(training)


def read_training_config(
    source: str | Path | Mapping[str, object],
    *,
    num_ranks: int,
    optimizer_given: bool = False,
    scheduler_given: bool = False,
) -> tuple[TrainingConfig, tuple[Fate, ...]]:
    """Read and check what DeepSpeed's JSON says of a training, for `plait.initialize`.

    The sections `model`, `data` and `run` are checked too, and are those of `plait train`.

    Args:
        source: A JSON file, or what stands in one.
        num_ranks: Ranks that share the batch.
        optimizer_given: The caller passes an optimizer; it wins over the file's.
        scheduler_given: The caller passes a schedule; it wins over the file's.

    Returns:
        The checked configuration, and what became of every key.

    Raises:
        ConfigError: Everything that is wrong, with the path of each.

    Example:
        >>> config, fates = read_training_config({"train_batch_size": 64}, num_ranks=4)
        >>> config.batch.micro_batch_size, config.stage
        (16, 0)
    """
    tree, name = _tree(source)
    origins = Origins()
    problems = ProblemList(origins.of)
    values = Values(tree, problems)
    reader = TrainingReader(values, problems, origins, name, is_command=False)
    training = reader.training(
        Given(num_ranks, "the process group"),
        optimizer_given=optimizer_given,
        scheduler_given=scheduler_given,
    )
    _check_heads(values, problems)
    if training is None or problems.found:
        raise ConfigError(problems.found, name)
    return training, reader.fates(training)


def _tree(source: str | Path | Mapping[str, object]) -> tuple[JsonObject, str]:
    """The configuration as a tree, and what to call it in errors."""
    if not isinstance(source, Mapping):
        return read_json(Path(source)), str(source)
    name = "the config passed in"
    try:
        text = json.dumps(source, default=_plain)
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem(path="", reason=f"not JSON: {error}")], name) from None
    tree = parse_json(text, source=name)
    assert isinstance(tree, JsonObject)  # a mapping is an object
    return tree, name


def _plain(value: object) -> dict[object, object]:
    """A mapping as a dict, for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds {value!r}, of type {type(value).__name__}")


def _ranks(
    values: Values, problems: ProblemList, origins: Origins, source: str, world_size: int | None
) -> Given:
    """How many ranks train, and who says so."""
    ranks = values.given("run.ranks")
    if world_size is None:
        if isinstance(ranks, int):
            return Given(ranks, origins.of("run.ranks") or source)
        return Given(default_num_ranks(str(values.get("run.device"))), "default")
    if isinstance(ranks, int) and ranks != world_size:
        expected = f"{world_size}, the number of ranks the launcher started (WORLD_SIZE)"
        hint = "leave it out under a launcher"
        problems.add("run.ranks", expected=expected, got=ranks, hint=hint)
    return Given(world_size, "WORLD_SIZE")


def _seed(values: Values, problems: ProblemList) -> object:
    """`run.seed`, or `seed`, which is its name in DeepSpeed's JSON."""
    ours, theirs = values.given("run.seed"), values.given("seed")
    if ours is not None and theirs is not None and ours != theirs:
        problems.add("seed", expected=f"{ours}, as run.seed has it", got=theirs, hint="keep one")
    return values.get("run.seed") if theirs is None else theirs


def _check_heads(values: Values, problems: ProblemList) -> None:
    width, heads = "model.hidden_size", "model.num_heads"
    if not values.unfit.intersection([width, heads]) and values.int(width) % values.int(heads):
        expected = f"a multiple of {heads}, {values.int(heads)}"
        problems.add(width, expected=expected, got=values.int(width))
