"""`QuantizedWire`: gathers and reductions that send codes instead of numbers."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Hashable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from comm_quant._codec import Codec
from comm_quant._counter import Payload
from comm_quant._feedback import ErrorFeedback
from comm_quant._gather import gather, gather_again
from comm_quant._plain_wire import PlainWire
from comm_quant._ranks import Hops, Mesh, exchange_texts, make_hops
from comm_quant._reduce import (
    reduce,
    reduce_in_two_hops,
    reduce_node_sums,
)
from comm_quant._transfer import Transfer

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedWire:
    """A wire for `zero_partition.partition(..., stage=3, wire=...)`, or to be used by itself.

    Parameters travel as codes of `weights` (qwZ), gradients as codes of `grads` (qgZ); None leaves
    them as they are. Float64 and integers always travel as they are. With `num_local` both take two
    hops: gradients are summed within each node first, and each slice of the parameters crosses to
    every other node once.

    Args:
        weights: Codec of gathers, or None.
        grads: Codec of reductions, or None.
        frozen_weights: Codec of gathers of parameters that are not trained; None: `weights`.
        num_local: Ranks a node, where the ranks of the group are ``node * num_local + local``;
            None: one hop between all.
        feedback: Error feedback for the reductions; needs `grads`.
        round_node_sums: With `num_local` and without `grads`, sum gradients within each node first
            and round a node's sum to the type in which they travel: fewer bytes cross, and the sums
            are no longer those of rank order.

    Raises:
        TypeError: A codec is none.
        ValueError: `num_local` is no number of ranks, or there is feedback without codes.

    Error bound:
        Gathers: the codec's own, once. Reductions: the codec's own for every contribution but this
        rank's, and with two hops also for every node's sum but its own; each is quantized at most
        once a hop, so the relative error does not grow with the number of ranks. All ranks hold
        the same bits.

    Source:
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
        Training", 2023.

    Example:
        >>> from comm_quant import BlockQuant, QuantizedWire
        >>> wire = QuantizedWire(
        ...     weights=BlockQuant(bits=8), grads=BlockQuant(bits=4, block_numel=128)
        ... )
        >>> wire.payload.total_bytes()
        0
    """

    def __init__(
        self,
        *,
        weights: Codec | None = None,
        grads: Codec | None = None,
        frozen_weights: Codec | None = None,
        num_local: int | None = None,
        feedback: ErrorFeedback | None = None,
        round_node_sums: bool = False,
    ) -> None:
        codecs = {"weights": weights, "grads": grads, "frozen_weights": frozen_weights}
        for name, spec in codecs.items():
            if spec is not None and not isinstance(spec, Codec):
                raise TypeError(
                    f"QuantizedWire: {name} must be BlockQuant, Float8Quant or None, got "
                    f"{type(spec).__name__}"
                )
        if num_local is not None and (isinstance(num_local, bool) or num_local < 1):
            raise ValueError(f"QuantizedWire: num_local must be at least 1, got {num_local!r}")
        if feedback is not None and grads is None:
            raise ValueError(
                "QuantizedWire: feedback corrects quantized gradients; give grads=... with it"
            )
        if round_node_sums and grads is not None:
            raise ValueError(
                "QuantizedWire: round_node_sums is for gradients that travel as they are; leave "
                "out grads, or leave it out"
            )
        self.weights, self.grads, self.feedback = weights, grads, feedback
        self.frozen_weights = weights if frozen_weights is None else frozen_weights
        self._num_local, self._round_node_sums = num_local, round_node_sums
        self._kept: dict[tuple[dist.ProcessGroup, Hashable], Tensor] = {}
        self.payload = Payload()
        self.exact = PlainWire(self.payload)
        self._hops: dict[dist.ProcessGroup, Hops] = {}
        self._meshes: dict[dist.ProcessGroup, Mesh] = {}
        self._gathers: dict[dist.ProcessGroup, deque[Transfer]] = {}  # their second hops, in order
        self._numbers: dict[dist.ProcessGroup, int] = {}  # of the groups, in order
        self._num_sent: dict[dist.ProcessGroup, int] = {}  # seeds of stochastic rounding

    @property
    def lossy_gathers(self) -> bool:
        """Whether what is gathered differs from what the shards hold."""
        return self.frozen_weights is not None

    @property
    def frozen(self) -> _FrozenWire:
        """The same wire for parameters that are not trained."""
        return _FrozenWire(self)

    def spread_over(self, num_local: int) -> None:
        """Take the ranks of every group as ``node * num_local + local``.

        Raises:
            ValueError: The wire was made for other nodes, or is in use.
        """
        if self._num_local == num_local:
            return
        if self._num_local is not None or self._meshes:
            raise ValueError(
                f"QuantizedWire: made for num_local={self._num_local}, and the mesh has nodes of "
                f"{num_local} ranks; use a wire of its own for each mesh"
            )
        self._num_local = num_local

    def open(self, group: dist.ProcessGroup) -> None:
        """Agree with the other ranks of `group`, and make the groups of the hops (collective).

        Raises:
            ValueError: The nodes do not cover the group, or a rank has other settings; on all
                ranks.
        """
        if group in self._meshes:
            return
        device = _device_of(group)
        mine = f"weights={self.weights}, grads={self.grads}, num_local={self._num_local}"
        if self.frozen_weights != self.weights:
            mine += f", frozen_weights={self.frozen_weights}"
        mine += ", round_node_sums" if self._round_node_sums else ""
        mine += "" if self.feedback is None else f", feedback of beta={self.feedback.beta}"
        texts = exchange_texts(mine, group, device)
        for rank, theirs in enumerate(texts):
            if theirs != texts[0]:
                raise ValueError(
                    "QuantizedWire: all ranks need the same settings; rank 0 has "
                    f"{texts[0]}; rank {rank} has {theirs}"
                )
        num_ranks = len(texts)
        num_local = 1 if self._num_local is None else self._num_local
        if num_ranks % num_local:
            raise ValueError(
                f"QuantizedWire: nodes of num_local={num_local} ranks do not cover a group of "
                f"{num_ranks}; choose a divisor"
            )
        mesh = Mesh(num_ranks, num_local)
        sums_in_nodes = self.grads is not None or self._round_node_sums
        if sums_in_nodes and mesh.num_local not in (1, num_ranks):
            self._hops[group] = make_hops(group, mesh, device)
        self._numbers[group], self._num_sent[group] = len(self._meshes), 0
        self._meshes[group], self._gathers[group] = mesh, deque()

    def all_gather(
        self, out: Tensor, shard: Tensor, *, group: dist.ProcessGroup, keep: Hashable = None
    ) -> Transfer:
        """Put rank r's `shard`, quantized, at ``out[r * n : (r + 1) * n]`` on every rank.

        Args:
            out: ``num_ranks * n`` elements, 1-D and contiguous.
            shard: n elements of the same dtype, in memory of its own where `weights` are quantized:
                every rank, the owner too, gets what the codes say.
            group: The ranks taking part; all call this.
            keep: A name by which to keep what crosses between nodes, for `all_gather_kept`.

        Raises:
            ValueError: `shard` lies in `out` and would be overwritten by its own codes.
        """
        return self.gather_as(self.weights, out, shard, group=group, keep=keep)

    def gather_as(
        self,
        codec: Codec | None,
        out: Tensor,
        shard: Tensor,
        *,
        group: dist.ProcessGroup,
        keep: Hashable = None,
    ) -> Transfer:
        """`all_gather` with another codec than `weights`."""
        self.open(group)
        mesh = self._meshes[group]
        spec = codec if out.dtype in FLOATS else None
        own = out.view(mesh.num_ranks, -1)[dist.get_rank(group)]
        if spec is not None and own.numel() and own.data_ptr() == shard.data_ptr():
            raise ValueError(
                "QuantizedWire.all_gather: the shard lies in the result and would lose its exact "
                "values; give it memory of its own, or weights=None"
            )
        self._num_sent[group] += 1

        def kept(messages: Tensor) -> None:
            self._kept[group, keep] = messages

        hops = gather(
            *(out, shard, spec),
            group=group,
            mesh=mesh,
            payload=self.payload,
            keep=None if keep is None else kept,
            seed=self._num_sent[group],
        )
        return Transfer(hops, line=self._gathers[group])

    def all_gather_kept(self, out: Tensor, *, group: dist.ProcessGroup, key: Hashable) -> Transfer:
        """Fill `out` as the gather did that kept its messages by the name `key`: the same bits.

        Only ranks of the same node send: each has one message of every node, a *secondary shard*.

        Raises:
            KeyError: Nothing was kept by this name.

        Source:
            Wang et al., "ZeRO++", 2023, section 4.2 (hpZ).
        """
        return self.gather_kept_as(self.weights, out, group=group, key=key)

    def gather_kept_as(
        self, codec: Codec | None, out: Tensor, *, group: dist.ProcessGroup, key: Hashable
    ) -> Transfer:
        """`all_gather_kept` of what was gathered with another codec than `weights`."""
        crossed = self._kept[group, key]
        spec = codec if out.dtype in FLOATS else None
        hops = gather_again(
            *(out, crossed, spec), group=group, mesh=self._meshes[group], payload=self.payload
        )
        return Transfer(hops, line=self._gathers[group])

    def forget_kept(self, *, group: dist.ProcessGroup) -> None:
        """Let go of the secondary shards that came over a group."""
        for name in [name for name in self._kept if name[0] is group]:
            del self._kept[name]

    def kept_bytes(self, *, group: dist.ProcessGroup) -> int:
        """Bytes of the secondary shards on this rank that came over a group."""
        return sum(kept.nbytes for (over, _), kept in self._kept.items() if over is group)

    def reduce_scatter(
        self,
        out: Tensor,
        contributions: Tensor,
        *,
        group: dist.ProcessGroup,
        key: Hashable = None,
    ) -> Transfer:
        """Sum slice r of every rank's `contributions` on rank r, in float32 and rank order.

        Args:
            out: n elements, 1-D and contiguous; may be this rank's slice of `contributions`.
            contributions: ``num_ranks * n`` elements of this rank.
            group: The ranks taking part; all call this.
            key: Names what is reduced, the same in every step; with feedback, its errors go by it.

        Raises:
            ValueError: There is feedback and no key.
        """
        self.open(group)
        hops = self._hops.get(group)
        if self.grads is None or contributions.dtype not in FLOATS:
            if hops is None or not self._round_node_sums:
                return self.exact.reduce_scatter(out, contributions, group=group)
            steps = reduce_node_sums(
                *(out, contributions),
                group=group,
                mesh=self._meshes[group],
                hops=hops,
                payload=self.payload,
            )
            return Transfer(steps, line=hops.line)
        if self.feedback is not None and key is None:
            raise ValueError(
                "QuantizedWire.reduce_scatter: error feedback needs a key, the same for the same "
                "buffer in every step"
            )
        self._num_sent[group] += 1
        mesh, seed = self._meshes[group], 2 * self._num_sent[group]
        of_group = (self._numbers[group], key)
        if hops is not None:
            steps = reduce_in_two_hops(
                *(out, contributions, self.grads),
                group=group,
                mesh=mesh,
                hops=hops,
                payload=self.payload,
                feedback=self.feedback,
                key=of_group,
                seed=seed,
            )
            return Transfer(steps, line=hops.line)
        steps = reduce(
            *(out, contributions, self.grads),
            group=group,
            payload=self.payload,
            feedback=self.feedback,
            key=of_group,
            seed=seed,
        )
        return Transfer(steps)

    def state_dict(self, *, group: dist.ProcessGroup) -> dict[str, Tensor]:
        """What this rank keeps for the next transfers over `group`: 1-D tensors by name.

        The errors of `feedback`, and how much has been rounded stochastically; nothing where there
        is neither.

        Raises:
            TypeError: A key of `reduce_scatter` is more than numbers, strings and tuples of them.
        """
        codecs = (self.weights, self.grads, self.frozen_weights)
        is_random = any(spec is not None and spec.rounding == "stochastic" for spec in codecs)
        if group not in self._meshes or not (is_random or self.feedback):
            return {}
        told = torch.tensor([self._meshes[group].num_local, self._num_sent[group]])
        kept = {} if self.feedback is None else self.feedback.tensors(self._numbers[group])
        return {"counts": told, **kept}

    def load_state_dict(self, state: Mapping[str, Tensor], *, group: dist.ProcessGroup) -> None:
        """Go on from a `state_dict` of the rank of this number; an empty one begins anew.

        Errors that were made over other nodes begin at zero, and it is said.

        Raises:
            ValueError: It is none.
        """
        self.open(group)
        errors = dict(state)
        counts = errors.pop("counts", torch.zeros(2, dtype=torch.int64)).tolist()
        if len(counts) != 2:
            raise ValueError(f"QuantizedWire: counts must be two numbers, got {counts}")
        num_local, self._num_sent[group] = counts
        if self.feedback is None:
            return
        if errors and num_local != (mine := self._meshes[group].num_local):
            errors = {}
            warnings.warn(
                f"QuantizedWire: the saved errors are those of nodes of {num_local} ranks, these "
                f"are of {mine}; they begin at zero again",
                RuntimeWarning,
                stacklevel=2,
            )
        self.feedback.load_tensors(errors, self._numbers[group])


class _FrozenWire:
    """A `QuantizedWire` as parameters see it that are not trained: all is its but the codec."""

    def __init__(self, wire: QuantizedWire) -> None:
        self._wire = wire
        self.open, self.spread_over = wire.open, wire.spread_over
        self.forget_kept, self.kept_bytes = wire.forget_kept, wire.kept_bytes
        self.reduce_scatter = wire.reduce_scatter

    def all_gather(
        self, out: Tensor, shard: Tensor, *, group: dist.ProcessGroup, keep: Hashable = None
    ) -> Transfer:
        codec = self._wire.frozen_weights
        return self._wire.gather_as(codec, out, shard, group=group, keep=keep)

    def all_gather_kept(self, out: Tensor, *, group: dist.ProcessGroup, key: Hashable) -> Transfer:
        codec = self._wire.frozen_weights
        return self._wire.gather_kept_as(codec, out, group=group, key=key)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """A device that the group's backend serves."""
    for pair in str(dist.get_backend_config(group)).split(","):
        device, _, backend = pair.rpartition(":")
        if backend == "gloo" and device in ("", "cpu"):
            return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
