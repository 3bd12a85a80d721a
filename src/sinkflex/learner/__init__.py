"""Learner: trajectories to rows to batches to one optimizer step."""
