"""`PlainWire`: gathers and reductions that send the numbers themselves."""

from __future__ import annotations

from collections.abc import Hashable

import torch.distributed as dist
from torch import Tensor

from comm_quant._counter import Payload
from comm_quant._gather import gather
from comm_quant._ranks import Mesh
from comm_quant._reduce import reduce_exactly
from comm_quant._transfer import Transfer


class PlainWire:
    """Every byte as it is; sums in rank order. What `QuantizedWire` does where it is told nothing.

    Args:
        payload: Where bytes are counted.
    """

    def __init__(self, payload: Payload | None = None) -> None:
        self.payload = Payload() if payload is None else payload

    def all_gather(self, out: Tensor, shard: Tensor, *, group: dist.ProcessGroup) -> Transfer:
        """Put rank r's `shard` at ``out[r * n : (r + 1) * n]`` on every rank."""
        mesh = Mesh(dist.get_world_size(group), 1)
        return Transfer(gather(out, shard, None, group=group, mesh=mesh, payload=self.payload))

    def reduce_scatter(
        self,
        out: Tensor,
        contributions: Tensor,
        *,
        group: dist.ProcessGroup,
        key: Hashable = None,  # noqa: ARG002  it keeps nothing
    ) -> Transfer:
        """Sum slice r of every rank's `contributions` on rank r, in rank order."""
        return Transfer(reduce_exactly(out, contributions, group=group, payload=self.payload))
