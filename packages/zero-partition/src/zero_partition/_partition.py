"""`partition`: the verb that this library is about."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_partition._choose_wire import choose_wire
from zero_partition._errors import RanksDisagree
from zero_partition._exchange import exchange
from zero_partition._gathers import Gathers
from zero_partition._hooks import Hooks
from zero_partition._nodes_wire import HierarchicalWire
from zero_partition._order import RunOrder
from zero_partition._precision import TRAINABLE_DTYPES, Precision
from zero_partition._reductions import Reductions
from zero_partition._rendezvous import Rendezvous
from zero_partition._residence import residence_of
from zero_partition._resting import NAME
from zero_partition._segment import Cut
from zero_partition._transport import Transport
from zero_partition._unit import Unit, build_unit
from zero_partition._units import UnitSpec, check_parameters, find_units
from zero_partition._whole import WholeValues, broadcast_buffers
from zero_partition._wire import LossyWire, NodesWire, TorchWire, Wire
from zero_partition._zero import Zero


def partition(
    model: nn.Module,
    *,
    stage: int,
    group: dist.ProcessGroup | None = None,
    units: Iterable[nn.Module] | None = None,
    precision: Precision | None = None,
    bucket_numel: int | None = None,
    overlap: bool = True,
    skip_nonfinite: bool = False,
    wire: Wire | None = None,
    mesh: DeviceMesh | None = None,
    secondary: Literal["local"] | None = None,
) -> Zero:
    """Train `model` data-parallel, with its states sharded over the ranks (collective).

    The model is changed in place: its parameters move into flat buffers and hooks are attached. It
    is used as before; after ``loss.backward()`` the gradients are summed over the ranks. Whatever
    the stage, bucket size and overlap, the numbers are those of plain data parallelism: each
    micro-batch's gradients are added over the ranks in rank order, in float32 or wider, then added
    to the accumulated ones, and divided once. Rank 0's parameters and buffers become everyone's.

    Args:
        model: Any module with plain, dense parameters that hold their values.
        stage: 0 plain data parallelism; 1 shards optimizer state, 2 gradients too, 3 parameters
            too.
        group: The ranks to shard over; default: all, or this process alone where torch.distributed
            is not initialised.
        units: Submodules whose parameters travel together; default: the outermost repeated blocks.
            Whatever is left travels with the model itself.
        precision: Dtypes of parameters and masters; default: parameters stay as they are.
        bucket_numel: Most elements of a message, over all ranks, at least 1; default: a message a
            unit. A memory and latency choice: results do not change.
        overlap: Start reductions during backward and gathers ahead of need.
        skip_nonfinite: Let ``step()`` skip, on all ranks, when a gradient is infinite or NaN.
        wire: How bytes move; default `SharedMemoryWire` where all ranks are on one host and train
            on its CPU, and `TorchWire` elsewhere.
        mesh: All ranks as (node, local), instead of `group`; for a wire over nodes: by default
            `HierarchicalWire`, or `comm_quant.QuantizedWire`.
        secondary: "local", at stage 3 and with such a wire: what forward brings to a node stays
            there, divided among its ranks, and backward gathers it within the node.

    Returns:
        The handle: gradients, optimizers, memory, whole values, checkpoints.

    Raises:
        ValueError: An argument or the model cannot be used; nothing has been changed then.
        TypeError: A parameter is of a class with a layout of its own.
        RanksDisagree: The ranks brought different models or options.

    Source:
        Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
        SC 2020.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> zero = partition(model, stage=2)
        >>> optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> optimizer.step()
        True
    """
    precision = Precision() if precision is None else precision
    residence = residence_of(stage)
    if bucket_numel is not None and (isinstance(bucket_numel, bool) or bucket_numel < 1):
        raise ValueError(f"bucket_numel must be at least 1, got {bucket_numel}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"partition: expected a torch.nn.Module, got {type(model).__name__}")
    _check_wire(wire, stage)
    check_parameters(model)
    specs = find_units(model, units)
    _check_dtypes(specs, precision)
    group = _resolve(_group_of(group, mesh))
    if wire is None and mesh is not None:
        wire = HierarchicalWire()
    _check_nodes(wire, mesh, secondary, stage=stage)
    device = next(model.parameters()).device
    transport = Transport(group, device=device)
    options = f"stage={stage} bucket_numel={bucket_numel} overlap={overlap} {precision} "
    options += f"skip_nonfinite={skip_nonfinite} wire={_name(wire)} secondary={secondary}"
    _check_same(transport, specs, options)
    transport.use(_chosen(wire, transport, specs, device))
    broadcast_buffers(model, transport)
    cut = Cut(
        residence=residence,
        rank=transport.rank,
        num_ranks=transport.num_ranks,
        bucket_numel=bucket_numel,
    )
    built = []
    for index, spec in enumerate(specs):
        unit = build_unit(spec, index, precision=precision, cut=cut, transport=transport)
        for name, parameter in spec.parameters:
            parameter.__dict__[NAME] = name
        if residence.parameters_sharded:
            for segment in unit.segments:
                segment.empty()
            unit.is_whole = False
        built.append(unit)
    return _assemble(
        model,
        built,
        stage=stage,
        transport=transport,
        precision=precision,
        overlap=overlap,
        skip_nonfinite=skip_nonfinite,
        secondary=secondary is not None,
    )


def _assemble(
    model: nn.Module,
    units: list[Unit],
    *,
    stage: int,
    transport: Transport,
    precision: Precision,
    overlap: bool,
    skip_nonfinite: bool,
    secondary: bool,
) -> Zero:
    num_parameters = sum(unit.num_trainable for unit in units)
    rendezvous = Rendezvous(transport.lane, payload_words=2 + num_parameters // 63)
    order = RunOrder(len(units))
    gathers = Gathers(
        units,
        transport=transport,
        rendezvous=rendezvous,
        sharded=residence_of(stage).parameters_sharded,
        prefetch=overlap,
        order=order,
        secondary=secondary,
    )

    def end_of_backward() -> None:
        gathers.close()
        gathers.release_all()

    reductions = Reductions(
        units,
        transport=transport,
        rendezvous=rendezvous,
        overlap=overlap,
        on_flush=end_of_backward,
        on_join=gathers.join,
        order=order,
    )
    Hooks(units, gathers=gathers, reductions=reductions, order=order, precision=precision)
    whole = WholeValues(units, gathers=gathers, transport=transport, rendezvous=rendezvous)
    return Zero(
        model,
        stage=stage,
        units=units,
        gathers=gathers,
        reductions=reductions,
        whole=whole,
        transport=transport,
        rendezvous=rendezvous,
        skip_nonfinite=skip_nonfinite,
    )


def _check_wire(wire: Wire | None, stage: int) -> None:
    """Refuse a wire that would change what a rank keeps whole."""
    if stage < 3 and isinstance(wire, LossyWire) and wire.lossy_gathers:
        raise ValueError(
            f"wire: {type(wire).__name__} changes the parameters that it gathers; that needs "
            f"stage=3, where each rank keeps its exact shard apart, got stage={stage}; let it "
            "change gradients only, or use stage 3"
        )


def _group_of(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The ranks: those of the mesh where there is one."""
    if mesh is None:
        return group
    if group is not None:
        raise ValueError("mesh: it says who the ranks are; leave group out")
    if mesh.ndim != 2:
        raise ValueError(
            f"mesh: expected two axes, nodes and the ranks of a node, got {mesh.ndim}; make it "
            "with init_device_mesh(device, (num_nodes, num_local))"
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(dist.get_world_size())):
        raise ValueError(
            f"mesh: expected all {dist.get_world_size()} ranks in order, node by node, got "
            f"{mesh.mesh.tolist()}; over some of them pass group= and a wire that knows its nodes"
        )
    return dist.group.WORLD


