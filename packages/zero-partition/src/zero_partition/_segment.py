"""One flat buffer: the parameters of a unit that share dtype, device and trainability.

    full      flat buffer of the parameters; at stage 3 its storage is empty while the unit rests,
              or it is shared: one buffer for all ranks of a host, of which each owns its slices
    shard     stage 3, where `full` is not shared: this rank's slices of it
    lent      stage 3, where `full` is shared: this rank's own copy of it, to be edited
    master    16-bit trainable parameters: the fp32 copy that the optimizer steps

Its gradients have buffers of their own: see `_gradients.py`.

"Owned views" of a buffer are this rank's slices of it, one a bucket, whether the buffer is whole or
a shard: code that works on them does not ask which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zero_partition._layout import Piece, SegmentLayout, alignment_numel, plan_segment
from zero_partition._precision import sum_dtype
from zero_partition._residence import Residence
from zero_partition._resting import rest, wake
from zero_partition._transport import Transport
from zero_partition._wire import Pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How every buffer of a partition is cut: the same for all segments."""

    residence: Residence
    rank: int
    num_ranks: int
    bucket_numel: int | None


@dataclass(eq=False, slots=True)
class OwnPiece:
    """What an optimizer steps on this rank: a run of one parameter, as a Parameter of its own.

    Attributes:
        slot: Index of the logical parameter in the segment.
        param_start: First element in the flattened logical parameter.
        values: 1-D view of shard, master or flat buffer (the whole shape at stage 0).
    """

    slot: int
    param_start: int
    values: nn.Parameter


