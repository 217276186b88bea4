"""What can go wrong, as classes a caller may catch.

Wrong arguments raise `ValueError` or `TypeError`; everything else derives from `ZeroError` (and
the first three from `RuntimeError` too)::

    ZeroError
    ├── RestingError       a value was read or written where it is not held whole
    ├── OrderError         a call came at the wrong moment: backward() after finish(), say
    ├── RanksDisagree      the ranks are at different places, or brought different things
    └── CheckpointError    a checkpoint is missing, incomplete, damaged, or of another model
"""

from __future__ import annotations


class ZeroError(Exception):
    """Base of this library's errors."""


class RestingError(ZeroError, RuntimeError):
    """A parameter or gradient was read or written where it is not held whole."""


class OrderError(ZeroError, RuntimeError):
    """A call came at a moment that has no meaning for it."""


class RanksDisagree(ZeroError, RuntimeError):
    """The ranks of the group are at different places, or hold different things."""


class CheckpointError(ZeroError):
    """A checkpoint is missing, incomplete, damaged, or of another model."""
