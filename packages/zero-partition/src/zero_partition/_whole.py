"""Whole values of a partitioned model: to read, to edit, to load into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_partition._errors import RestingError
from zero_partition._gathers import Gathers
from zero_partition._gradients import GradientBuffers
from zero_partition._rendezvous import Place, Rendezvous
from zero_partition._transport import Transport
from zero_partition._unit import Unit


class WholeValues:
    """Gathers for reading and editing, outside the passes of training.

    Args:
        units: All units; the first is the model's own.
        gathers: Makes units whole.
        transport: How messages travel.
        rendezvous: Where ranks meet.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        gathers: Gathers,
        transport: Transport,
        rendezvous: Rendezvous,
    ) -> None:
        self._units, self._gathers = units, gathers
        self._transport, self._rendezvous = transport, rendezvous
        for unit in units:
            self._let_load(unit)

    @property
    def _model(self) -> nn.Module:
        return self._units[0].module

    def enter(self) -> None:
        """Meet the other ranks before gathering outside a pass."""
        self._gathers.close()
        self._rendezvous.meet(Place.WHOLE)

    @contextmanager
    def gathered(self, *, modify: bool) -> Iterator[None]:
        """See `Zero.gathered`."""
        if self._gathers.pinned:
            raise RestingError("gathered() inside gathered(): everything is whole already")
        self.enter()
        segments = [segment for unit in self._units for segment in unit.segments]
        for segment in segments:
            segment.adopt_edits()
        self._gathers.gather_now(self._units, to_edit=True)
        for segment in segments:
            segment.note_versions()
        self._gathers.pinned = True
        try:
            yield
        finally:
            self._gathers.pinned = False
            edited = [s.names[0] for s in segments if s.residence.parameters_sharded and s.edited()]
            if modify:
                for segment in segments:
                    segment.reattach()
                    self._transport.broadcast(segment.whole())
                    segment.adopt_full()
            for segment in segments:
                segment.note_versions()
            self._gathers.release_all()
        if edited and not modify:
            raise RestingError(
                f"gathered(): parameters were edited (near {edited[0]!r}) and the edits are lost; "
                "use gathered(modify=True), which makes rank 0's values everyone's"
            )

    def state_dict(self) -> dict[str, Any]:
        """See `Zero.state_dict`."""
        self.enter()
        copies: dict[Tensor, Tensor] = {}
        for unit in self._units:
            self._gathers.gather_now([unit], to_edit=False)
            for segment in unit.segments:
                for parameter, view in zip(
                    segment.parameters, segment.views(segment.full), strict=True
                ):
                    copies[parameter] = view.clone()
            self._gathers.release(unit)
        return _named_state(self._model, copies)

    def gradients(self, buffers: Sequence[GradientBuffers]) -> dict[str, Tensor | None]:
        """See `Zero.gradients`."""
        self.enter()
        found: dict[str, Tensor | None] = {}
        for held in buffers:
            segment = held.segment
            whole = held.whole() if held.used else None
            views = None if whole is None else segment.views(whole)
            for slot, name in enumerate(segment.names):
                used = views is not None and slot in held.used
                found[name] = views[slot].clone() if views is not None and used else None
        return {n: found[n] for n, _ in self._model.named_parameters() if n in found}

    # model.load_state_dict: each unit is whole while its module loads.

    def _let_load(self, unit: Unit) -> None:
        unit.module.register_load_state_dict_pre_hook(self._before_load(unit))
        unit.module.register_load_state_dict_post_hook(self._after_load(unit))

    def _before_load(self, unit: Unit) -> Any:
        def hook(*loading: Any) -> None:
            local_metadata: dict[str, Any] = loading[3]  # module, state_dict, prefix, this, ...
            if local_metadata.get("assign_to_params_buffers", False):
                raise ValueError(
                    "load_state_dict(assign=True) would replace partitioned parameters; "
                    "load with assign=False"
                )
            if self._gathers.pinned:
                return
            self.enter()
            for segment in unit.segments:
                segment.adopt_edits()
            self._gathers.gather_now([unit], to_edit=True)

        return hook

    def _after_load(self, unit: Unit) -> Any:
        def hook(*_: object) -> None:
            if self._gathers.pinned:
                return
            for segment in unit.segments:
                segment.adopt_full()
            self._gathers.release(unit)

        return hook


def _named_state(model: nn.Module, copies: dict[Tensor, Tensor]) -> dict[str, Any]:
    """What ``model.state_dict()`` would hold, from copies of the parameters."""
    state: dict[str, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                state[dot + name] = copies[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                state[dot + name] = buffer.detach().clone()
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            state[dot + "_extra_state"] = module.get_extra_state()
    return state


def named_tensors(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, list[str]]]:
    """Each parameter once, by its first name, and the other names it goes by."""
    first: dict[nn.Parameter, str] = {}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in first:
            aliases.setdefault(first[parameter], []).append(name)
        else:
            first[parameter] = name
    return {name: parameter for parameter, name in first.items()}, aliases


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that ``state_dict`` stores, each once, by first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            stored = name not in module._non_persistent_buffers_set
            if buffer is not None and stored and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def broadcast_buffers(model: nn.Module, transport: Transport) -> None:
    """Make rank 0's buffers everyone's, non-persistent ones included."""
    for buffer in model.buffers():
        with torch.no_grad():
            transport.broadcast(buffer)
