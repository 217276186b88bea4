"""`plait.initialize`: what DeepSpeed's users call, assembled from the libraries."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from plait._client_optimizer import (
    ClientOptimizer,
    OptimizerRecipe,
    check_members,
    parameter_list,
    recipe_of,
    recipe_of_config,
)
from plait._client_scheduler import (
    Scheduler,
    check_client_scheduler,
    make_scheduler,
    scheduler_name,
)
from plait._config import TrainingConfig, WireConfig
from plait._config_read import read_training_config
from plait._engine import PlaitEngine
from plait._engine_facts import EngineParts
from plait._fates import Became, Fate
from plait._join import init_distributed, local_rank, own_device
from plait._loader import RankLoader, check_dataset
from plait._partitioning import partition_as
from plait._schedulers import scheduler_rate
from plait._together import agreed

__all__ = ["add_config_arguments", "initialize"]

ConfigSource: TypeAlias = str | os.PathLike[str] | Mapping[str, object]
ClientScheduler: TypeAlias = LRScheduler | Callable[[torch.optim.Optimizer], Scheduler]
_META = torch.device("meta")
_NOT_BUILT = {
    "mpu": "tensor and pipeline parallel groups are not built yet; all ranks share the batch",
    "mesh_param": "sequence parallelism is not built yet; all ranks share the batch",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What was asked for, checked; nothing has been changed yet."""

    config: TrainingConfig
    fates: tuple[Fate, ...]
    recipe: OptimizerRecipe | None


def initialize(  # noqa: PLR0917  # DeepSpeed's signature
    args: object = None,
    model: nn.Module | None = None,
    optimizer: ClientOptimizer | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: ClientScheduler | None = None,
    distributed_port: int | None = None,
    mpu: object = None,
    dist_init_required: bool | None = None,  # noqa: FBT001  # DeepSpeed's signature
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: object = None,
    config_params: ConfigSource | None = None,
) -> tuple[PlaitEngine, torch.optim.Optimizer | None, RankLoader | None, Scheduler | None]:
    """Make a training engine of a model and a DeepSpeed configuration (collective).

    The model is changed in place: it moves to this rank's device and its states are sharded as
    ``zero_optimization.stage`` says. torch.distributed is initialised where it is not: for the
    ranks of the launcher, or for this process alone.

    Args:
        args: The command line's; its `deepspeed_config` is the configuration where none is passed,
            its `local_rank` chooses the device where the launcher does not.
        model: Any module with its parameters in place.
        optimizer: A torch optimizer that has not stepped, or a callable that makes one of
            parameters. It wins over the configuration's; a warning says so.
        model_parameters: Parameters, or dicts of groups with options of their own, for the
            configuration's optimizer; default: all that are trainable.
        training_data: A dataset to make the loader of.
        lr_scheduler: A torch schedule bound to `optimizer`, or a callable that makes a schedule of
            the optimizer. It wins over the configuration's; a warning says so. The engine steps it.
        distributed_port: Port of the first rank where the launcher has not set ``MASTER_PORT``.
        mpu: Must be None.
        dist_init_required: False: torch.distributed must be initialised already.
        collate_fn: Makes a batch of the loader's samples.
        config: A JSON file, or what stands in one.
        mesh_param: Must be None.
        config_params: An older name of `config`.

    Returns:
        The engine; the optimizer over this rank's shards, the loader and the schedule, or None for
        what was neither passed nor configured.

    Raises:
        ConfigError: Everything that is wrong with the configuration.
        TypeError: An argument of a kind that cannot be used.
        ValueError: An argument that cannot be used, and why.
        PeerFailed: One of these on another rank only.

    Example:
        >>> import torch
        >>> engine, optimizer, loader, schedule = initialize(
        ...     model=torch.nn.Linear(3, 1),
        ...     config={"train_batch_size": 4, "optimizer": {"type": "Adam"}},
        ... )
        plait: Linear, 4 parameters, fp32, ZeRO stage 0, 1 rank on ...
          batch 4 = 1 x 1 x 4 (ranks x accumulation x micro-batch)
          optimizer AdamW, gradients clipped to norm 1 (absent: 1.0, as in DeepSpeed)
        >>> loss = engine(torch.ones(4, 3, device=engine.device)).square().mean()
        >>> _ = engine.backward(loss)
        >>> engine.step()
        >>> engine.global_steps
        1
        >>> torch.distributed.destroy_process_group()
    """
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ValueError(f"initialize: {name}: {_NOT_BUILT[name]}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize: model: expected a torch.nn.Module, got {model!r}")
    given = _arguments(args)
    source = _source(config, config_params, given.get("deepspeed_config"))
    _join(dist_init_required, distributed_port)
    number = local_rank(given.get("local_rank"))  # type: ignore[arg-type]  # argparse's int
    device = own_device(number)

    def check() -> _Plan:
        check_client_scheduler(lr_scheduler, optimizer)
        if training_data is not None:
            check_dataset(training_data)
        return _plan(source, model, optimizer, model_parameters, lr_scheduler)

    plan = agreed(check)
    settings = plan.config
    _move(model, device)
    zero = partition_as(settings, model)
    made = schedule = loader = None
    if plan.recipe is not None:
        made = plan.recipe.make(zero)
        schedule = make_scheduler(lr_scheduler, settings.scheduler, made)
    if training_data is not None:
        loader = _loader(training_data, collate_fn, settings, device)
    parts = EngineParts(
        module=model,
        zero=zero,
        config=settings,
        optimizer=made,
        lr_scheduler=schedule,
        training_dataloader=loader,
        device=device,
        local_rank=number,
    )
    if zero.rank == 0:
        print(_summary(parts, plan.fates), flush=True)
        _warn_of_both(plan.fates, optimizer=optimizer, lr_scheduler=lr_scheduler)
    return PlaitEngine(parts), made, loader, schedule