def _check_nodes(
    wire: Wire | None, mesh: DeviceMesh | None, secondary: str | None, *, stage: int
) -> None:
    """Tell the wire about the nodes; refuse what needs nodes where there are none."""
    if secondary not in (None, "local"):
        raise ValueError(f"secondary must be 'local' or None, got {secondary!r}")
    if secondary is not None and stage < 3:
        raise ValueError(
            f"secondary: parameters are gathered for backward at stage 3 only, got stage={stage}"
        )
    if mesh is None and secondary is None:
        return
    if not isinstance(wire, NodesWire):
        name = "mesh" if mesh is not None else "secondary"
        raise ValueError(
            f"{name}: needs a wire over nodes, HierarchicalWire(num_local=...) or "
            f"comm_quant.QuantizedWire(), got {_name(wire)}"
        )
    if mesh is not None:
        wire.spread_over(mesh.size(1))


def _name(wire: Wire | None) -> str:
    return "the default" if wire is None else type(wire).__name__


def _chosen(
    wire: Wire | None, transport: Transport, specs: list[UnitSpec], device: torch.device
) -> Wire:
    if wire is not None or transport.lane is None:
        return TorchWire() if wire is None else wire
    sizes = [p.numel() * p.element_size() for spec in specs for _, p in spec.parameters]
    return choose_wire(transport.lane.control, device, parameter_bytes=sum(sizes))


def _resolve(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise ValueError("group: torch.distributed is not initialised in this process")
        return None
    resolved = dist.group.WORLD if group is None else group
    if dist.get_rank(resolved) < 0:
        raise ValueError(
            f"group: this process (rank {dist.get_rank()}) is not a member of the group; call "
            "partition() on its members only"
        )
    return resolved


def _check_dtypes(specs: list[UnitSpec], precision: Precision) -> None:
    for spec in specs:
        for name, parameter in spec.parameters:
            if parameter.requires_grad and precision.dtype_of(parameter) not in TRAINABLE_DTYPES:
                raise ValueError(
                    f"partition: trainable parameter {name!r} has dtype {parameter.dtype}; use "
                    "float32, float64, bfloat16 or float16, or freeze it"
                )


def _check_same(transport: Transport, specs: list[UnitSpec], options: str) -> None:
    """Refuse ranks that brought another model or other options, saying where they differ."""
    if transport.lane is None:
        return
    lines = [options]
    for spec in specs:
        lines.append(f"unit {spec.name!r}")
        lines += [
            f"{name}: shape {tuple(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}"
            for name, p in spec.parameters
        ]
    lines += [
        f"buffer {n}: {tuple(b.shape)}, {b.dtype}" for n, b in specs[0].module.named_buffers()
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(exchange(digest, transport.lane.control))) == 1:
        return
    listings = exchange(lines, transport.lane.control)
    other = next(rank for rank, found in enumerate(listings) if found != listings[0])
    mine, theirs = listings[0], listings[other]
    at = next(
        (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
        min(len(mine), len(theirs)),
    )
    told = [listing[at] if at < len(listing) else "nothing" for listing in (mine, theirs)]
    raise RanksDisagree(
        f"partition: the ranks do not match: rank 0 has {told[0]}; rank {other} has {told[1]}"
    )
