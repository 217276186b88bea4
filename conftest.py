"""Hypothesis profiles: `gate`, or `discover` where HYPOTHESIS_PROFILE says so."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

# A busy machine and a strategy that draws everything legal are no failures.
SLOW = [HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.too_slow]

# The same examples every time, and none spent on shrinking.
settings.register_profile(
    "gate",
    derandomize=True,
    max_examples=50,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=SLOW,
)
# Many, and others every time.
settings.register_profile(
    "discover",
    max_examples=1000,
    deadline=None,
    print_blob=True,
    suppress_health_check=SLOW,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "gate"))
