"""The hooks on modules, outputs and parameters through which a partitioned model drives itself.

Forward: a unit is gathered before it and let go after it; the model's own unit and the one that
runs last are kept for backward. Backward: a unit is gathered when the gradient of one of its
outputs is known, and let go when the gradients of all its parameters and inputs are.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zero_partition._errors import OrderError
from zero_partition._gathers import Gathers
from zero_partition._order import RunOrder
from zero_partition._precision import Precision
from zero_partition._reductions import Reductions
from zero_partition._rendezvous import Place
from zero_partition._tensors_in import tensors_in
from zero_partition._unit import Unit


class Hooks:
    """Attaches itself to the units of a model.

    Args:
        units: All units; the first is the model's own.
        gathers: Makes units whole.
        reductions: Takes gradients.
        order: Is told in which order units run.
        precision: Says whether inputs are cast.
    """

    def __init__(
        self,
        units: list[Unit],
        *,
        gathers: Gathers,
        reductions: Reductions,
        order: RunOrder,
        precision: Precision,
    ) -> None:
        self._units, self._gathers, self._reductions = units, gathers, reductions
        self._order, self._precision = order, precision
        self._model_runs = False
        self._pass_place = Place.EVALUATION
        for unit in units:
            self._attach(unit)
            for index, buffers in enumerate(reductions.buffers[unit.index]):
                for slot, parameter in enumerate(buffers.segment.parameters):
                    self._watch((unit.index, index), slot, parameter)

    def _attach(self, unit: Unit) -> None:
        before, after = self._before_forward, self._after_forward

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
        def pre(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return before(unit, args, kwargs)

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
        def post(_: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            after(unit, output)

        unit.module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True)
        unit.module.register_forward_hook(post)
        if unit.is_root:
            unit.module.register_forward_hook(self._model_ended, always_call=True)

    def _watch(self, place: tuple[int, int], slot: int, parameter: nn.Parameter) -> None:
        # Autograd holds a parameter's hooks where the garbage collector cannot see them, so they
        # may not keep the model alive; the module's hooks do.
        here = weakref.ref(self)

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
        def before_accumulation(_: Tensor) -> None:
            if (hooks := here()) is not None:
                hooks._reductions.begin()  # clears .grad, into which autograd would add

        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
        def after_accumulation(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and (hooks := here()) is not None:
                hooks._take(place, slot, gradient)

        parameter.register_hook(before_accumulation)
        parameter.register_post_accumulate_grad_hook(after_accumulation)

    def _take(self, place: tuple[int, int], slot: int, gradient: Tensor) -> None:
        unit = self._units[place[0]]
        self._reductions.arrive(unit, place[1], slot, gradient)
        self._release_if_complete(unit)

    # Forward.

    def _before_forward(
        self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        with_grad = torch.is_grad_enabled()
        if _in_backward():  # recomputation of a checkpointed part
            self._reductions.begin()
            self._gathers.need(unit, Place.BACKWARD)
            unit.recomputes += with_grad
        else:
            self._enter_pass(unit, Place.FORWARD if with_grad else Place.EVALUATION)
        if with_grad and self._gathers.sharded and not unit.is_root:
            self._watch_inputs(unit, args, kwargs)
        if unit.is_root and self._precision.cast_inputs and self._precision.param is not None:
            return _cast(args, self._precision.param), _cast(kwargs, self._precision.param)
        return None

    def _enter_pass(self, unit: Unit, own: Place) -> None:
        if unit.is_root:
            self._gathers.close()
            self._reductions.check_alive()
            self._pass_place, self._model_runs = own, True
            if own is Place.FORWARD:
                self._check_unchanged()
                self._order.begin()
        place = self._pass_place if self._model_runs else own
        self._gathers.need(unit, place)
        if place is Place.FORWARD:
            unit.uses += 1
            self._order.record(unit.index)

    def _watch_inputs(self, unit: Unit, args: object, kwargs: object) -> None:
        inputs = {id(t): t for t in tensors_in((args, kwargs)) if t.requires_grad}
        watch = _InputWatch(inputs.keys())

        def done(_: Tensor, *, key: int) -> None:
            if watch.is_last(key):
                unit.inputs_done = True
                self._release_if_complete(unit)

        # Not torch's register_multi_grad_hook: its hooks refer to the graph in which they hang, and
        # what the graph holds would stay until the garbage collector comes by.
        for key, tensor in inputs.items():
            unit.has_input_hooks = True
            tensor.register_hook(torch.compiler.disable(functools.partial(done, key=key)))

    def _after_forward(self, unit: Unit, output: object) -> None:
        outputs = tensors_in(output)
        graph = [t for t in outputs if t.requires_grad] if torch.is_grad_enabled() else []
        if torch.is_grad_enabled() and not outputs and self._gathers.sharded and not unit.is_root:
            raise OrderError(
                f"unit {unit.name!r}: no tensor was found in what its forward returned, so that "
                "its backward could not be noticed; return tensors, containers or dataclasses, or "
                "choose other units (partition(units=...))"
            )
        for tensor in graph:
            tensor.register_hook(self._before_backward(unit))
        if _in_backward():
            return
        if torch.is_grad_enabled() and not graph and unit.uses:
            unit.uses -= 1  # nothing will come back through this forward
        if not (self._gathers.is_kept(unit) and unit.uses):
            self._gathers.release(unit)

    def _model_ended(self, *_: object) -> None:
        if _in_backward():
            return
        self._model_runs = False
        self._order.end()
        self._gathers.close()

    def _check_unchanged(self) -> None:
        """Refuse parameters that came, moved or thawed after `partition`."""
        model = self._units[0].module
        known = {id(p) for unit in self._units for s in unit.segments for p in s.parameters}
        for name, parameter in model.named_parameters():
            if id(parameter) not in known:
                raise OrderError(f"parameter {name!r} was added after partition(); add it before")
        for unit in self._units:
            for segment in unit.segments:
                segment.adopt_edits()
                if not segment.trainable and any(p.requires_grad for p in segment.parameters):
                    raise OrderError(
                        f"a parameter of unit {unit.name!r} was frozen when partition() was called "
                        f"and is trainable now (one of {segment.names}); thaw it before"
                    )

    # Backward.

    def _before_backward(self, unit: Unit) -> Callable[[Tensor], None]:
        @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
        def hook(_: Tensor) -> None:
            self._reductions.begin()
            self._gathers.need(unit, Place.BACKWARD)

        return hook  # type: ignore[no-any-return]  # the same

    def _release_if_complete(self, unit: Unit) -> None:
        if self._gathers.sharded and unit.backward_complete(self._reductions.task):
            self._gathers.release(unit)


class _InputWatch:
    """Counts the inputs of one forward whose gradients are known, anew in each backward.

    Args:
        keys: Of the inputs.
    """

    def __init__(self, keys: Iterable[int]) -> None:
        self._all = frozenset(keys)
        self._task, self._missing = -1, set(self._all)

    def is_last(self, key: int) -> bool:
        """Whether with this one all are known."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._missing = task, set(self._all)
        self._missing.discard(key)
        return not self._missing


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
