"""The configuration: defaults, overrides, and every error with its path, at once."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait import Config, ConfigError, read_config
from plait._config import SchedulerConfig
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
    training = config.training
    assert (training.stage, training.bf16, training.gradient_clipping) == (3, False, 1.0)
    assert config.run.ranks >= 1
    assert training.batch.train_batch_size == 24
    assert training.optimizer is not None
    assert training.optimizer.type == "AdamW"
    assert training.scheduler is not None
    assert training.scheduler.type == "WarmupCosineLR"


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
    assert again.training.batch.train_batch_size == config.training.batch.train_batch_size == 48
    assert again.training.batch.micro_batch_size == 12
    assert again.run.folder is None
    assert again.as_json() | {"run": None} == config.as_json() | {"run": None}
    assert pickle.loads(pickle.dumps(again)) == again


def test_an_override_changes_one_key_and_ranks_win_over_it(tmp_path: Path) -> None:
    path = written(tmp_path, {"run": {"steps": 5, "seed": 1}})
    config = read_config(path, overrides=["run.steps=9", "run.ranks=3"], num_ranks=4)
    assert (config.run.steps, config.run.seed, config.run.ranks) == (9, 1, 4)


def test_text_keys_take_what_was_typed_and_others_json() -> None:
    config = read_config(overrides=["data.path=123", "run.folder=a=b", 'bf16={"enabled": true}'])
    assert (config.data.path, config.run.folder) == ("123", "a=b")
    assert config.training.bf16


def params_of(*overrides: str) -> dict[str, object]:
    optimizer = read_config(overrides=overrides).training.optimizer
    assert optimizer is not None
    return optimizer.params


def test_an_optimizer_without_a_type_refines_the_recipe_and_one_with_a_type_stands_alone() -> None:
    refined = params_of("optimizer.params.lr=0.5")
    assert refined == {"lr": 0.5, "betas": (0.9, 0.99), "weight_decay": 0.1}
    alone = params_of("optimizer.type=SGD", "optimizer.params.momentum=0.9")
    assert alone == {"lr": 0.001, "momentum": 0.9}


@pytest.mark.parametrize("name", ["Adam", "AdamW", "adamw"])
def test_adam_has_no_weight_decay_of_its_own_as_in_deepspeed(name: str) -> None:
    assert params_of(f"optimizer.type={name}") == {"lr": 0.001, "weight_decay": 0.0}
    torch_s_own = params_of(f"optimizer.type={name}", "optimizer.params.torch_adam=true")
    assert torch_s_own == {"lr": 0.001}


def test_a_schedule_that_is_not_named_is_the_recipe_s_unless_the_optimizer_is_named() -> None:
    def scheduler(*overrides: str) -> SchedulerConfig | None:
        return read_config(overrides=overrides).training.scheduler

    recipe = scheduler("optimizer.params.lr=0.5")
    assert recipe is not None
    assert (recipe.type, recipe.params["cos_min_ratio"]) == ("WarmupCosineLR", 0.05)
    assert scheduler("optimizer.type=AdamW") is None
    assert scheduler("scheduler=null") is None
    named = scheduler("scheduler.type=WarmupLR", "optimizer.type=AdamW")
    assert named is not None
    assert named.params["warmup_num_steps"] == 1000


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
            'train_batch_size="24"',
            (
                'train_batch_size: expected a whole number of at least 1, got "24" (--set); '
                "write 24 without quotes"
            ),
        ),
        ("run.stepz=5", "run.stepz: unknown key, got 5 (--set); did you mean run.steps?"),
        ("lr=3", "lr: unknown key, got 3 (--set); did you mean optimizer.params.lr?"),
        (
            "fp16.enabled=true",
            (
                "fp16.enabled: not built yet: 16-bit parameters with a loss scale, got true "
                "(--set); use bf16.enabled: it needs no loss scale"
            ),
        ),
        (
            "zero_optimization.offload_optimzer=1",
            (
                "zero_optimization.offload_optimzer: unknown key, got 1 (--set); "
                "did you mean zero_optimization.offload_optimizer?"
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
                "a decimal number has a point: write [0.9, 0.999]"
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
            "optimizer.params.bias_correction=false",
            (
                "optimizer.params.bias_correction: not built yet: moments as they are, got false "
                "(--set); torch's Adam always corrects"
            ),
        ),
        (
            "scheduler.type=StepLR",
            (
                "scheduler.type: expected WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or "
                'LRRangeTest, got "StepLR" (--set); a schedule of torch.optim goes to '
                "plait.initialize as lr_scheduler"
            ),
        ),
        (
            "scheduler.type=WarmUpLR",
            (
                "scheduler.type: expected WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or "
                'LRRangeTest, got "WarmUpLR" (--set); did you mean WarmupLR?'
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
            'scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}',
            (
                "scheduler.params.warmup_max_lr: expected one number, as plait train has one "
                "parameter group, got [0.1, 0.2] (--set)"
            ),
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
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}},
            "amp": {"enabled": True},
            "train_batch_size": 10,
        },
    )
    found = problems_in(path, "gradient_accumulation_steps=0")
    assert [line.partition(":")[0] for line in found] == [
        "run.steps",
        "run.ranks",
        "bf16.enabled",
        "optimizer.extra",
        "amp.enabled",
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
    tree = value
    for name in reversed(path.split(".")):
        tree = {name: tree}
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
