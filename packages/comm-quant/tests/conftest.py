"""What every test of this package stands on."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Ranks have one thread each, and so has what they are compared with."""
    torch.set_num_threads(1)
