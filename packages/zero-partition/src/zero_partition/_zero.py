"""`Zero`: the handle of a partitioned model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from zero_partition._clipping import Clipping
from zero_partition._errors import OrderError
from zero_partition._gathers import Gathers
from zero_partition._loading import load
from zero_partition._memory import Memory, measure
from zero_partition._optimizer import ZeroOptimizer
from zero_partition._reductions import Accumulation, Reductions
from zero_partition._rendezvous import Place, Rendezvous
from zero_partition._saving import save
from zero_partition._stepping import Stepping
from zero_partition._transport import Transport
from zero_partition._unit import Unit
from zero_partition._whole import WholeValues, broadcast_buffers


class Zero:
    """A partitioned model's gradients, optimizers, memory and checkpoints; made by `partition`.

    Methods marked collective must be called by every rank of the group.

    Attributes:
        model: The model that was partitioned.
        stage: ZeRO stage, 0 to 3.
        group: The ranks; None for a single process.
        rank: This rank's place in the group.
        num_ranks: Ranks in the group.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stage: int,
        units: list[Unit],
        gathers: Gathers,
        reductions: Reductions,
        whole: WholeValues,
        transport: Transport,
        rendezvous: Rendezvous,
        skip_nonfinite: bool,
    ) -> None:
        self.model, self.stage, self.group = model, stage, transport.group
        self.rank, self.num_ranks = transport.rank, transport.num_ranks
        self._units, self._gathers, self._reductions = units, gathers, reductions
        self._whole, self._transport, self._rendezvous = whole, transport, rendezvous
        self._segments = [segment for unit in units for segment in unit.segments]
        self._clipping = Clipping(
            reductions, transport=transport, rendezvous=rendezvous, skip_nonfinite=skip_nonfinite
        )
        self._stepping = Stepping(
            units,
            gathers=gathers,
            reductions=reductions,
            clipping=self._clipping,
            transport=transport,
            rendezvous=rendezvous,
            finish=self.finish,
        )

    def __repr__(self) -> str:
        return (
            f"Zero(stage={self.stage}, rank {self.rank} of {self.num_ranks}, "
            f"{len(self._units)} units)"
        )

    # Gradients.

    def finish(self, denominator: float | None = None) -> None:
        """End an accumulation: divide the summed gradients, once (collective).

        ``grad = sum over micro-batches of (sum over ranks, in rank order) / denominator``.
        `clip_grad_norm_` and ``optimizer.step()`` call it with the default where the caller did
        not. A rank that had fewer backwards than another takes part in those with zeros.

        Args:
            denominator: The same number on every rank, such as the count of all ranks' tokens where
                the loss is a sum over tokens; default: the number of ranks, as data parallelism
                does. 0 means that nothing was counted: the (zero) sums stay as they are.

        Raises:
            ValueError: `denominator` is negative or not finite.
            RanksDisagree: Ranks passed different denominators, or are elsewhere.
            OrderError: The gradients are divided already.
        """
        self._gathers.close()
        self._reductions.finish(denominator)
        self._stepping.attach()

    def clip_grad_norm_(
        self, max_norm: float, *, parameters: Iterable[nn.Parameter] | None = None
    ) -> Tensor:
        """Scale the gradients so that their norm is at most `max_norm` (collective).

        The norm is the root of the sum of squares in float64 over logical elements, each once,
        rounded once to float32; gradients are multiplied by ``min(1, max_norm / (norm + 1e-6))``.
        With `skip_nonfinite` a norm that is not finite scales nothing (the step will be skipped).

        Args:
            max_norm: Upper bound, positive.
            parameters: Clip these together and leave the rest; default: all.

        Returns:
            The norm before clipping, a 0-d float32 tensor; the same on every rank.

        Raises:
            ValueError: `max_norm` is not positive.
            OrderError: There are no gradients.

        Error bound:
            Within 1e-5 (relative) of torch.nn.utils.clip_grad_norm_, which sums in float32.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {max_norm}")
        self.finish()
        if self._reductions.state is Accumulation.EMPTY:
            raise OrderError("clip_grad_norm_() without gradients: call backward() first")
        if parameters is None:
            return self._clipping.clip(max_norm, None)
        return self._clipping.clip(max_norm, self._stepping.trainable(list(parameters)))

    def zero_grad(self) -> None:
        """Forget all gradients, whatever point of the accumulation they are at."""
        self._reductions.zero_grad()
        self._stepping.detach()

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of the whole, divided gradients by name; None for one nobody used (collective).

        Raises:
            OrderError: `finish` has not been called since the last backward.
        """
        if self._reductions.state not in (Accumulation.FINISHED, Accumulation.STEPPED):
            raise OrderError("gradients(): call finish() first; the sums are not divided yet")
        return self._whole.gradients(self._reductions.all_buffers)

    # Optimizers.

    def optimizer(
        self,
        cls: type[torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        **options: Any,
    ) -> ZeroOptimizer:
        """Make an optimizer of the caller's class that steps this rank's part of the model.

        The result is an instance of a subclass of `cls`, so learning-rate schedulers and step hooks
        work; its ``step()`` says whether it stepped, and its ``state_dict()`` is local.

        Args:
            cls: Any optimizer that treats every element on its own; at stage 0 any.
            params: As torch takes them: parameters, (name, parameter) pairs, or dicts of groups;
                default: all trainable parameters. Frozen ones are passed over.
            options: Handed whole to `cls`.

        Raises:
            ValueError: `cls` is not elementwise (decided by a trial), or a parameter is not the
                model's.
            TypeError: `cls` is not an optimizer class.
        """
        given: object = cls
        if not (isinstance(given, type) and issubclass(given, torch.optim.Optimizer)):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer class, got {cls!r}")
        return self._stepping.make(cls, params, options)

    # Whole values, memory.

    def gathered(self, *, modify: bool = False) -> AbstractContextManager[None]:
        """Hold the whole model, to read or to edit it (collective).

        Args:
            modify: Make rank 0's values everyone's at the end, in shards and masters too. Without
                it, edits at stage 3 are an error.

        Raises:
            RestingError: Parameters were edited without `modify`.
        """
        return self._whole.gathered(modify=modify)

    def state_dict(self) -> dict[str, Any]:
        """Copies of whole tensors under every name of ``model.state_dict()`` (collective).

        Gathered unit by unit: the peak beyond the result is one unit.
        """
        return self._whole.state_dict()

    def shards(self) -> Iterator[tuple[str, slice, Tensor]]:
        """What this rank holds of each trainable parameter, to be averaged, say (collective).

        Written values count from the next forward on.

        Yields:
            The parameter's name, the elements of the flattened parameter, and a 1-D view of them:
            of the fp32 master where there is one. The whole parameter at stage 0.
        """
        self._whole.enter()
        for segment in self._segments:
            segment.adopt_edits()
            for piece in segment.pieces:
                values = piece.values.detach().reshape(-1)
                elements = slice(piece.param_start, piece.param_start + values.numel())
                yield segment.names[piece.slot], elements, values

    def sync(self) -> None:
        """Take part in other ranks' evaluation forwards until all ranks are here (collective).

        Ends an evaluation loop in which ranks have different numbers of batches.
        """
        self._gathers.close()
        while True:
            reports = self._rendezvous.meet(Place.SYNC)
            lead = min(report.place for report in reports)
            if lead == Place.SYNC:
                return
            self._gathers.join(lead, reports)

    def broadcast_buffers(self) -> None:
        """Make rank 0's buffers (running statistics and the like) everyone's (collective)."""
        self._whole.enter()
        broadcast_buffers(self.model, self._transport)

    # Checkpoints.

    def save(
        self,
        path: str | os.PathLike[str],
        optimizer: ZeroOptimizer | None = None,
        *,
        state: Any = None,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint folder that any number of ranks and any stage can load (collective).

        ``model.safetensors`` (whole tensors under their logical names, a tie once, no padding),
        ``master.safetensors`` where there are masters, ``optimizer.<state>.safetensors`` and
        ``index.json``; ``wire.safetensors`` where the wire keeps something. Each rank writes its
        own byte ranges. The folder appears under its name when it is complete; a save that dies
        leaves earlier ones as they were. Gradients are not saved.

        Args:
            path: The folder to make, on a file system that all ranks share.
            optimizer: One made by `optimizer`, to be saved with the model.
            state: A JSON value of the caller's (step, data position); rank 0's is stored.
            overwrite: Replace a checkpoint of that name.

        Raises:
            CheckpointError: On every rank, whatever went wrong on any.
        """
        self._at(Place.SAVE)
        save(
            path,
            self.model,
            self._segments,
            self._own(optimizer),
            state=state,
            stage=self.stage,
            transport=self._transport,
            overwrite=overwrite,
        )

    def load(self, path: str | os.PathLike[str], optimizer: ZeroOptimizer | None = None) -> Any:
        """Load a checkpoint, strictly, and return the caller's `state` (collective).

        Gradients are forgotten. Random states, and what the wire keeps (error feedback), are
        restored where the number of ranks is the same; the latter, where the buffers are too.

        Args:
            path: A folder that `save` made.
            optimizer: One made by `optimizer`, of the same class and with the same groups.

        Raises:
            CheckpointError: On every rank, before anything is changed: the checkpoint is missing,
                incomplete or damaged, or of another model or optimizer.
        """
        self._at(Place.LOAD)
        state = load(
            path,
            self.model,
            self._segments,
            self._own(optimizer),
            transport=self._transport,
        )
        self.zero_grad()
        return state

    def _at(self, place: Place) -> None:
        self._gathers.close()
        self._rendezvous.meet(place)
        self._gathers.release_all()

    def _own(self, optimizer: ZeroOptimizer | None) -> ZeroOptimizer | None:
        if optimizer is not None and not self._stepping.made(optimizer):
            raise ValueError(
                "optimizer: expected one made by this partition's zero.optimizer(...), got "
                f"{type(optimizer).__name__}"
            )
        return optimizer

    @property
    def memory(self) -> Memory:
        """Bytes this rank holds by state, measured beside the closed form."""
        buffers, optimizers = self._reductions.all_buffers, self._stepping.optimizers
        return measure(
            self._segments,
            buffers,
            optimizers,
            rank=self.rank,
            secondary_bytes=self._transport.secondary_bytes,
            wire_bytes=sum(each.nbytes for each in self._transport.wire_state().values()),
        )
