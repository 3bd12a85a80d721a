"""Measurements with bars: each module has `run(...) -> list of rows` and `table(rows) -> text`."""
