"""Private memory in large pages, for big buffers that come and go every step.

The first touch of fresh memory costs as much as four to ten copies of it in pages of 4 KB, and next
to nothing in pages of 2 MB.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE_BYTES = 2 * 2**20
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux alone has it


def new_buffer(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 1-D buffer with arbitrary content; its memory goes back to the system with it."""
    num_bytes = numel * dtype.itemsize
    if device.type != "cpu" or num_bytes < PAGE_BYTES or _ADVICE is None:
        return torch.empty(numel, dtype=dtype, device=device)
    # One page more than needed, never touched, so that the buffer can begin at a page.
    memory = mmap.mmap(-1, (-(-num_bytes // PAGE_BYTES) + 1) * PAGE_BYTES, mmap.MAP_PRIVATE)
    with suppress(OSError):  # a kernel without them has its own pages
        memory.madvise(_ADVICE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % PAGE_BYTES
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=start)
