"""Every key of the configuration: what it takes, its default, what it means.

This table is what the reader checks against, what errors name, and what the guide prints.
"""

from __future__ import annotations

from dataclasses import dataclass

from plait._batch import DEFAULT_TRAIN_BATCH_SIZE
from plait._deepspeed_keys import NOT_BUILT
from plait._kinds import Flag, Integer, Kind, Number, OneOf, Text
from plait._problems import nearest_key

__all__ = ["KEYS", "OPTIMIZER_RECIPE", "SCHEDULER_RECIPE", "SECTIONS", "Key", "unknown_key"]


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Args:
        path: Dotted path.
        kind: What it takes; null too where the default is None.
        default: Value when the key is absent.
        meaning: One phrase for the reader.
        default_said: The default in words where the value alone says too little.
    """

    path: str
    kind: Kind
    default: object
    meaning: str
    default_said: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What an absent ``optimizer`` or ``scheduler`` means; one without a `type` refines it."""

    type: str
    params: dict[str, object]


OPTIMIZER_RECIPE = Recipe("AdamW", {"lr": 2e-3, "betas": [0.9, 0.99], "weight_decay": 0.1})
SCHEDULER_RECIPE = Recipe(
    "WarmupCosineLR",
    {"warmup_num_steps": 20, "warmup_type": "linear", "cos_min_ratio": 0.05},
)

# Defaults that a value alone does not say.
_SHIPPED = "text that ships with Python"
_RANKS = "the number of GPUs; 2 without any"
_FROM_OTHERS = "from the other two"
_TRAIN_BATCH_SIZE = f"{DEFAULT_TRAIN_BATCH_SIZE}, or from the other two"
_ACCUMULATION = "1, or from the other two"

_MICRO_BATCH_SIZE = "train_micro_batch_size_per_gpu"
_SEQUENCES = "sequences an update, over all ranks"

KEYS: tuple[Key, ...] = (
    Key("model.num_layers", Integer(1), 4, "transformer blocks"),
    Key("model.hidden_size", Integer(1), 256, "width; a multiple of `num_heads`"),
    Key("model.num_heads", Integer(1), 4, "attention heads a block"),
    Key("model.context_length", Integer(1), 128, "bytes the model sees at once"),
    Key("model.tie_embeddings", Flag(), default=True, meaning="one table for input and output"),
    Key("data.path", Text(), None, "a text file, or a folder read recursively", _SHIPPED),
    Key("run.ranks", Integer(1), None, "processes to train on", _RANKS),
    Key("run.device", OneOf(("auto", "cpu")), "auto", '`"auto"` takes GPUs where there are some'),
    Key("run.steps", Integer(1), 240, "updates"),
    Key("run.seed", Integer(0, below=2**63), 0, "first weights, order of the data, sample"),
    Key("run.folder", Text(), None, "where everything is written", "the next free `plait-run-N`"),
    Key("run.overwrite", Flag(), default=False, meaning="replace the run that is in the folder"),
    Key("run.eval_every", Integer(1), 40, "updates between evaluations on the held-out text"),
    Key("run.eval_windows", Integer(1), 96, "held-out pieces of one context an evaluation reads"),
    Key("run.save_every", Integer(1), 80, "updates between checkpoints; the last two are kept"),
    Key("run.sample_bytes", Integer(0), 240, "length of the text generated at the end"),
    Key("zero_optimization.stage", OneOf((0, 1, 2, 3)), 3, "what the ranks share out"),
    Key("bf16.enabled", Flag(), default=False, meaning="16-bit parameters with fp32 masters"),
    Key("gradient_clipping", Number(at_least=0.0), 1.0, "largest gradient norm; 0 is none"),
    Key("train_batch_size", Integer(1), None, _SEQUENCES, _TRAIN_BATCH_SIZE),
    Key(_MICRO_BATCH_SIZE, Integer(1), None, "sequences a backward, on one rank", _FROM_OTHERS),
    Key("gradient_accumulation_steps", Integer(1), None, "backwards an update", _ACCUMULATION),
)

SECTIONS = {key.path.partition(".")[0] for key in KEYS if "." in key.path}

_TYPED = [
    f"{name}{rest}" for name in ("optimizer", "scheduler") for rest in ("", ".type", ".params")
]
_PARAMS = [f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")]
_KNOWN = frozenset([*SECTIONS, *(key.path for key in KEYS), *_TYPED, *_PARAMS])


def unknown_key(path: str) -> tuple[str, str]:
    """Why a key is refused that is not in `KEYS`, and what to do."""
    if path in NOT_BUILT:
        return "a DeepSpeed key that plait has not built yet", "remove it"
    near = nearest_key(path, _KNOWN | NOT_BUILT)
    if near:
        return "unknown key", f"did you mean {near}?{' (not built yet)' * (near in NOT_BUILT)}"
    parent = path.rpartition(".")[0]
    beside = sorted(key for key in _KNOWN if key.rpartition(".")[0] == parent)
    return "unknown key", f"known here: {', '.join(beside)}"
