"""Rollouts: environments times policy gives trajectories."""
