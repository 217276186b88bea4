"""Run functions on several gloo ranks of one machine, in tests."""

from ranktest._errors import RankError, RankFailure
from ranktest._pool import RankPool, RankPools
from ranktest._rank import subgroup

__all__ = ["RankError", "RankFailure", "RankPool", "RankPools", "__version__", "subgroup"]
__version__ = "0"
