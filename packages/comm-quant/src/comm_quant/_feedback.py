"""Error feedback: what a message lost is added, on average, to the ones after it."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comm_quant._codec import BlockQuant, Codec
from comm_quant._quantize import dequantize, quantize

_KEPT = BlockQuant(bits=8, block_numel=256)
_PARTS = ("codes", "scales", "counts")


@dataclass(slots=True)
class _State:
    codes: Tensor
    scales: Tensor
    numel: int
    num_steps: int

    def error(self) -> Tensor:
        """The error, float32."""
        return dequantize(self.codes, self.scales, _KEPT, numel=self.numel)


class ErrorFeedback:
    """LoCo's error feedback for quantized reductions: a moving average of the error, in int8.

    For each message and step, with g what is to be sent and e the state::

        h  = g + e
        e' = beta * e + (1 - beta) * (h - dequantize(quantize(h)))

    What is sent over many steps then adds up to what was to be sent, but for a rest that does not
    grow. Every hop, peer and run has a state of its own, named by the ``key`` of the reduction; it
    takes one byte an element.

    Args:
        beta: Weight of the past, at least 0 and below 1; DeepSpeed's ``err_beta``.
        reset_steps: A state begins at zero again after so many reductions of its key; DeepSpeed's
            ``reset_T``, there counted over all tensors together.

    Raises:
        ValueError: One of them is out of range.

    Source:
        Xie et al., "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", 2024.
    """

    def __init__(self, *, beta: float = 0.8, reset_steps: int = 1024) -> None:
        if not (math.isfinite(beta) and 0 <= beta < 1):
            raise ValueError(f"ErrorFeedback: beta must be at least 0 and below 1, got {beta!r}")
        if isinstance(reset_steps, bool | float) or reset_steps < 1:
            raise ValueError(
                f"ErrorFeedback: reset_steps must be a whole number from 1 on, got {reset_steps!r}"
            )
        self.beta, self.reset_steps = float(beta), reset_steps
        self._states: dict[Hashable, _State] = {}

    def corrected(self, key: Hashable, part: Tensor) -> Tensor:
        """``g + e`` in float32."""
        state = self._state(key, part.numel())
        return part.float() if state is None else part.float() + state.error().to(part.device)

    def note(
        self, key: Hashable, given: Tensor, codes: Tensor, scales: Tensor, spec: Codec
    ) -> None:
        """Take in what became of `given`, which `corrected` returned."""
        state = self._state(key, given.numel())
        num_steps = 1 if state is None else state.num_steps + 1
        if num_steps >= self.reset_steps:
            self._states.pop(key, None)
            return
        error = given - dequantize(codes, scales, spec, numel=given.numel())
        error.nan_to_num_(0.0, 0.0, 0.0)  # an overflow is the step's to notice, not the next one's
        error *= 1 - self.beta
        if state is not None:
            error += state.error().to(given.device).mul_(self.beta)
        kept = quantize(error, _KEPT)
        self._states[key] = _State(*kept, numel=given.numel(), num_steps=num_steps)

    def _state(self, key: Hashable, numel: int) -> _State | None:
        """The state of a buffer of this length."""
        state = self._states.get(key)
        return None if state is None or state.numel != numel else state

    @property
    def num_bytes(self) -> int:
        """Bytes that the states take."""
        return sum(each.codes.nbytes + each.scales.nbytes for each in self._states.values())

    def clear(self) -> None:
        """Forget all errors."""
        self._states.clear()

    def state_dict(self, *, num_ranks: int) -> dict[str, Any]:
        """This rank's states, to be saved beside the model's.

        Args:
            num_ranks: Ranks of the group; the states say nothing to a group of another size.
        """
        return {
            "num_ranks": num_ranks,
            "states": [
                (key, state.numel, state.num_steps, state.codes, state.scales)
                for key, state in self._states.items()
            ],
        }

    def tensors(self, owner: Hashable) -> dict[str, Tensor]:
        """The states of which the keys are tuples that begin with `owner`, by name, 1-D.

        Raises:
            TypeError: The rest of a key is more than numbers, strings and tuples of them.
        """
        found: dict[str, Tensor] = {}
        for key, state in self._states.items():
            if isinstance(key, tuple) and key[0] == owner:
                name = repr(key[1:])
                if _read_literal(name) != key[1:]:
                    raise TypeError(
                        f"ErrorFeedback: the key {name} cannot be saved; make keys of numbers and "
                        "strings"
                    )
                counts = torch.tensor([state.numel, state.num_steps])
                for part, tensor in zip(_PARTS, (state.codes, state.scales, counts), strict=True):
                    found[f"{name}.{part}"] = tensor.view(-1)
        return found

    def load_tensors(self, saved: Mapping[str, Tensor], owner: Hashable) -> None:
        """Go on from what `tensors` returned for `owner`, whose other states are forgotten.

        Raises:
            ValueError: A state is not whole, or a name is none.
        """
        found: dict[tuple[Hashable, ...], dict[str, Tensor]] = {}
        for name, tensor in saved.items():
            text, _, part = name.rpartition(".")
            key = _read_literal(text)
            if not isinstance(key, tuple) or part not in _PARTS:
                raise ValueError(f"ErrorFeedback: no state is called {name!r}")
            found.setdefault((owner, *key), {})[part] = tensor
        states: dict[Hashable, _State] = {key: _state_of(key, each) for key, each in found.items()}
        for key in list(self._states):
            if isinstance(key, tuple) and key[0] == owner:
                del self._states[key]
        self._states.update(states)

    def load_state_dict(self, saved: Mapping[str, Any], *, num_ranks: int) -> None:
        """Go on from saved states; those of another number of ranks begin at zero, and it is said.

        Args:
            saved: What `state_dict` returned on the rank of the same number.
            num_ranks: Ranks of the group now.
        """
        self.clear()
        if saved["num_ranks"] != num_ranks:
            warnings.warn(
                f"ErrorFeedback: the saved errors are those of {saved['num_ranks']} ranks, this "
                f"group has {num_ranks}; they begin at zero again",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        for key, numel, num_steps, codes, scales in saved["states"]:
            self._states[key] = _State(codes, scales, numel, num_steps)


def _state_of(key: tuple[Hashable, ...], parts: Mapping[str, Tensor]) -> _State:
    if parts.keys() != set(_PARTS) or parts["counts"].numel() != 2:
        raise ValueError(f"ErrorFeedback: the state {key[1:]} is not whole")
    numel, num_steps = parts["counts"].tolist()
    codes, scales = parts["codes"], parts["scales"]
    if codes.numel() != _KEPT.code_bytes(numel) or scales.numel() != _KEPT.num_blocks(numel):
        raise ValueError(f"ErrorFeedback: the state {key[1:]} is not of {numel} elements")
    return _State(codes.view(-1, _KEPT.block_bytes), scales, numel, num_steps)


def _read_literal(text: str) -> object:
    """What a name says; None if it is no literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
