"""Settings of the whole suite."""

from __future__ import annotations

import os

from hypothesis import settings

# Two threads that wait for each other are slower than one on a busy machine; processes of the tests inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, on any machine.
settings.register_profile("sinkflex", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("sinkflex")
