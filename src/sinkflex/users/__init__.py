"""Users: who the agent talks to."""
