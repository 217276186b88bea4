"""Where codes and scales lie in a message."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_quant import Codec
from comm_quant._message import ALIGNMENT_BYTES, Run, new_messages
from strategies import SIZES, codecs


@given(spec=codecs(), numel=st.sampled_from(SIZES), num_runs=st.integers(1, 4))
def test_runs_fill_a_message_without_touching_each_other(
    spec: Codec, numel: int, num_runs: int
) -> None:
    run = Run(spec, numel)
    messages = new_messages(2, num_runs * run.run_bytes, device=torch.device("cpu"))
    for index in range(num_runs):
        run.codes(messages, index).add_(1)
        run.scales(messages[1], index).view(torch.uint8).add_(2)
    counts = torch.bincount(messages.view(-1).int(), minlength=3)
    assert counts[1] == 2 * num_runs * spec.code_bytes(numel)
    assert counts[2] == num_runs * spec.scale_bytes(numel)


@given(spec=codecs(), numel=st.sampled_from(SIZES))
def test_every_part_starts_where_any_type_may(spec: Codec, numel: int) -> None:
    run = Run(spec, numel)
    assert run.scales_start % ALIGNMENT_BYTES == run.run_bytes % ALIGNMENT_BYTES == 0
    wasted = run.run_bytes - spec.code_bytes(numel) - spec.scale_bytes(numel)
    assert 0 <= wasted < 2 * ALIGNMENT_BYTES