def _move(model: nn.Module, device: torch.device) -> None:
    """Move a model that is elsewhere; what cannot be moved is left for `partition` to name."""
    held = [*model.parameters(), *model.buffers()]
    if any(tensor.device not in (device, _META) for tensor in held):
        model.to(device)


def _loader(
    training_data: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    config: TrainingConfig,
    device: torch.device,
) -> RankLoader:
    return RankLoader(
        training_data,
        batch_size=config.batch.micro_batch_size,
        seed=config.seed or 0,
        drop_last=config.drop_last,
        collate_fn=collate_fn,
        pin_memory=device.type == "cuda",
    )


def _plan(
    source: str | Path | Mapping[str, object],
    model: nn.Module,
    optimizer: ClientOptimizer | None,
    model_parameters: Iterable[Any] | None,
    lr_scheduler: ClientScheduler | None,
) -> _Plan:
    config, fates = read_training_config(
        source,
        num_ranks=dist.get_world_size(),
        optimizer_given=optimizer is not None,
        scheduler_given=lr_scheduler is not None,
    )
    parameters = parameter_list(model_parameters)
    recipe = None
    if optimizer is not None:
        recipe = recipe_of(optimizer, model, parameters)
    elif config.optimizer is not None:
        recipe = recipe_of_config(config.optimizer, parameters)
    elif lr_scheduler is not None:
        raise ValueError(
            "lr_scheduler: there is no optimizer to schedule; pass one, or name it in the "
            "configuration"
        )
    if recipe is not None:
        check_members(recipe.groups, model)
        rate = scheduler_rate(config.scheduler)
        if rate is not None:
            rate.check_groups(recipe.num_groups)
    return _Plan(config=config, fates=fates, recipe=recipe)


def _arguments(args: object) -> Mapping[str, object]:
    """What the command line says, by name."""
    if args is None:
        return {}
    if isinstance(args, Mapping):
        return args
    try:
        return vars(args)
    except TypeError:
        raise TypeError(
            f"initialize: args: expected what argparse gives, got {type(args).__name__}"
        ) from None


def _source(*given: object) -> str | Path | Mapping[str, object]:
    """The one configuration that was given, as `config`, `config_params` or by `args`."""
    found: list[str | Path | Mapping[str, object]] = []
    for value in given:
        if isinstance(value, Mapping):
            found.append(value)
        elif isinstance(value, str | os.PathLike):
            found.append(Path(value))
        elif value is not None:
            raise TypeError(
                f"initialize: config: expected a path or a dict, got {type(value).__name__}"
            )
    if not found:
        raise ValueError(
            "initialize: no configuration: pass config=, a path or a dict, or args with "
            "--deepspeed_config"
        )
    if any(other != found[0] for other in found):
        raise ValueError(
            "initialize: two different configurations, of config, config_params and "
            "args.deepspeed_config; pass one of them"
        )
    return found[0]


