"""`PlaitEngine`: a training loop's model, optimizer and schedule under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from plait._engine_whole import EngineWhole
from zero_partition import OrderError

__all__ = ["PlaitEngine"]

# Methods of DeepSpeed's engine that loops call and this one has a reason not to have.
_REFUSED = {
    "no_sync": "every backward is reduced, so that accumulated gradients do not depend on the "
    "stage; leave it out, step() counts the micro-batches",
    "set_train_micro_batch_size": "the loader is made for one micro-batch; set it in the "
    "configuration",
    "save_fp16_model": "use save_16bit_model",
    "deepspeed_io": "make a DataLoader with a DistributedSampler",
    "compile": "compile the blocks of the model before initialize()",
    "train_batch": "pipelines are not built yet",
    "eval_batch": "pipelines are not built yet",
    "offload_states": "offloading is not built yet",
    "reload_states": "offloading is not built yet",
}


class PlaitEngine(EngineWhole):
    """What `plait.initialize` returns first; made there.

    A micro-batch is what lies between two calls of `step`. With k = ``gradient_accumulation_steps``
    every k-th call of `step` is an update, on::

        grad = sum over k micro-batches (sum over ranks, in rank order) / (k * num_ranks)

    Attributes of the model that the engine has not are found on it too (``engine.generate``).
    """

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None:
            raise AttributeError(name)
        if name in _REFUSED:
            raise AttributeError(f"engine.{name}: {_REFUSED[name]}")
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"neither {type(self).__name__} nor the {type(module).__name__} it trains has an "
                f"attribute {name!r}"
            ) from None

    # A micro-batch.

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Run the model, as `forward` does."""
        return self.module(*inputs, **options)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the model; evaluation is not counted, and neither is a forward without backward."""
        return self.module(*inputs, **options)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002  # torch's signature
        """Put the model into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode."""
        return self.train(mode=False)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> Tensor:
        """Add the gradients of a micro-batch's loss (collective).

        Call it with this rank's mean loss: dividing by ranks and micro-batches is done at the
        update. Several backwards before one `step` add up, as the backward of their sum would.

        Args:
            loss: One element, of any dtype, that depends on the parameters.
            retain_graph: Keep the graph for another backward.

        Returns:
            `loss`, as it was.

        Raises:
            TypeError: `loss` is not a tensor.
            ValueError: It has more elements than one, or needs no gradient.
        """
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward: expected the loss, a tensor, got {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(
                f"backward: expected a loss of one element, got shape {tuple(loss.shape)}; take "
                "its mean"
            )
        if not loss.requires_grad:
            raise ValueError(
                "backward: this loss does not depend on a trainable parameter (was it computed "
                "under no_grad(), or detached?)"
            )
        loss.backward(retain_graph=retain_graph)
        self._counts.backwards += 1
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the `step` that ends the current micro-batch is an update."""
        if self._boundary is not None:
            return self._boundary
        return self._counts.window_steps + 1 >= self._batch.accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:  # noqa: FBT001  # DeepSpeed's signature
        """Say by hand which `step` is an update; None goes back to counting.

        Gradients are divided by ``gradient_accumulation_steps`` all the same.
        """
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at the boundary clip, step, schedule and clear (collective there).

        A window that an epoch's end leaves open goes on with the next epoch.

        Args:
            lr_kwargs: Handed to the schedule's `step`.

        Raises:
            OrderError: No backward came before, or the engine has no optimizer.
        """
        if self.optimizer is None:
            raise OrderError(
                "step: this engine has no optimizer, it only evaluates; name one in the "
                "configuration, or pass optimizer= to initialize()"
            )
        counts = self._counts
        if not counts.backwards:
            raise OrderError(
                "step: no backward since the latest step; call engine.backward(loss) (not "
                "loss.backward(), which the engine does not see) once a micro-batch, then "
                "engine.step()"
            )
        boundary = self.is_gradient_accumulation_boundary()
        counts.backwards = 0
        counts.micro_steps += 1
        counts.window_steps += 1
        self._applied = False
        if boundary:
            counts.window_steps = 0
            self._update(self.optimizer, lr_kwargs or {})

    def _update(self, optimizer: torch.optim.Optimizer, lr_kwargs: Mapping[str, Any]) -> None:
        zero, counts = self.zero, self._counts
        zero.finish(denominator=zero.num_ranks * self._batch.accumulation_steps)
        if self.config.gradient_clipping:
            self._norm = zero.clip_grad_norm_(self.config.gradient_clipping)
        self._applied = bool(optimizer.step())
        zero.zero_grad()
        if not self._applied:
            counts.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        counts.global_steps += 1
        counts.global_samples += self._batch.train_batch_size
        every = self.config.steps_per_print
        if every and counts.global_steps % every == 0 and self.global_rank == 0:
            print(
                f"step={counts.global_steps}, skipped={counts.skipped_steps}, "
                f"lr={self.get_lr()}, mom={self.get_mom()}",
                flush=True,
            )

    def zero_grad(self) -> None:
        """Forget the gradients of the running window, not its count of micro-batches."""
        self.zero.zero_grad()

    def allreduce_gradients(self) -> None:
        """Do nothing: every backward has reduced its gradients already."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change how many micro-batches an update has, to make `train_batch_size` samples.

        Raises:
            TypeError: Not a whole number.
            ValueError: Not a multiple of the micro-batch over all ranks.
            OrderError: In the middle of an update's micro-batches.
        """
        if type(train_batch_size) is not int:
            raise TypeError(
                f"set_train_batch_size: expected a whole number, got {train_batch_size!r}"
            )
        share = self._batch.micro_batch_size * self._batch.num_ranks
        if train_batch_size < share or train_batch_size % share:
            raise ValueError(
                f"set_train_batch_size: {train_batch_size} is not a multiple of "
                f"{self._batch.micro_batch_size} (micro-batch) x {self._batch.num_ranks} (ranks)"
            )
        if self._counts.window_steps:
            raise OrderError(
                f"set_train_batch_size: {self._counts.window_steps} micro-batches of an update are "
                "done; call it between two updates"
            )
        steps = train_batch_size // share
        self._batch = replace(
            self._batch, train_batch_size=train_batch_size, accumulation_steps=steps
        )

    def destroy(self) -> None:
        """Do nothing: memory goes with the engine and the model, the process group stays."""
