"""The configuration: defaults, overrides, and every error with its path, at once."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait import Config, ConfigError, read_config
from plait._deepspeed_keys import NOT_BUILT
from plait._keys import KEYS
from plait._problems import nearest_key
from strategies import json_values


def written(folder: Path, tree: object) -> Path:
    path = folder / "ds.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return path


def problems_in(path: Path | None = None, *overrides: str, **options: int) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_config(path, overrides=overrides, **options)
    return [str(problem) for problem in caught.value.problems]


def test_without_a_file_every_key_has_its_default() -> None:
    config = read_config()
    assert (config.stage, config.bf16, config.gradient_clipping) == (3, False, 1.0)
    assert config.run.ranks >= 1
    assert config.batch.train_batch_size == 24
    assert config.optimizer.type == "AdamW"
    assert config.scheduler is not None
    assert config.scheduler.type == "WarmupCosineLR"


def test_an_empty_object_means_the_same_as_no_file(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, {})) == read_config()


def test_the_configuration_reads_back_from_its_json_on_other_ranks(tmp_path: Path) -> None:
    config = read_config(
        written(
            tmp_path,
            {
                "model": {"num_layers": 2, "tie_embeddings": False},
                "optimizer": {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}},
                "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 7}},
                "train_micro_batch_size_per_gpu": 6,
                "gradient_accumulation_steps": 2,
                "zero_optimization": {"stage": 1},
                "bf16": {"enabled": True},
                "run": {"ranks": 4, "folder": "there", "seed": 3},
            },
        )
    )
    again = read_config(written(tmp_path, config.as_json()), num_ranks=2)
    assert again.batch.train_batch_size == config.batch.train_batch_size == 48
    assert again.batch.micro_batch_size == 12
    assert again.run.folder is None
    assert again.as_json() | {"run": None} == config.as_json() | {"run": None}
    assert pickle.loads(pickle.dumps(again)) == again


def test_an_override_changes_one_key_and_ranks_win_over_it(tmp_path: Path) -> None:
    path = written(tmp_path, {"run": {"steps": 5, "seed": 1}})
    config = read_config(path, overrides=["run.steps=9", "run.ranks=3"], num_ranks=4)
    assert (config.run.steps, config.run.seed, config.run.ranks) == (9, 1, 4)


def test_text_keys_take_what_was_typed_and_others_json() -> None:
    config = read_config(overrides=["data.path=123", "run.folder=a=b", 'bf16={"enabled": true}'])
    assert (config.data.path, config.run.folder, config.bf16) == ("123", "a=b", True)


def test_a_section_without_a_type_refines_the_recipe_and_one_with_a_type_stands_alone() -> None:
    refined = read_config(overrides=["optimizer.params.lr=0.5"]).optimizer
    assert refined.params == {"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.1}
    alone = read_config(overrides=["optimizer.type=SGD", "optimizer.params.momentum=0.9"]).optimizer
    assert alone.params == {"lr": 0.001, "momentum": 0.9}
    assert read_config(overrides=["scheduler=null"]).scheduler is None
    scheduler = read_config(overrides=["scheduler.type=WarmupLR"]).scheduler
    assert scheduler is not None
    assert scheduler.params["warmup_num_steps"] == 1000


def test_numbers_may_be_written_with_an_exponent(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, '{"run": {"steps": 1e3}, "gradient_clipping": 1}'))
    assert config.run.steps == 1000
    assert isinstance(config.run.steps, int)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=-5", "run.steps: expected a whole number of at least 1, got -5 (--set)"),
        ("run.steps=0", "run.steps: expected a whole number of at least 1, got 0 (--set)"),
        ("run.steps=2.5", "run.steps: expected a whole number of at least 1, got 2.5 (--set)"),
        ("run.steps=true", "run.steps: expected a whole number of at least 1, got true (--set)"),
        ("run.steps=ten", 'run.steps: expected a whole number of at least 1, got "ten" (--set)'),
        ("run.steps=null", "run.steps: expected a whole number of at least 1, got null (--set)"),
        (
            f"run.seed={2**63}",
            (
                "run.seed: expected a whole number of at least 0 and below 9223372036854775808, "
                "got 9223372036854775808 (--set)"
            ),
        ),
        ("run.folder= ", 'run.folder: expected text that is not empty, got " " (--set)'),
        ("bf16.enabled=1", "bf16.enabled: expected true or false, got 1 (--set)"),
        ("bf16=true", "bf16: expected an object { ... }, got true (--set)"),
        (
            "zero_optimization.stage=4",
            "zero_optimization.stage: expected 0, 1, 2 or 3, got 4 (--set)",
        ),
        (
            "zero_optimization.stage=true",
            "zero_optimization.stage: expected 0, 1, 2 or 3, got true (--set)",
        ),
        ("run.device=gpu", 'run.device: expected "auto" or "cpu", got "gpu" (--set)'),
        (
            "gradient_clipping=NaN",
            "gradient_clipping: expected a number of at least 0, got NaN (--set)",
        ),
        (
            "gradient_clipping=-1",
            "gradient_clipping: expected a number of at least 0, got -1 (--set)",
        ),
        (
            "gradient_clipping=1e999",
            "gradient_clipping: expected a number of at least 0, got Infinity (--set)",
        ),
        (
            "train_batch_size=auto",
            (
                'train_batch_size: expected a whole number of at least 1, got "auto" (--set); '
                '"auto" is not built yet: write the value or leave it out'
            ),
        ),
        ("run.stepz=5", "run.stepz: unknown key, got 5 (--set); did you mean run.steps?"),
        ("lr=3", "lr: unknown key, got 3 (--set); did you mean optimizer.params.lr?"),
        (
            "fp16.enabled=true",
            (
                "fp16: a DeepSpeed key that plait has not built yet, got "
                '{"enabled": true} (--set); remove it'
            ),
        ),
        (
            "zero_optimization.offload_optimzer=1",
            (
                "zero_optimization.offload_optimzer: unknown key, got 1 (--set); "
                "did you mean zero_optimization.offload_optimizer? (not built yet)"
            ),
        ),
        ("data.xyzzy=1", "data.xyzzy: unknown key, got 1 (--set); known here: data.path"),
        (
            "optimizer=SGD",
            'optimizer: expected an object { "type": ..., "params": { ... } }, got "SGD" (--set)',
        ),
        ("optimizer.type=3", "optimizer.type: expected a name in quotes, got 3 (--set)"),
        ("optimizer.params=3", "optimizer.params: expected an object { ... }, got 3 (--set)"),
        (
            "optimizer.type=Adan",
            (
                "optimizer.type: expected the name of an optimizer of torch.optim, such as AdamW, "
                'Adam or SGD, got "Adan" (--set); did you mean Adam?'
            ),
        ),
        (
            "optimizer.type=Lamb",
            (
                'optimizer.type: this optimizer is not built yet, got "Lamb" (--set); '
                "use AdamW, Adam, SGD or another elementwise optimizer of torch.optim"
            ),
        ),
        (
            "optimizer.params.lr=fast",
            'optimizer.params.lr: expected a number of at least 0, got "fast" (--set)',
        ),
        (
            "optimizer.params.betas=[0,9,0,999]",
            (
                "optimizer.params.betas: expected a list of 2 numbers, each a number of at least 0 "
                "and below 1, got [0, 9, 0, 999] (--set); "
                'write a decimal number with a point ("0.9")'
            ),
        ),
        (
            "optimizer.params.weigth_decay=0.1",
            (
                "optimizer.params.weigth_decay: unknown option of this optimizer, got 0.1 (--set); "
                "did you mean optimizer.params.weight_decay?"
            ),
        ),
        (
            "optimizer.params.torch_adam=true",
            "optimizer.params.torch_adam: not built yet, got true (--set); remove it",
        ),
        (
            "scheduler.type=OneCycle",
            (
                "scheduler.type: this schedule is not built yet, expected WarmupLR or "
                'WarmupDecayLR or WarmupCosineLR, got "OneCycle" (--set)'
            ),
        ),
        (
            "scheduler.type=WarmUpLR",
            (
                "scheduler.type: expected WarmupLR or WarmupDecayLR or WarmupCosineLR, "
                'got "WarmUpLR" (--set); did you mean WarmupLR?'
            ),
        ),
        (
            "scheduler.params.warmup_steps=3",
            (
                "scheduler.params.warmup_steps: unknown parameter of WarmupCosineLR, got 3 "
                "(--set); did you mean scheduler.params.warmup_num_steps?"
            ),
        ),
        (
            "scheduler.params.warmup_type=cubic",
            'scheduler.params.warmup_type: expected "log" or "linear", got "cubic" (--set)',
        ),
        (
            "model.hidden_size=30",
            "model.hidden_size: expected a multiple of model.num_heads, 4, got 30 (--set)",
        ),
        (
            "nonsense",
            '--set: expected KEY=VALUE with a dotted key, such as run.steps=100, got "nonsense"',
        ),
        (".a=1", '--set: expected KEY=VALUE with a dotted key, such as run.steps=100, got ".a=1"'),
    ],
)
def test_a_wrong_value_is_said_with_path_expected_got_origin_and_remedy(
    override: str, message: str
) -> None:
    assert problems_in(None, override) == [message]


def test_options_the_optimizer_class_itself_refuses_are_said(tmp_path: Path) -> None:
    path = written(tmp_path, {"optimizer": {"type": "sgd", "params": {"nesterov": True}}})
    assert problems_in(path) == [
        (
            "optimizer.params: SGD refuses these options: Nesterov momentum requires a momentum "
            'and zero dampening, got {"lr": 0.001, "nesterov": true}'
        )
    ]


def test_all_errors_come_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "run": {"steps": -1, "ranks": True},
            "bf16": {"enabled": "yes"},
            "optimizer": {"type": "Adan", "extra": 1, "params": {"lr": -1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
            "amp": {},
            "train_batch_size": 10,
        },
    )
    found = problems_in(path, "gradient_accumulation_steps=0")
    assert [line.partition(":")[0] for line in found] == [
        "run.steps",
        "run.ranks",
        "bf16.enabled",
        "optimizer.extra",
        "amp",
        "gradient_accumulation_steps",
        "optimizer.type",
        "optimizer.params.lr",
        "scheduler.params.warmup_num_steps",
    ]


def test_batch_sizes_that_contradict_name_the_numbers_and_where_each_came_from(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8})
    assert problems_in(path, "gradient_accumulation_steps=2", num_ranks=2) == [
        (
            f"train_batch_size: train_batch_size 64 ({path}) is not "
            f"train_micro_batch_size_per_gpu 8 ({path}) x gradient_accumulation_steps 2 (--set) x "
            "2 ranks (--ranks) = 32; leave one of them out"
        )
    ]


def test_a_launcher_with_another_number_of_ranks_is_said() -> None:
    assert read_config(world_size=3).run.ranks == 3
    assert problems_in(None, "run.ranks=2", world_size=3)[0] == (
        "run.ranks: expected 3, the number of ranks the launcher started (WORLD_SIZE), "
        "got 2 (--set); leave it out under a launcher"
    )


def test_a_key_that_came_twice_is_said_with_its_path(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '{"run": {"steps": 3, "steps": 4}, "optimizer": {"params": {"lr": 1, "lr": 2}}, "run": {}}',
    )
    twice = "this key came more than once; keep one of them"
    assert problems_in(path) == [f"run: {twice}", f"optimizer.params.lr: {twice}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"a": 1,\n\t"weight_decay": 0,01}',
            (
                "line 2, column 20: not JSON: Expecting property name enclosed in double quotes\n"
                '     "weight_decay": 0,01}\n'
                "                       ^"
            ),
        ),
        ("{'a': 1}", "line 1, column 2: not JSON: Expecting property name"),
        ('{"a": 1', "line 1, column 8: not JSON: Expecting ',' delimiter"),
        ("", "expected a JSON object, got nothing"),
        ("[1]", "expected a JSON object { ... }, got a list"),
        ("3", "expected a JSON object { ... }, got the value 3"),
        ("[" * 100_000, "not a configuration: nested too deeply"),
        ('{"run": {"steps": ' + "9" * 5000 + "}}", "not JSON that can be read: "),
    ],
)
def test_a_broken_file_is_said_with_line_column_and_the_line(
    tmp_path: Path, text: str, message: str
) -> None:
    found = problems_in(written(tmp_path, text))
    assert len(found) == 1
    assert found[0].startswith(message)


def test_a_long_broken_line_is_cut_around_the_error(tmp_path: Path) -> None:
    text = '{"a": [' + "1, " * 500 + "oops]}"
    lines = problems_in(written(tmp_path, text))[0].splitlines()
    assert len(lines[1]) < 120
    assert lines[1][lines[2].index("^")] == "o"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "nope.json")
    assert str(caught.value) == (
        f"1 error in the configuration ({tmp_path / 'nope.json'}):\n"
        "  cannot be read: No such file or directory"
    )
    assert problems_in(tmp_path) == ["expected a JSON file, got a folder"]
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xe9"}')
    assert problems_in(tmp_path / "latin.json") == ["not text in UTF-8: byte 7 is 0xe9"]


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_bytes(b'\xef\xbb\xbf{"run": {"steps": 3}}')
    assert read_config(tmp_path / "ds.json").run.steps == 3


@pytest.mark.parametrize("path", sorted(NOT_BUILT))
def test_every_deepspeed_key_that_is_not_built_is_refused_by_name(path: str) -> None:
    found = problems_in(None, f"{path}=null")
    assert len(found) == 1
    assert found[0].startswith(f"{path}: ")
    assert "not built yet" in found[0]


def test_the_same_names_elsewhere_and_misspellings_find_the_nearest_key() -> None:
    known = [key.path for key in KEYS]
    assert nearest_key("train_batchsize", known) == "train_batch_size"
    assert nearest_key("run.TrainBatchSize", known) == "train_batch_size"
    assert nearest_key("stage", known) == "zero_optimization.stage"
    assert nearest_key("qqqq", known) is None


@given(path=st.sampled_from([key.path for key in KEYS]), value=json_values())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_value_is_either_taken_or_refused_with_its_path(
    tmp_path: Path, path: str, value: object
) -> None:
    section, _, name = path.rpartition(".")
    tree = {section: {name: value}} if section else {name: value}
    try:
        config = read_config(written(tmp_path, tree))
    except ConfigError as error:
        refused = {problem.path for problem in error.problems}
    else:
        assert isinstance(config, Config)
        return
    batch = {"run.ranks", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    allowed = {path, *(["train_batch_size"] if path in batch else [])}
    allowed |= {"model.hidden_size"} if path == "model.num_heads" else set()
    assert refused
    assert refused <= allowed


def test_a_configuration_error_travels_between_processes() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(overrides=["run.steps=0"])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
