"""A unit: parameters that are gathered, reduced and released together."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_partition._precision import Precision
from zero_partition._segment import Cut, Segment
from zero_partition._transport import Transport
from zero_partition._units import UnitSpec


@dataclass(eq=False, slots=True)
class Unit:
    """One unit of a partitioned model, and what it has been through since the last flush.

    Attributes:
        name: Where its module hangs in the model; empty for the model itself.
        module: The module whose forward and backward need the unit whole.
        index: Place in the list of units; 0 is the model's own.
        segments: Its flat buffers.
        is_whole: Whether the parameters can be read here and now.
        uses: Forwards in a training pass, outside backward, since the last flush.
        recomputes: Forwards with grad inside backward: reentrant checkpointing builds graphs there.
        arrived: Segment and slot of the gradients that have come in this backward.
        tasks: Autograd graph tasks that the gradients came from.
        has_input_hooks: Whether some input told us it would say when its gradient is known.
        inputs_done: Whether it has.
        is_posted: Whether the reduction of this backward is under way.
    """

    name: str
    module: nn.Module
    index: int
    segments: list[Segment]
    is_whole: bool = True
    uses: int = 0
    recomputes: int = 0
    arrived: set[tuple[int, int]] = field(default_factory=set)
    tasks: set[int] = field(default_factory=set)
    has_input_hooks: bool = False
    inputs_done: bool = False
    is_posted: bool = False

    @property
    def is_root(self) -> bool:
        """Whether this is the model's own unit."""
        return self.index == 0

    @property
    def trainable_segments(self) -> list[Segment]:
        """The segments that receive gradients."""
        return [segment for segment in self.segments if segment.trainable]

    @property
    def num_trainable(self) -> int:
        """Parameters that receive gradients."""
        return sum(len(segment.parameters) for segment in self.trainable_segments)

    def gradients_complete(self, task: int | None) -> bool:
        """Whether no further gradient can come in the backward of the outermost graph task.

        Every parameter must have fired, and nothing may fire twice: the module ran once, and all
        gradients came from one graph task - the outermost, or, where the module as a whole was
        recomputed by reentrant checkpointing, the one nested task of that recomputation.
        """
        if self.is_root or self.uses != 1 or len(self.arrived) < self.num_trainable:
            return False
        return self.tasks <= {task} or (self.recomputes == 1 and len(self.tasks) == 1)

    def backward_complete(self, task: int | None) -> bool:
        """Whether no node of this unit's graph is still to run: its values can go.

        A node runs because a parameter or an input needs it, so when all of these have their
        gradients, all nodes have run.
        """
        inputs = self.inputs_done or not self.has_input_hooks
        return inputs and self.gradients_complete(task)

    def reset(self) -> None:
        """Forget the backward that has just ended."""
        self.uses = self.recomputes = 0
        self.arrived.clear()
        self.tasks.clear()
        self.has_input_hooks = self.inputs_done = self.is_posted = False


def build_unit(
    spec: UnitSpec,
    index: int,
    *,
    precision: Precision,
    cut: Cut,
    transport: Transport,
) -> Unit:
    """Move the parameters of `spec` into flat buffers."""
    kinds: dict[tuple[bool, torch.dtype, torch.device], list[tuple[str, nn.Parameter]]]
    kinds = defaultdict(list)
    for name, parameter in spec.parameters:
        kind = (parameter.requires_grad, precision.dtype_of(parameter), parameter.device)
        kinds[kind].append((name, parameter))
    segments = [
        Segment(parameters, dtype=dtype, cut=cut, transport=transport)
        for (_, dtype, _), parameters in kinds.items()
    ]
    return Unit(spec.name, spec.module, index, segments)
