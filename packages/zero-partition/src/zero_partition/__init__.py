"""ZeRO for PyTorch: who holds which slice of parameters, gradients and optimizer state."""

from zero_partition._checkpoint_read import latest_checkpoint, read_tensor
from zero_partition._errors import (
    CheckpointError,
    OrderError,
    RanksDisagree,
    RestingError,
    ZeroError,
)
from zero_partition._hosts_wire import Hosts, HostsWire
from zero_partition._memory import Memory, MemoryRow
from zero_partition._nodes_wire import HierarchicalWire
from zero_partition._partition import partition
from zero_partition._precision import Precision
from zero_partition._shared_wire import SharedMemoryWire
from zero_partition._wire import (
    FrozenWire,
    KeepingWire,
    LossyWire,
    NodesWire,
    OpeningWire,
    Pending,
    SharingWire,
    TorchWire,
    Wire,
)
from zero_partition._zero import Zero

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "FrozenWire",
    "HierarchicalWire",
    "Hosts",
    "HostsWire",
    "KeepingWire",
    "LossyWire",
    "Memory",
    "MemoryRow",
    "NodesWire",
    "OpeningWire",
    "OrderError",
    "Pending",
    "Precision",
    "RanksDisagree",
    "RestingError",
    "SharedMemoryWire",
    "SharingWire",
    "TorchWire",
    "Wire",
    "Zero",
    "ZeroError",
    "latest_checkpoint",
    "partition",
    "read_tensor",
]
