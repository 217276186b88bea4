"""One drawn training run, done twice: by the reference, and by the library on its ranks."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from models import Moment, build, loss, units_of
from reference import LossOf, Reference
from strategies import OptimizerSpec, Partitioning, TrainingRun, bucket_numel
from wires import wire
from zero_partition import Precision, partition

Named = Sequence[tuple[str, nn.Parameter]]


@dataclass
class Outcome:
    """What a run leaves: all of it must be the same bits whoever ran it."""

    losses: list[list[Tensor]] = field(default_factory=list)  # by step, micro-batch and rank
    norms: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # of the last step, clipped
    parameters: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    stepped: list[bool] = field(default_factory=list)


def grouped(kind: str, named: Named) -> Any:
    """What a user hands to an optimizer: parameters, named parameters, or groups of either."""
    half = len(named) // 2
    match kind:
        case "decay":
            wide = [p for _, p in named if p.ndim >= 2]
            rest = [p for _, p in named if p.ndim < 2]
            groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        case "rates":
            first, second = [p for _, p in named[:half]], [p for _, p in named[half:]]
            groups = [{"params": second, "lr": 0.02}, {"params": first}]
        case "named":
            return list(named)
        case "named_groups":
            groups = [{"params": list(named[:half]), "lr": 0.02}, {"params": list(named[half:])}]
        case "subset":
            return [p for _, p in named[1:]] or [p for _, p in named]
        case _:
            return [p for _, p in named]
    return [group for group in groups if group["params"]]


def run_loss(run: TrainingRun, step: int, micro: int) -> LossOf:
    """The loss of a run's model on each rank's own batch."""
    return lambda model, rank: loss(model, run.model, Moment(step, micro, rank))


def train_reference(run: TrainingRun) -> Outcome:
    """The run in one process."""
    model = build(run.model)
    reference = Reference(model, run.num_ranks, param=torch.bfloat16 if run.bf16 else None)
    cls = getattr(torch.optim, run.optimizer.name)
    reference.make_optimizer(
        cls, lambda named: grouped(run.optimizer.groups, named), **dict(run.optimizer.options)
    )
    outcome = Outcome()
    for step in range(run.steps):
        losses: list[Tensor] = []
        for micro in range(run.accumulation):
            losses += reference.backward(run_loss(run, step, micro))
        outcome.losses.append(losses)
        reference.finish(run.denominator)
        if run.max_norm is not None:
            outcome.norms.append(reference.clip_grad_norm_(run.max_norm))
        if step == run.steps - 1:
            outcome.gradients = {
                name: g if g is None else g.clone() for name, g in reference.gradients().items()
            }
        outcome.stepped.append(reference.step())
    outcome.parameters = reference.parameters()
    outcome.states = reference.states()
    return outcome


def partition_run(run: TrainingRun, how: Partitioning) -> tuple[Any, nn.Module, Any]:
    """The run's model, partitioned, and its optimizer."""
    model = build(run.model)
    zero = partition(
        model,
        stage=how.stage,
        units=units_of(model),
        precision=Precision(param=torch.bfloat16) if run.bf16 else Precision(),
        bucket_numel=bucket_numel(run.model, how.bucket),
        wire=None if how.wire == "chosen" else wire(how.wire),
        overlap=how.overlap,
        secondary="local" if how.wire == "nodes" and how.stage == 3 else None,
    )
    return zero, model, make_optimizer(zero, model, run.optimizer)


def make_optimizer(zero: Any, model: nn.Module, spec: OptimizerSpec) -> Any:
    """`zero.optimizer` with a spec's class, groups and options."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    params = None if spec.groups == "none" else grouped(spec.groups, named)
    return zero.optimizer(getattr(torch.optim, spec.name), params, **dict(spec.options))


def train_library(rank: int, run: TrainingRun, how: Partitioning) -> Outcome:
    """The run on this rank, the losses of all ranks gathered."""
    zero, model, optimizer = partition_run(run, how)
    outcome = Outcome()
    for step in range(run.steps):
        outcome.losses.append(gather_losses(train_step(zero, model, run, step)))
        zero.finish(run.denominator)
        if run.max_norm is not None:
            outcome.norms.append(zero.clip_grad_norm_(run.max_norm))
        if step == run.steps - 1:
            outcome.gradients = dict(zero.gradients())
        outcome.stepped.append(optimizer.step())
        clear = {"optimizer": optimizer.zero_grad, "model": model.zero_grad, "zero": zero.zero_grad}
        clear[run.zero_grad]()
    outcome.parameters = zero.state_dict()
    outcome.states = whole_states(zero, optimizer)
    return outcome


def train_step(zero: Any, model: nn.Module, run: TrainingRun, step: int) -> list[Tensor]:
    """Every micro-batch of one step, forward and backward; this rank's losses."""
    losses = []
    for micro in range(run.accumulation):
        value = run_loss(run, step, micro)(model, zero.rank)
        value.backward()
        losses.append(value.detach())
    return losses


