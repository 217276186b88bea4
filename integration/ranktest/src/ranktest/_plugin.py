"""The pytest plugin: one fixture, the pools of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranktest._pool import RankPools


@pytest.fixture(scope="session")
def rank_pools(pytestconfig: pytest.Config) -> Iterator[RankPools]:
    """``rank_pools(n)`` is a `RankPool` of `n` ranks that lives as long as the test session."""
    with RankPools(import_paths=[str(pytestconfig.rootpath)]) as pools:
        yield pools