class Segment:
    """See the module's docstring.

    Args:
        parameters: Name and parameter, in registration order; their values are taken over.
        dtype: Dtype to compute in.
        cut: Stage, rank and bucket size.
        transport: Makes rank 0's content everyone's, and knows of memory that all ranks share.
    """

    def __init__(
        self,
        parameters: list[tuple[str, nn.Parameter]],
        *,
        dtype: torch.dtype,
        cut: Cut,
        transport: Transport,
    ) -> None:
        first = parameters[0][1]
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.dtype, self.device, self.trainable = dtype, first.device, first.requires_grad
        self.sum_dtype = sum_dtype(dtype)
        self.residence, self.rank = cut.residence, cut.rank
        self.layout: SegmentLayout = plan_segment(
            [parameter.numel() for parameter in self.parameters],
            num_ranks=cut.num_ranks,
            alignment=alignment_numel(min(dtype.itemsize, self.sum_dtype.itemsize)),
            bucket_numel=cut.bucket_numel,
        )
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.has_master = self.trainable and self.sum_dtype != dtype
        source = self._source()
        transport.broadcast(source)
        self.full = source.to(dtype)
        self.master: Tensor | None = None
        if self.has_master:
            sharded = cut.residence.optimizer_sharded
            self.master = self._to_shard(source) if sharded else source
        self.shard: Tensor | None = None
        self.lent: Tensor | None = None
        self.is_shared = False
        if cut.residence.parameters_sharded:
            self._shard_full(transport)
        elif cut.residence.optimizer_sharded and self.trainable:
            self._expose_full(transport)
        for parameter in self.parameters:
            parameter.grad = None
        self._see(self.full)
        self.pieces = self._make_pieces() if self.trainable else []
        self._versions = [parameter._version for parameter in self.parameters]
        self.full_bytes = self.full.untyped_storage().nbytes()

    def _source(self) -> Tensor:
        """The parameters' values as one flat buffer, in the widest dtype that must survive."""
        wide = self.sum_dtype if self.has_master else self.dtype
        source = torch.zeros(self.layout.numel, dtype=wide, device=self.device)
        for view, parameter in zip(self.views(source), self.parameters, strict=True):
            view.copy_(parameter.detach())
        return source

    def _to_shard(self, whole: Tensor) -> Tensor:
        shard = torch.empty(self.layout.shard_numel, dtype=whole.dtype, device=self.device)
        for mine, theirs in zip(self.owned(shard), self.owned(whole), strict=True):
            mine.copy_(theirs)
        return shard

    def _shard_full(self, transport: Transport) -> None:
        """Keep this rank's slices of the parameters, in memory of its own or in shared memory."""
        shared = transport.shared_buffer(self.layout.numel, self.dtype, self.device)
        if shared is None:
            if self.layout.numel:
                transport.part_gathers()
            self.shard = self._to_shard(self.full)
            return
        for mine, theirs in zip(self.owned(shared), self.owned(self.full), strict=True):
            mine.copy_(theirs)
        self.full, self.is_shared = shared, True

    def _expose_full(self, transport: Transport) -> None:
        """Let the other ranks read what this one steps, if they can."""
        exposed = transport.exposed_buffer(self.layout.numel, self.dtype, self.device)
        if exposed is not None:
            self.full = exposed.copy_(self.full)

    # Views. None of them copies.

    def views(self, whole: Tensor) -> list[Tensor]:
        """Each parameter's values in a buffer of the layout's whole length."""
        return [
            whole[slot.start : slot.start + slot.numel].view(shape)
            for slot, shape in zip(self.layout.slots, self.shapes, strict=True)
        ]

    def owned(self, buffer: Tensor) -> list[Tensor]:
        """This rank's slices of a whole buffer or of a shard, one a bucket."""
        if buffer.numel() == self.layout.numel and self.layout.num_ranks > 1:
            return [
                buffer[b.start + self.rank * b.slice_numel :][: b.slice_numel]
                for b in self.layout.buckets
            ]
        return [buffer[b.shard_start :][: b.slice_numel] for b in self.layout.buckets]

    def messages(self, whole: Tensor) -> list[Tensor]:
        """A whole buffer, cut into what travels at once."""
        size = self.layout.num_ranks
        return [whole[b.start :][: b.slice_numel * size] for b in self.layout.buckets]

    def start_gather(
        self, whole: Tensor, own: Tensor, transport: Transport, *, exactly: bool = True
    ) -> list[Pending]:
        """Start to fill `whole` from every rank's owned slices; `own` holds this rank's."""
        pairs = zip(self.messages(whole), self.owned(own), strict=True)
        options = {"exactly": exactly, "trainable": self.trainable}
        return [transport.all_gather(message, mine, **options) for message, mine in pairs]

    def start_gather_with_secondary(
        self, transport: Transport, *, key: tuple[int, ...], again: bool
    ) -> list[Pending]:
        """Start to fill the parameters' buffer: from all ranks, or again from this node's."""
        start = transport.all_gather_kept if again else transport.all_gather_keeping
        pairs = zip(self.messages(self.full), self.owned(self.home()), strict=True)
        return [
            start(message, mine, key=(*key, index), trainable=self.trainable)
            for index, (message, mine) in enumerate(pairs)
        ]

    def part(self, buffer: Tensor, planned: Piece) -> Tensor:
        """A planned piece's elements in a whole buffer or in a shard, 1-D."""
        whole = buffer.numel() == self.layout.numel
        start = planned.flat_start if whole else planned.shard_start
        return buffer[start : start + planned.numel]

    def whole(self) -> Tensor:
        """The flat buffer as the parameters see it."""
        return self.full if self.lent is None else self.lent

    def home(self) -> Tensor:
        """Where this rank's values of the parameters rest: the shard, or the flat buffer."""
        return self.full if self.shard is None else self.shard

    def stepped(self) -> Tensor:
        """The buffer that the optimizer steps."""
        return self.home() if self.master is None else self.master

    def piece_of(self, buffer: Tensor, piece: OwnPiece) -> Tensor:
        """The elements of `buffer` (whole or shard) that belong to `piece`, in its shape."""
        slot = self.layout.slots[piece.slot]
        if not self.residence.optimizer_sharded:
            return buffer[slot.start : slot.start + slot.numel].view(self.shapes[piece.slot])
        return self.part(buffer, self._planned[id(piece)])

    def _make_pieces(self) -> list[OwnPiece]:
        buffer = self.stepped()
        if not self.residence.optimizer_sharded:
            views = self.views(buffer)
            return [OwnPiece(i, 0, nn.Parameter(view)) for i, view in enumerate(views)]
        self._planned, made = {}, []
        for planned in self.layout.pieces(self.rank):
            values = nn.Parameter(self.part(buffer, planned))
            piece = OwnPiece(planned.slot, planned.param_start, values)
            self._planned[id(piece)] = planned
            made.append(piece)
        return made

    # Parameters: whole and at rest.

    def fill(self) -> None:
        """Give the flat buffer its storage back (stage 3); the values are still to come."""
        if not self.is_shared:
            self.full.untyped_storage().resize_(self.full_bytes)

    def wake(self) -> None:
        """Let the parameters be read: the flat buffer holds their values."""
        for parameter in self.parameters:
            wake(parameter)

    def empty(self) -> None:
        """Let go of the flat buffer (stage 3)."""
        if self.lent is not None:
            self.lent = None
            self._see(self.full)
            self.note_versions()
        for parameter in self.parameters:
            rest(parameter)
        if not self.is_shared:
            self.full.untyped_storage().resize_(0)

    def lend(self) -> None:
        """Give this rank a copy of a shared buffer: what it edits there, the others do not see."""
        if self.is_shared:
            self.lent = self.full.clone()
            self._see(self.lent)

    def _see(self, whole: Tensor) -> None:
        for parameter, view in zip(self.parameters, self.views(whole), strict=True):
            parameter.data = view

    def adopt_full(self) -> None:
        """Take the values that the parameters show as the new ones, wherever they are kept."""
        whole = self.whole()
        for target in (self.home(), self.master):
            if target is None or target is whole:
                continue
            if target.numel() == whole.numel() and not self.is_shared:
                target.copy_(whole)
                continue
            for mine, theirs in zip(self.owned(target), self.owned(whole), strict=True):
                mine.copy_(theirs)
        self.note_versions()

    def cast_master(self) -> None:
        """Round the master, freshly stepped, into this rank's part of the parameters."""
        if self.master is None:
            return
        home = self.home()
        if self.master.numel() == home.numel():
            home.copy_(self.master)
            return
        for mine, master in zip(self.owned(home), self.owned(self.master), strict=True):
            mine.copy_(master)

    def adopt_edits(self) -> None:
        """Carry edits of whole parameters over to where they are stepped."""
        if self.residence.parameters_sharded:
            return
        self.reattach()
        if self.master is not None and self.edited():
            self.adopt_full()

    def edited(self) -> bool:
        """Whether somebody changed a parameter in place since `note_versions`."""
        return self._versions != [parameter._version for parameter in self.parameters]

    def note_versions(self) -> None:
        """Take the parameters' present values as the known ones."""
        self._versions = [parameter._version for parameter in self.parameters]

    def reattach(self) -> None:
        """Take over values that ``p.data = ...`` put elsewhere; the parameters must be whole.

        Raises:
            RuntimeError: They are of another shape, dtype or device (after ``model.to(...)``, say).
        """
        found = False
        for name, parameter, view in zip(
            self.names, self.parameters, self.views(self.whole()), strict=True
        ):
            if not view.numel() or parameter.data_ptr() == view.data_ptr():
                continue
            same = (parameter.shape, parameter.dtype, parameter.device)
            if same != (view.shape, view.dtype, view.device):
                raise RuntimeError(
                    f"parameter {name!r} was replaced after partition() (by model.to(...) or "
                    f".data = ...): expected shape {tuple(view.shape)}, {view.dtype} on "
                    f"{view.device}, got {tuple(parameter.shape)}, {parameter.dtype} on "
                    f"{parameter.device}; change these before partition()"
                )
            view.copy_(parameter.detach())
            parameter.data = view
            found = True
        if found:
            self.adopt_full()
