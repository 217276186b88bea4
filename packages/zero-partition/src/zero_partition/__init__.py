"""ZeRO for PyTorch: who holds which slice of parameters, gradients and optimizer state."""

from zero_partition._checkpoint_read import latest_checkpoint, read_tensor
from zero_partition._errors import (
    CheckpointError,
    OrderError,
    RanksDisagree,
    RestingError,
    ZeroError,
)
from zero_partition._memory import Memory, MemoryRow
from zero_partition._partition import partition
from zero_partition._precision import Precision
from zero_partition._wire import Pending, TorchWire, Wire
from zero_partition._zero import Zero

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Memory",
    "MemoryRow",
    "OrderError",
    "Pending",
    "Precision",
    "RanksDisagree",
    "RestingError",
    "TorchWire",
    "Wire",
    "Zero",
    "ZeroError",
    "latest_checkpoint",
    "partition",
    "read_tensor",
]
