"""`plait config`: what it prints, and the schema for editors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_configs import CONFIGS
from plait import read_config
from plait._cli import main
from plait._keys import ALIASES, KEYS, KEYS_BY_PATH, SECTIONS
from plait._optimizer_keys import OPTIMIZER_KEYS
from plait._schedulers import SCHEDULERS
from plait._schema import config_schema

TREE = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "zero_optimization": {"stage": 2, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(TREE))
    return str(file)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["config", *arguments]) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def test_the_resolved_configuration_and_the_fate_of_every_key_are_printed_in_columns(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, path, "--ranks", "2", "--set", "gradient_clipping=0.5")
    blocks = dict(zip(["head", *TITLES], text.split("\n\n")[1::2], strict=True))
    assert rows(blocks["head"])["train_micro_batch_size_per_gpu"] == "4"
    assert rows(blocks["head"])["gradient_clipping"] == "0.5"
    assert rows(blocks["honoured"])["zero_optimization.stage"] == "2"
    assert rows(blocks["honoured"])["gradient_clipping"] == "0.5"
    assert "DeepSpeed's default" in rows(blocks["derived"])["optimizer.params.weight_decay"]
    decided = rows(blocks["decided"])["zero_optimization.contiguous_gradients"]
    assert decided.split(maxsplit=1) == ["true", "gradients lie in one flat buffer"]
    assert rows(blocks["off"])["fp16.enabled"] == "false"
    for block in blocks.values():
        assert len({len(line) - len(line[2:].split(maxsplit=1)[1]) for line in lines(block)}) == 1


TITLES = ["honoured", "derived", "decided", "off"]


def lines(block: str) -> list[str]:
    return [line for line in block.splitlines() if line.startswith("  ")]


def rows(block: str) -> dict[str, str]:
    return {line.split()[0]: line.split(maxsplit=1)[1] for line in lines(block)}


def test_the_resolved_configuration_reads_back_to_the_same_one(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads(printed(capsys, path, "--ranks", "2", "--json"))["config"]
    again = tmp_path / "again.json"
    again.write_text(json.dumps(config))
    assert read_config(again) == read_config(path, num_ranks=2)


def test_as_json_every_key_has_its_value_its_fate_and_a_note(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = json.loads(printed(capsys, path, "--json"))["keys"]
    assert {"path": "fp16.enabled", "value": False, "became": "off", "note": ""} in keys
    assert {key["became"] for key in keys} == {"honoured", "derived", "decided by plait", "off"}


def test_for_initialize_absent_keys_mean_what_they_mean_in_deepspeed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--initialize", "--json", "--ranks", "2", "--set", "train_batch_size=8"]
    config = json.loads(printed(capsys, *arguments))["config"]
    assert config["zero_optimization"]["stage"] == 0
    assert "optimizer" not in config
    assert "run" not in config


def test_a_configuration_that_is_refused_says_everything_with_exit_code_2(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = printed(
        capsys, path, "--set", "fp16.enabled=true", "--set", "run.steps=0", code=2
    ).splitlines()
    assert said[0] == f"plait: 2 errors in the configuration ({path}):"
    assert [line.split(":")[0].strip() for line in said[1:]] == ["fp16.enabled", "run.steps"]
    assert "nonsense" in printed(capsys, "--initialize", "--set", "nonsense", code=2)


def test_schema_and_keys_are_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys, "--schema")) == json.loads(json.dumps(config_schema()))
    assert printed(capsys, "--keys").startswith("# DeepSpeed's keys")


SCHEMA: dict[str, Any] = json.loads(json.dumps(config_schema()))


def at(path: str) -> dict[str, Any]:
    node = SCHEMA
    for name in path.split("."):
        node = node["properties"][name]
    return node


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_every_key_is_in_the_schema_with_meaning_and_default(key: Any) -> None:
    schema = at(key.path)
    assert schema["description"]
    assert schema.get("default") == key.default
    assert schema.get("deprecated", False) == key.deprecated
    if key.default is not None:
        assert valid(schema, json.loads(json.dumps(key.default)))
    assert valid(schema, "auto") or not key.auto


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_other_names_are_in_the_schema(alias: str) -> None:
    assert at(alias)["description"] == f"another name of {ALIASES[alias]}"


def test_the_options_of_optimizers_and_schedules_are_in_the_schema() -> None:
    options = at("optimizer.params")["properties"]
    named = {key.path.rpartition(".")[2] for key in OPTIMIZER_KEYS}
    assert named | {"momentum", "nesterov", "amsgrad"} <= set(options)
    parameters = {name for known in SCHEDULERS.values() for name in known}
    assert set(at("scheduler.params")["properties"]) == parameters
    assert at("scheduler.type")["enum"] == list(SCHEDULERS)


def test_options_that_are_used_are_not_null_in_the_schema() -> None:
    for name in ("lr", "betas", "weight_decay"):
        assert not valid(at(f"optimizer.params.{name}"), None)
    assert valid(at("optimizer.params.lr"), 1)
    assert valid(at("scheduler.params.warmup_max_lr"), None)


def test_a_file_may_name_the_schema_for_its_editor(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"$schema": "plait.schema.json"}')
    assert read_config(path) == read_config()
    assert valid(SCHEMA, {"$schema": "plait.schema.json"})


def test_the_schema_has_nothing_that_the_table_has_not() -> None:
    def paths(node: dict[str, Any], prefix: str = "") -> set[str]:
        found = set()
        for name, inner in node.get("properties", {}).items():
            found |= {f"{prefix}{name}"} | paths(inner, f"{prefix}{name}.")
        return found

    known = set(KEYS_BY_PATH) | set(ALIASES) | SECTIONS
    typed = {path for path in paths(SCHEMA) if path.split(".")[0] in ("optimizer", "scheduler")}
    aliased = {path for path in paths(SCHEMA) if path.split(".")[0] == "bfloat16"}
    assert paths(SCHEMA) - typed - aliased <= known


@pytest.mark.parametrize("name", CONFIGS)
def test_the_schema_takes_whole_configurations_but_unknown_keys_and_names(name: str) -> None:
    tree, refused = CONFIGS[name]
    strange = {"optimizer.params.lr", "optimizer.params.weight_decay", "optimizer.type"}
    unknown = [path for path in refused if path not in KEYS_BY_PATH and path not in strange]
    unknown = [path for path in unknown if not path.startswith("scheduler.params.")]
    bad = bool(unknown) or "inf" in json.dumps(tree).lower()
    if "trainer" in name or "LAMB" in name:  # values that only a run can judge
        return
    assert valid(SCHEMA, tree) is not bad


def valid(schema: dict[str, Any], value: object) -> bool:
    """Whether a schema of the few keywords that are used here takes a value."""
    if "enum" in schema:
        return any(type(one) is type(value) and one == value for one in schema["enum"])
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    some = schema.get("anyOf")
    fits = not some or any(valid(one, value) for one in some)
    return fits and (not kinds or any(_is(kind, value) for kind in kinds)) and _in(schema, value)


def _in(schema: dict[str, Any], value: object) -> bool:
    """Whether bounds, items and properties take a value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (
            value >= schema.get("minimum", value)
            and value <= schema.get("maximum", value)
            and not value >= schema.get("exclusiveMaximum", float("inf"))
        )
    if isinstance(value, list):
        fits = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return fits and all(valid(schema.get("items", {}), item) for item in value)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        strange = schema.get("additionalProperties") is False and set(value) - set(known)
        return not strange and all(valid(known.get(name, {}), one) for name, one in value.items())
    return not isinstance(value, str) or len(value) >= schema.get("minLength", 0)


def _is(kind: str, value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "number": number,
        "integer": number and float(value).is_integer(),  # type: ignore[arg-type]  # a number
    }[kind]
