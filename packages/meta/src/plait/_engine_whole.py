"""The part of the engine that deals in whole values: state dicts, checkpoints, 16-bit files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from plait._engine_checkpoint import What, load, replace_file, save
from plait._engine_facts import EngineFacts
from plait._together import from_rank_zero

__all__ = ["EngineWhole"]


class EngineWhole(EngineFacts):
    """State dicts and checkpoints of `PlaitEngine`; every method is collective."""

    def module_state_dict(self) -> dict[str, Any]:
        """Copies of the model's whole tensors, on every rank (collective)."""
        return self.zero.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the model's whole tensors, on every rank (collective)."""
        return self.zero.state_dict()

    def load_module_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load whole tensors, the same on all ranks, at any stage (collective)."""
        self.module.load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        *,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write ``save_dir/tag``, which loads on any number of ranks and stage (collective).

        It holds parameters, masters, optimizer state, schedule and counts; not the gradients of
        an update that has begun. A folder of that name is replaced once the new one is complete;
        the file ``latest`` names the newest only then.

        Args:
            save_dir: A folder that all ranks see.
            tag: Name of the checkpoint; default: ``global_step`` and the count of updates.
            client_state: Handed back by `load_checkpoint`: numbers, text, lists and dicts.
            save_latest: Let ``latest`` name this one.
            exclude_frozen_parameters: Must be False.

        Returns:
            True.

        Raises:
            TypeError: `client_state` holds something that JSON has no form for; says where.
            CheckpointError: On every rank, whatever went wrong on any.
        """
        if exclude_frozen_parameters:
            raise ValueError(
                "save_checkpoint: exclude_frozen_parameters=True is not built yet; a checkpoint "
                "holds the whole model"
            )
        save(self._what(), save_dir, tag, client_state, save_latest=save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        *,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint that `save_checkpoint` wrote (collective).

        Args:
            load_dir: What was `save_dir`.
            tag: Which one; default: the one that ``latest`` names.
            load_module_strict: Must be True.
            load_optimizer_states: Load what the optimizer keeps, and its groups' options.
            load_lr_scheduler_states: Load where the schedule stands.
            load_module_only: Load parameters and buffers, and leave counts as they are.
            custom_load_fn: Must be None.

        Returns:
            The folder's path and `client_state`; None and None, with a warning, where there is no
            ``latest`` and no `tag`.

        Raises:
            CheckpointError: On every rank, before anything is changed: it is missing, damaged, of
                another model or optimizer, or DeepSpeed's own.
        """
        if not load_module_strict:
            raise ValueError(
                "load_checkpoint: load_module_strict=False is not built; load what fits with "
                "engine.load_module_state_dict(..., strict=False)"
            )
        if custom_load_fn is not None:
            raise ValueError(
                "load_checkpoint: custom_load_fn is not built; change the tensors and give them to "
                "engine.load_module_state_dict(...)"
            )
        return load(
            self._what(),
            load_dir,
            tag,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
        )

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        *,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's whole state dict as torch.load() reads it (collective).

        In the dtype the model computes in: bfloat16 where ``bf16`` is enabled, and what the model
        has otherwise, as DeepSpeed does. Rank 0 writes; the file appears when it is complete. Every
        rank holds the whole model meanwhile.

        Args:
            save_dir: Where; made if need be.
            save_filename: Name of the file.
            exclude_frozen_parameters: Leave out parameters that are not trained.

        Returns:
            True.

        Raises:
            ValueError: The name promises safetensors.
            OSError: On every rank: rank 0 could not write.
        """
        if save_filename.endswith(".safetensors"):
            raise ValueError(
                f"save_16bit_model: {save_filename!r} would hold torch's format; name it .bin, or "
                "take the model.safetensors of a save_checkpoint()"
            )
        state = self.zero.state_dict()
        if exclude_frozen_parameters:
            named = self.module.named_parameters(remove_duplicate=False)
            for name in [name for name, p in named if not p.requires_grad]:
                del state[name]
        path = Path(save_dir) / save_filename
        from_rank_zero(lambda: replace_file(path, lambda part: torch.save(state, part)))
        return True

    def _what(self) -> What:
        return What(
            zero=self.zero,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            counts=self._counts,
        )
