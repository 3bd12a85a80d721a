"""Environments: what the agent acts on."""
