"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# The same examples in every run, on any machine.
settings.register_profile("sinkflex", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("sinkflex")
