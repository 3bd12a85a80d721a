"""Settings of the whole suite."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Two threads that wait for each other are slower than one on a busy machine; processes of the tests inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, on any machine.
settings.register_profile("sinkflex", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("sinkflex")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests have a quarter of an hour each, unless they say more."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
