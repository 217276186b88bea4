"""The configuration as a JSON schema, which editors complete and check by."""

from __future__ import annotations

import json
from collections.abc import Mapping

from plait._key import Key, Use
from plait._keys import ALIASES, DEPRECATED, KEYS, KEYS_BY_PATH, PLAIT_SECTIONS, SECTIONS
from plait._kinds import Schema
from plait._optimizer_keys import OPTIMIZER_KEYS
from plait._optimizers import optimizer_options
from plait._schedulers import SCHEDULERS

__all__ = ["config_schema", "schema_text"]


def config_schema() -> Schema:
    """JSON schema, draft 2020-12, of every key: kind, default, meaning, what is deprecated.

    Example:
        >>> config_schema()["properties"]["bf16"]["properties"]["enabled"]["default"]
        False
    """
    root = _object()
    root = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Configuration of plait, in DeepSpeed's names",
        **root,
    }
    for key in KEYS:
        _put(root, key.path, _of_key(key))
    for alias, path in ALIASES.items():
        if path in KEYS_BY_PATH:
            _put(root, alias, _alias(_of_key(KEYS_BY_PATH[path]), alias, path))
    _properties(root)["optimizer"] = _optimizer(_properties(root).get("optimizer"))
    _properties(root)["scheduler"] = _scheduler()
    for alias, path in ALIASES.items():
        if path in SECTIONS:
            _properties(root)[alias] = _alias(dict(_property(root, path)), alias, path)
    return root


def _object() -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": {}}


def _properties(node: Mapping[str, object]) -> dict[str, object]:
    found = node["properties"]
    assert isinstance(found, dict)
    return found


def _property(node: Schema, name: str) -> Schema:
    found = _properties(node)[name]
    assert isinstance(found, dict)
    return found


def _put(root: Schema, path: str, schema: Schema) -> None:
    """Set the schema at a dotted path; the sections on the way are made."""
    *sections, name = path.split(".")
    node = root
    for section in sections:
        if section not in _properties(node):
            _properties(node)[section] = _object()
            if sections[0] not in (*PLAIT_SECTIONS, "optimizer"):
                _property(node, section)["type"] = ["object", "null"]
        node = _property(node, section)
    _properties(node)[name] = schema


def _of_key(key: Key) -> Schema:
    others: list[object] = []
    if key.auto:
        others.append("auto")
    if key.takes_null:
        others.append(None)
    schema = key.kind.schema()
    if others and schema:
        schema = {"anyOf": [schema, {"enum": others}]}
    return _described(schema, key)


def _described(schema: Schema, key: Key) -> Schema:
    """With meaning, default and whether it is deprecated."""
    schema = schema | {"description": _description(key)}
    if key.default is not None:
        schema["default"] = key.default
    return schema | ({"deprecated": True} if key.deprecated else {})


def _description(key: Key) -> str:
    """The meaning in one phrase, and what plait does with the key."""
    text = {
        Use.HONOURED: key.meaning,
        Use.DECIDED: f"decided by plait: {key.meaning}",
        Use.ASKS: f"{key.meaning}: not built yet; {key.instead}",
        Use.PART: f"{key.meaning}, which is not built yet",
    }[key.use]
    return text.replace("`", "")


def _alias(schema: Schema, alias: str, path: str) -> Schema:
    schema = schema | {"description": f"another name of {path}"}
    return schema | ({"deprecated": True} if alias in DEPRECATED else {})


def _typed(params: dict[str, object], types: Schema) -> Schema:
    """A section with a type and parameters."""
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {
            "type": types,
            "params": {
                "type": "object",
                "additionalProperties": False,
                "properties": params,
            },
        },
    }


def _optimizer(others: object) -> Schema:
    params: dict[str, object] = {
        name: _or_auto(kind.schema()) for name, kind in optimizer_options().items()
    }
    for key in OPTIMIZER_KEYS:
        schema = _described(key.kind.schema(), key) if key.use is Use.HONOURED else _of_key(key)
        params[key.path.rpartition(".")[2]] = schema
    for name in ("betas", "eps"):
        option = params[name]
        assert isinstance(option, dict)
        params[name] = _or_auto(option)
    described: Schema = {"type": "string", "description": "the name of an optimizer of torch.optim"}
    section = _typed(params, described)
    if isinstance(others, dict):
        _properties(section).update(_properties(others))
    return section


def _scheduler() -> Schema:
    params: dict[str, object] = {}
    for parameters in SCHEDULERS.values():
        for name, parameter in parameters.items():
            schema = parameter.kind.schema()
            if parameter.auto:
                schema = _or_auto(schema)
            if parameter.default is None and not parameter.required:
                schema = {"anyOf": [schema, {"type": "null"}]}
            default = {} if parameter.default is None else {"default": parameter.default}
            params[name] = schema | {"description": parameter.meaning.replace("`", "")} | default
    return _typed(params, {"enum": list(SCHEDULERS)})


def _or_auto(schema: Schema) -> Schema:
    kept = {name: schema.pop(name) for name in ("description", "default") if name in schema}
    return {"anyOf": [schema, {"enum": ["auto"]}]} | kept


def schema_text() -> str:
    """The schema as a file has it."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False)
