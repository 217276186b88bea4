"""Reads a configuration (file, ``--set``, ``--ranks``) and reports everything that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from plait._batch import BatchSizes, BatchSizesError, Given, plan_batch_sizes
from plait._config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SchedulerConfig,
)
from plait._devices import default_num_ranks
from plait._json import JsonObject, read_json
from plait._keys import KEYS, SECTIONS, Key, unknown_key
from plait._kinds import UnfitValueError
from plait._optimizers import check_optimizer
from plait._overrides import Origins, apply_override
from plait._problems import ConfigError, ProblemList
from plait._schedulers import check_scheduler
from plait._typed_sections import (
    TYPED_SECTIONS,
    TypedSection,
    complete_section,
    read_typed_section,
)

__all__ = ["read_config"]

_BY_PATH = {key.path: key for key in KEYS}
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read_config(
    path: str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    num_ranks: int | None = None,
    world_size: int | None = None,
) -> Config:
    """Read and check a configuration; without a file, the default one.

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
        >>> config.batch.micro_batch_size
        16
    """
    source = "the defaults" if path is None else str(path)
    tree = JsonObject() if path is None else read_json(Path(path))
    origins = Origins()
    problems = ProblemList(origins.of)
    for override in overrides:
        apply_override(tree, origins, override, problems)
    if num_ranks is not None:
        apply_override(tree, origins, f"run.ranks={num_ranks}", problems)
        origins.record("run.ranks", "--ranks")
    config = _Reading(tree, origins, problems, source).config(world_size)
    if config is None or problems.found:
        raise ConfigError(problems.found, source)
    return config


class _Reading:
    """One pass over a configuration tree: values by path, problems on the side."""

    def __init__(
        self, tree: JsonObject, origins: Origins, problems: ProblemList, source: str
    ) -> None:
        self.origins = origins
        self.problems = problems
        self.source = source
        self.values: dict[str, object] = {}
        self.unfit: set[str] = set()
        self.typed: dict[str, TypedSection | None] = {
            name: TypedSection(None, {}) for name in TYPED_SECTIONS
        }
        self._read_object(tree, "")

    def config(self, world_size: int | None) -> Config | None:
        """The configuration; None where something it needs is wrong."""
        ranks = self._ranks(world_size)
        batch = self._batch(ranks)
        optimizer = self._optimizer()
        scheduler = self._scheduler()
        self._check_heads()
        if self.problems.found or optimizer is None or batch is None:
            return None
        run = self._section("run") | {"ranks": ranks.value}
        return Config(
            model=ModelConfig(**self._section("model")),  # type: ignore[arg-type]  # see KEYS
            data=DataConfig(**self._section("data")),  # type: ignore[arg-type]  # see KEYS
            run=RunConfig(**run),  # type: ignore[arg-type]  # kinds checked by KEYS
            optimizer=optimizer,
            scheduler=scheduler,
            stage=self._int("zero_optimization.stage"),
            bf16=bool(self._get("bf16.enabled")),
            gradient_clipping=float(str(self._get("gradient_clipping"))),
            batch=batch,
        )

    def _read_object(self, tree: JsonObject, prefix: str) -> None:
        self.problems.add_duplicates(prefix.rstrip("."), tree.duplicates)
        for name, value in tree.items():
            path = prefix + name
            if path == "scheduler" and value is None:
                self.typed[path] = None
            elif path in TYPED_SECTIONS:
                self.typed[path] = read_typed_section(path, value, self.problems)
            elif path in SECTIONS and isinstance(value, JsonObject):
                self._read_object(value, f"{path}.")
            elif path in SECTIONS:
                self.problems.add(path, expected="an object { ... }", got=value)
            elif path in _BY_PATH:
                self._read_value(_BY_PATH[path], value)
            else:
                reason, hint = unknown_key(path)
                self.problems.add(path, reason=reason, got=value, hint=hint)

    def _read_value(self, key: Key, value: object) -> None:
        if value is None and key.default is None:
            return
        try:
            self.values[key.path] = key.kind.read(value)
        except UnfitValueError:
            self.unfit.add(key.path)
            auto = '"auto" is not built yet: write the value or leave it out'
            hint = auto if value == "auto" else ""
            self.problems.add(key.path, expected=key.kind.expected, got=value, hint=hint)

    def _optimizer(self) -> OptimizerConfig | None:
        section = self.typed["optimizer"]
        if section is None:
            return None
        name, params, came_from = complete_section("optimizer", section, self.origins)
        options, problems = check_optimizer(name, params, came_from)
        self.problems.found += problems
        return OptimizerConfig(type=name, params=options)

    def _scheduler(self) -> SchedulerConfig | None:
        section = self.typed["scheduler"]
        if section is None:
            return None
        name, params, came_from = complete_section("scheduler", section, self.origins)
        checked, problems = check_scheduler(name, params, came_from)
        self.problems.found += problems
        return SchedulerConfig(type=name, params=checked)

    def _ranks(self, world_size: int | None) -> Given:
        ranks = self._given("run.ranks")
        if world_size is None:
            default = default_num_ranks(str(self._get("run.device")))
            return ranks or Given(default, "default")
        if ranks and ranks.value != world_size:
            expected = f"{world_size}, the number of ranks the launcher started (WORLD_SIZE)"
            hint = "leave it out under a launcher"
            self.problems.add("run.ranks", expected=expected, got=ranks.value, hint=hint)
        return Given(world_size, "WORLD_SIZE")

    def _batch(self, ranks: Given) -> BatchSizes | None:
        if self.unfit.intersection([*_BATCH_KEYS, "run.ranks"]):
            return None
        train, micro, accumulation = (self._given(name) for name in _BATCH_KEYS)
        try:
            return plan_batch_sizes(
                ranks=ranks, train=train, micro=micro, accumulation=accumulation
            )
        except BatchSizesError as error:
            self.problems.add("train_batch_size", reason=str(error))
            return None

    def _check_heads(self) -> None:
        width, heads = "model.hidden_size", "model.num_heads"
        if not self.unfit.intersection([width, heads]) and self._int(width) % self._int(heads):
            expected = f"a multiple of {heads}, {self._int(heads)}"
            self.problems.add(width, expected=expected, got=self._int(width))

    def _given(self, path: str) -> Given | None:
        value = self.values.get(path)
        if not isinstance(value, int):
            return None
        return Given(value, self.origins.of(path) or self.source)

    def _get(self, path: str) -> object:
        return self.values.get(path, _BY_PATH[path].default)

    def _int(self, path: str) -> int:
        value = self._get(path)
        assert isinstance(value, int)  # an Integer by KEYS
        return value

    def _section(self, name: str) -> dict[str, object]:
        under = f"{name}."
        paths = [path for path in _BY_PATH if path.startswith(under)]
        return {path.removeprefix(under): self._get(path) for path in paths}
