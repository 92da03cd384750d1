"""Settings for all tests. Hypothesis runs the same examples every time: what fails, fails for everybody.

``HYPOTHESIS_PROFILE=search`` draws new examples instead, many of them, to find what nobody thought of.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fixed",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("search", deadline=None, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
