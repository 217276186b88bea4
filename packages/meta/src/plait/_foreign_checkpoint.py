"""Recognises a checkpoint folder that DeepSpeed wrote."""

from __future__ import annotations

from pathlib import Path

from zero_partition import CheckpointError

__all__ = ["check_not_foreign"]

_WRITTEN_BY_DEEPSPEED = (
    "mp_rank_*_model_states.pt",
    "*zero_pp_rank_*_optim_states.pt",
    "*zero_pp_rank_*_model_states.pt",
    "layer_*-model_*.pt",
    "zero/*/fp32.pt",  # a universal one
)


def check_not_foreign(folder: Path) -> None:
    """Refuse DeepSpeed's own folder, and say what to do with it.

    Raises:
        CheckpointError: DeepSpeed's files are there.
    """
    found = sorted(
        str(path.relative_to(folder))
        for glob in _WRITTEN_BY_DEEPSPEED
        for path in folder.glob(glob)
    )
    if not found:
        return
    raise CheckpointError(
        f"{folder} is a checkpoint that DeepSpeed wrote ({found[0]}"
        f"{f' and {len(found) - 1} more files' if len(found) > 1 else ''}); importing those is not "
        "built yet. Its weights can be had now: run the zero_to_fp32.py that lies beside it, and "
        "give what that writes to engine.load_module_state_dict(torch.load(...))"
    )
