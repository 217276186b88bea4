"""The keys of `plait train` itself, and the recipe it follows where a file names none."""

from __future__ import annotations

from dataclasses import dataclass

from plait._key import Key, Use
from plait._kinds import Flag, Integer, OneOf, Text

__all__ = ["OPTIMIZER_RECIPE", "PLAIT_KEYS", "SCHEDULER_RECIPE", "Recipe"]


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
_NEXT_FREE = "the next free `plait-run-N`"


def _key(
    name: str, kind: Flag | Integer | OneOf | Text, default: object, meaning: str, said: str = ""
) -> Key:
    return Key(path=name, kind=kind, default=default, meaning=meaning, default_said=said)


PLAIT_KEYS: tuple[Key, ...] = (
    Key(
        path="$schema",
        kind=Text(),
        default=None,
        meaning="for editors: what `plait config --schema` prints",
        use=Use.DECIDED,
    ),
    _key("model.num_layers", Integer(1), 4, "transformer blocks"),
    _key("model.hidden_size", Integer(1), 256, "width; a multiple of `num_heads`"),
    _key("model.num_heads", Integer(1), 4, "attention heads a block"),
    _key("model.context_length", Integer(1), 128, "bytes the model sees at once"),
    _key("model.tie_embeddings", Flag(), True, "one table for input and output"),  # noqa: FBT003  its default
    _key("data.path", Text(), None, "a text file, or a folder read recursively", _SHIPPED),
    _key("run.ranks", Integer(1), None, "processes to train on", _RANKS),
    _key("run.device", OneOf(("auto", "cpu")), "auto", '`"auto"` takes GPUs where there are some'),
    _key("run.steps", Integer(1), 240, "updates"),
    _key("run.seed", Integer(0, below=2**63), 0, "first weights, order of the data, sample"),
    _key("run.folder", Text(), None, "where everything is written", _NEXT_FREE),
    _key("run.overwrite", Flag(), False, "replace the run that is in the folder"),  # noqa: FBT003  its default
    _key("run.eval_every", Integer(1), 40, "updates between evaluations on the held-out text"),
    _key("run.eval_windows", Integer(1), 96, "held-out pieces of one context an evaluation reads"),
    _key("run.save_every", Integer(1), 80, "updates between checkpoints; the last two are kept"),
    _key("run.sample_bytes", Integer(0), 240, "length of the text generated at the end"),
)
