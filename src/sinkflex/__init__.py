"""SinkFlex: reinforcement learning for agents that talk to a user and call tools over many turns."""

import os

__version__ = "0.1.0"

# Threads of one matrix product wait for each other asleep. Awake, they take the time of whoever else uses the machine:
# 8 times slower with one busy neighbor on two cores. This works if set before torch is loaded, and yields to a user's.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
