"""Train models that do not fit, with the numbers of plain data parallelism."""

from plait._config import Config
from plait._config_read import read_config
from plait._engine import PlaitEngine
from plait._initialize import add_config_arguments, initialize
from plait._join import init_distributed
from plait._loader import RankLoader
from plait._problems import ConfigError, Problem
from plait._together import PeerFailed

__all__ = [
    "Config",
    "ConfigError",
    "PeerFailed",
    "PlaitEngine",
    "Problem",
    "RankLoader",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "read_config",
]

__version__ = "0.1.0"
