"""Every key of the configuration, found by its path.

This table is what the reader checks against, what errors name, what the guide and the schema for
editors are made of.
"""

from __future__ import annotations

from plait._deepspeed_keys import DECIDED_KEYS, HONOURED_KEYS
from plait._key import Key
from plait._plait_keys import PLAIT_KEYS
from plait._problems import nearest_key
from plait._unbuilt_keys import ASKING_KEYS, PART_KEYS

__all__ = [
    "ALIASES",
    "DEEPSPEED_KEYS",
    "DEPRECATED",
    "KEYS",
    "KEYS_BY_PATH",
    "OPTIMIZER_PARAMS",
    "PLAIT_SECTIONS",
    "SECTIONS",
    "canonical_path",
    "unknown_key",
]

DEEPSPEED_KEYS: tuple[Key, ...] = (*HONOURED_KEYS, *DECIDED_KEYS, *ASKING_KEYS, *PART_KEYS)
KEYS: tuple[Key, ...] = (*PLAIT_KEYS, *DEEPSPEED_KEYS)
KEYS_BY_PATH = {key.path: key for key in KEYS}
PLAIT_SECTIONS = ("model", "data", "run")


def _sections() -> frozenset[str]:
    """The path of every object that holds keys."""
    found = set()
    for path in KEYS_BY_PATH:
        parent = path.rpartition(".")[0]
        while parent:
            found.add(parent)
            parent = parent.rpartition(".")[0]
    return frozenset(found - {"optimizer"})


SECTIONS = _sections()

_ZERO = "zero_optimization."
_STAGE3 = f"{_ZERO}stage3_"
ALIASES = {
    "bfloat16": "bf16",
    "aio.thread_count": "aio.intra_op_parallelism",
    f"{_STAGE3}gather_fp16_weights_on_model_save": f"{_STAGE3}gather_16bit_weights_on_model_save",
    **{
        _ZERO + path.removeprefix(_STAGE3): path
        for path in KEYS_BY_PATH
        if path.startswith(_STAGE3)
    },
}
"""Other names of keys and sections that DeepSpeed takes too."""
DEPRECATED = frozenset(["bfloat16", f"{_STAGE3}gather_fp16_weights_on_model_save"])

OPTIMIZER_PARAMS = ("lr", "betas", "eps", "weight_decay")
_TYPED = [
    f"{name}{rest}" for name in ("optimizer", "scheduler") for rest in ("", ".type", ".params")
]
_PARAMS = [f"optimizer.params.{name}" for name in OPTIMIZER_PARAMS]
_NAMED = frozenset([*SECTIONS, *KEYS_BY_PATH, *ALIASES, *_TYPED, *_PARAMS])


def canonical_path(path: str) -> str:
    """The path under which the table has the key or section that `path` names."""
    if path in ALIASES:
        return ALIASES[path]
    section, dot, name = path.rpartition(".")
    return f"{ALIASES.get(section, section)}{dot}{name}"


def unknown_key(path: str) -> tuple[str, str]:
    """Why a key is refused that is not in the table, and what to do."""
    near = nearest_key(path, _NAMED)
    if near:
        return "unknown key", f"did you mean {near}?"
    parent = path.rpartition(".")[0]
    beside = sorted(key for key in _NAMED if key.rpartition(".")[0] == parent)
    return (
        "unknown key",
        f"known here: {', '.join(beside)}" if parent else "see plait config --keys",
    )
