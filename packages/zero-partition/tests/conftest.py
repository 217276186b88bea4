"""What every test of this package stands on."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The ranks have one thread each; the reference must sum in the same order."""
    torch.set_num_threads(1)
