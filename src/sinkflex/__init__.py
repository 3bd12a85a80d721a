"""SinkFlex: reinforcement learning for agents that talk to a user and call tools over many turns."""

__version__ = "0.1.0"