def gather_losses(losses: list[Tensor]) -> list[Tensor]:
    """Micro-batch by micro-batch, the losses by rank."""
    mine = torch.stack(losses)
    if not dist.is_initialized():
        return list(mine)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return list(torch.stack(everyone, dim=1).flatten())


def whole_states(zero: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """Optimizer state by state and parameter name, read from a checkpoint by its plain files."""
    folder = [tempfile.mkdtemp(prefix="states-") if zero.rank == 0 else None]
    if zero.num_ranks > 1:
        dist.broadcast_object_list(folder, src=0)
    path = Path(folder[0] or "") / "step-1"
    zero.save(path, optimizer)
    files = sorted(path.glob("optimizer.*.safetensors"))
    return {file.name.split(".")[1]: load_file(file) for file in files}


def differences(expected: Outcome, got: Outcome) -> list[str]:
    """Where two outcomes are not the same bits, in words."""
    found = compare_lists("loss", flat(expected.losses), flat(got.losses))
    found += compare_lists("norm", expected.norms, got.norms)
    if expected.stepped != got.stepped:
        found.append(f"stepped: expected {expected.stepped}, got {got.stepped}")
    found += compare_dicts("gradient", expected.gradients, got.gradients)
    found += compare_dicts("parameter", expected.parameters, got.parameters)
    for key in sorted(expected.states.keys() | got.states.keys()):
        # An empty parameter has no elements whose state could differ.
        empty = {n for n, p in expected.parameters.items() if p.numel() == 0}
        want, have = expected.states.get(key, {}), got.states.get(key, {})
        want = {n: t for n, t in want.items() if n not in empty}
        have = {n: t for n, t in have.items() if n not in empty}
        found += compare_dicts(f"state {key} of", want, have)
    return found


def flat(losses: list[list[Tensor]]) -> list[Tensor]:
    """The losses of all steps."""
    return list(itertools.chain.from_iterable(losses))


def check_same(what: str, expected: dict[str, Any], got: dict[str, Any]) -> None:
    """Raise unless two dicts of tensors have the same names, shapes, types and bits."""
    found = compare_dicts(what, expected, got)
    if found:
        raise AssertionError("\n".join(found))


def compare_lists(what: str, expected: Sequence[Tensor], got: Sequence[Tensor]) -> list[str]:
    """Differences by position."""
    if len(expected) != len(got):
        return [f"{what}: {len(expected)} expected, got {len(got)}"]
    pairs = zip(expected, got, strict=True)
    return [m for i, (a, b) in enumerate(pairs) for m in compare(f"{what} {i}", a, b)]


def compare_dicts(what: str, expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """Differences by name."""
    found = [f"{what} {n}: missing" for n in sorted(expected.keys() - got.keys())]
    found += [f"{what} {n}: unexpected" for n in sorted(got.keys() - expected.keys())]
    for name in sorted(expected.keys() & got.keys()):
        found += compare(f"{what} {name}", expected[name], got[name])
    return found


def compare(what: str, expected: Tensor | None, got: Tensor | None) -> list[str]:
    """Nothing when both are None or equal in shape, type and every element."""
    if expected is None or got is None:
        return [] if expected is got else [f"{what}: expected {expected}, got {got}"]
    if expected.shape != got.shape or expected.dtype != got.dtype:
        want, have = (tuple(expected.shape), expected.dtype), (tuple(got.shape), got.dtype)
        return [f"{what}: expected {want}, got {have}"]
    if torch.equal(expected, got):
        return []
    wrong = int((expected != got).sum())
    worst = float((expected.double() - got.double()).abs().max())
    return [f"{what}: {wrong} of {expected.numel()} elements differ, by up to {worst:.3g}"]
