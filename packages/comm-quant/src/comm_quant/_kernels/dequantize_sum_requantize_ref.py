"""The definition of `dequantize_sum_requantize`: a hop's arithmetic between two messages.

Legend: P peers, B blocks, W bytes of a block's codes, N elements. Row r is dequantized in float32;
the rows are added in order, from row 0 on; at `own_index` the exact values of this rank are added
in the row's place.
"""

from __future__ import annotations

from torch import Tensor

from comm_quant._codec import Codec
from comm_quant._kernels.dequantize_ref import dequantize_ref


def dequantize_sum_ref(
    codes_PBW: Tensor,
    scales_PB: Tensor,
    spec: Codec,
    *,
    numel: int,
    own_N: Tensor | None,
    own_index: int,
) -> Tensor:
    """The sum, float32 (N,)."""
    total: Tensor | None = None
    for row in range(len(codes_PBW)):
        if own_N is not None and row == own_index:
            value = own_N.float()
        else:
            value = dequantize_ref(codes_PBW[row], scales_PB[row], spec, numel=numel)
        total = value.clone() if total is None else total.add_(value)
    assert total is not None  # the caller has checked that there are rows
    return total
