"""Policies: what acts; messages to token ids, models, samplers."""