def _join(required: bool | None, port: int | None) -> None:  # noqa: FBT001  # passed on
    if required is False and not dist.is_initialized():
        raise ValueError(
            "initialize: dist_init_required=False, but torch.distributed is not initialised; call "
            "plait.init_distributed() before"
        )
    init_distributed(distributed_port=port)


def _warn_of_both(fates: tuple[Fate, ...], *, optimizer: object, lr_scheduler: object) -> None:
    """Say which one counts where one is passed and one configured."""
    unused = {fate.path: fate.value for fate in fates if fate.became is Became.OFF}
    for path, passed in (("optimizer", optimizer), ("scheduler", lr_scheduler)):
        if passed is not None and path in unused:
            warnings.warn(
                f"initialize: the {path} that was passed is used, not the configuration's "
                f"{unused[path]}",
                stacklevel=3,
            )


def _summary(parts: EngineParts, fates: tuple[Fate, ...]) -> str:
    """What is about to be trained, and which keys ask for nothing that changes it."""
    config, batch = parts.config, parts.config.batch
    optimizer = "none, for evaluation"
    if parts.optimizer is not None:
        optimizer = type(parts.optimizer).__name__.removeprefix("Zero")
    schedule = "" if parts.lr_scheduler is None else f", {scheduler_name(parts.lr_scheduler)}"
    numel = sum(parameter.numel() for parameter in parts.module.parameters())
    clipping = config.gradient_clipping
    ranks = f"{batch.num_ranks} rank{'s' * (batch.num_ranks != 1)} on {parts.device.type}"
    factors = f"{batch.num_ranks} x {batch.accumulation_steps} x {batch.micro_batch_size}"
    precision = "bf16" if config.bf16 else "fp32"
    clipped = f"gradients clipped to norm {clipping:g}" if clipping else "gradients not clipped"
    notes = [fate.note for fate in fates if fate.path == "gradient_clipping" and fate.note]
    clipped += f" ({notes[0]})" if notes else ""
    model = f"{type(parts.module).__name__}, {numel:,} parameters"
    lines = [
        f"plait: {model}, {precision}, ZeRO stage {config.stage}, {ranks}",
        f"  batch {batch.train_batch_size} = {factors} (ranks x accumulation x micro-batch)",
        f"  optimizer {optimizer}{schedule}, {clipped}",
    ]
    if not config.wire.is_plain:
        lines.append(f"  on the wire: {_told(config.wire)}")
    for became in (Became.DECIDED, Became.OFF):
        paths = [fate.path for fate in fates if fate.became is became]
        if paths:
            lines.append(f"  {became}: {', '.join(paths)}")
    return "\n".join(lines)


def _told(wire: WireConfig) -> str:
    """What travels as codes."""
    parts = ["parameters in 8 bits"] if wire.weights else []
    if wire.frozen_weights and not wire.weights:
        parts.append("parameters that are not trained in 8 bits")
    parts += ["gradients in 4 bits"] if wire.gradients else []
    if wire.ranks_a_node > 1:
        parts.append(f"nodes of {wire.ranks_a_node} ranks")
    if wire.err_beta is not None:
        parts.append(f"error feedback of beta {wire.err_beta:g}")
    return ", ".join(parts)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a command line, as DeepSpeed does.

    ``--local_rank``, which older launchers pass, stays the caller's to add; it is read where it is.

    Example:
        >>> parser = add_config_arguments(argparse.ArgumentParser())
        >>> parser.parse_args(["--deepspeed_config", "ds.json"]).deepspeed_config
        'ds.json'
    """
    group = parser.add_argument_group("plait", "options in DeepSpeed's names")
    group.add_argument(
        "--deepspeed", action="store_true", help="accepted, as DeepSpeed's launcher passes it"
    )
    group.add_argument("--deepspeed_config", metavar="FILE", help="configuration in JSON")
    return parser
