"""``optimizer`` and ``scheduler``: objects with a ``type`` and ``params``."""

from __future__ import annotations

from dataclasses import dataclass

from plait._json import JsonObject
from plait._keys import KEYS_BY_PATH, unknown_key
from plait._overrides import Origins
from plait._plait_keys import OPTIMIZER_RECIPE, SCHEDULER_RECIPE
from plait._problems import ProblemList

__all__ = ["TYPED_SECTIONS", "TypedSection", "complete_section", "read_typed_section"]

TYPED_SECTIONS = {"optimizer": OPTIMIZER_RECIPE, "scheduler": SCHEDULER_RECIPE}


@dataclass(frozen=True, slots=True)
class TypedSection:
    """A type and its parameters; a type that is None was not given."""

    type: str | None
    params: dict[str, object]


def read_typed_section(path: str, value: object, problems: ProblemList) -> TypedSection | None:
    """The section as it was written; None, and a problem, where its form is wrong."""
    if not isinstance(value, JsonObject):
        problems.add(path, expected='an object { "type": ..., "params": { ... } }', got=value)
        return None
    problems.add_duplicates(path, value.duplicates)
    name, params = value.get("type"), value.get("params", JsonObject())
    if not isinstance(name, str) and "type" in value:
        problems.add(f"{path}.type", expected="a name in quotes", got=name)
    if isinstance(params, JsonObject):
        problems.add_duplicates(f"{path}.params", params.duplicates)
    else:
        problems.add(f"{path}.params", expected="an object { ... }", got=params)
    for key, inner in value.items():
        if key not in ("type", "params") and f"{path}.{key}" not in KEYS_BY_PATH:
            reason, hint = unknown_key(f"{path}.{key}")
            problems.add(f"{path}.{key}", reason=reason, got=inner, hint=hint)
    if not isinstance(params, JsonObject) or ("type" in value and not isinstance(name, str)):
        return None
    return TypedSection(name if isinstance(name, str) else None, params)


def complete_section(
    path: str, section: TypedSection, origins: Origins
) -> tuple[str, dict[str, object], dict[str, str]]:
    """Type, parameters and where each came from; the recipe fills in where no type is given."""
    came_from = {key: origins.of(f"{path}.params.{key}") for key in section.params}
    came_from["type"] = origins.of(f"{path}.type")
    if section.type is not None:
        return section.type, section.params, came_from
    recipe = TYPED_SECTIONS[path]
    came_from |= {key: "default" for key in recipe.params if key not in section.params}
    own = {
        key: value
        for key, value in section.params.items()
        if value != "auto" or key not in recipe.params
    }
    return recipe.type, recipe.params | own, came_from
