"""The variants as programs: the same model, data and optimizer class, another library around."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from _gpt import GPT, VOCABULARY
from _plan import Size
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from zero_partition import TorchWire, Wire, partition

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.1


def _nothing() -> None:
    return


class Steps(Protocol):
    """What an optimizer can do, here."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> object:
        """Update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model that is being trained, one step at a time.

    Attributes:
        model: What is called.
        optimizer: What steps.
        values: Whole parameters by name; all ranks call it.
        backward: From a loss to the reduced gradients.
        before_update: What the variant needs between backward and the optimizer's step.
    """

    model: nn.Module
    optimizer: Steps
    values: Callable[[], Mapping[str, Tensor]]
    backward: Callable[[Tensor], object] = Tensor.backward
    before_update: Callable[[], None] = _nothing

    def accumulate(self, tokens: Tensor) -> Tensor:
        """The step up to the reduced gradients; returns this rank's loss."""
        self.optimizer.zero_grad()
        logits = self.model(tokens[:, :-1])
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        self.backward(loss)
        return loss.detach()

    def update(self) -> None:
        """The rest of the step."""
        self.before_update()
        self.optimizer.step()


def build(key: str, size: Size, *, seed: int) -> Training:
    """Begin a training of the variant `key`; every variant begins with the same values."""
    torch.manual_seed(seed)
    return _BUILDERS[key](GPT(size))


def _ours(model: nn.Module, *, stage: int, wire: Wire | None = None) -> Training:
    zero = partition(model, stage=stage, wire=wire)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return Training(model=model, optimizer=optimizer, values=zero.state_dict)


def _ddp(model: nn.Module) -> Training:
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return Training(model=parallel, optimizer=optimizer, values=model.state_dict)


def _zero_redundancy(model: nn.Module) -> Training:
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
    )
    return Training(model=parallel, optimizer=optimizer, values=model.state_dict)


def _fsdp2(
    model: GPT, *, reshard_after_forward: bool = True, reshard_after_backward: bool = True
) -> Training:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.set_reshard_after_backward(reshard_after_backward, recurse=False)

    def reshard() -> None:  # otherwise the next forward would compute with the old values
        for module in sharded:
            module.reshard()

    def values() -> Mapping[str, Tensor]:
        return {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.state_dict().items()
        }

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return Training(
        model=model,
        optimizer=optimizer,
        values=values,
        before_update=_nothing if reshard_after_backward else reshard,
    )


def _deepspeed(model: GPT, *, stage: int, replaces_linear: bool = True) -> Training:
    from _deepspeed import build_engine  # noqa: PLC0415  # it need not be installed

    engine = build_engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        stage=stage,
        batch=model.size.batch,
        replaces_linear=replaces_linear,
    )
    return Training(
        model=engine.module, optimizer=engine, values=engine.values, backward=engine.backward
    )


_BUILDERS: Mapping[str, Callable[[GPT], Training]] = {
    **{f"stage{stage}": partial(_ours, stage=stage) for stage in range(4)},
    "stage3_torch_wire": partial(_ours, stage=3, wire=TorchWire()),
    "ddp": _ddp,
    "zero_redundancy": _zero_redundancy,
    "fsdp2_whole": partial(_fsdp2, reshard_after_forward=False, reshard_after_backward=False),
    "fsdp2_forward": partial(_fsdp2, reshard_after_forward=False),
    "fsdp2": _fsdp2,
    **{f"deepspeed{stage}": partial(_deepspeed, stage=stage) for stage in (1, 2, 3)},
    "deepspeed3_linear": partial(_deepspeed, stage=3, replaces_linear=False),
}
