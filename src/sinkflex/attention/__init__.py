"""Attention: learned sinks, windows, packed and shared-prefix masks in one path."""
