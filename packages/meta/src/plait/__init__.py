"""Train models that do not fit, with the numbers of plain data parallelism."""

from plait._config import Config
from plait._config_read import read_config
from plait._problems import ConfigError, Problem

__all__ = ["Config", "ConfigError", "Problem", "__version__", "read_config"]

__version__ = "0.1.0"
