"""What the tests of the configuration draw."""

from __future__ import annotations

from hypothesis import strategies as st

from plait._batch import BatchSizes


@st.composite
def batch_sizes_list(draw: st.DrawFn) -> BatchSizes:
    """Batch sizes that agree with each other."""
    ranks = draw(st.integers(1, 16))
    micro = draw(st.integers(1, 64))
    accumulation = draw(st.integers(1, 16))
    return BatchSizes(
        train_batch_size=ranks * micro * accumulation,
        micro_batch_size=micro,
        accumulation_steps=accumulation,
        num_ranks=ranks,
    )


def json_values() -> st.SearchStrategy[object]:
    """Anything a JSON file may hold."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
        ),
        max_leaves=6,
    )
