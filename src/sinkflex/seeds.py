"""Counter-based random streams: every draw is keyed by what it is for, never by when it happens."""

from __future__ import annotations

import hashlib

import numpy as np


def seed_for(run_seed: int, purpose: str, *key: int | str) -> int:
    """Return a 63-bit seed that depends only on its arguments.

    Args:
        run_seed: the run's seed.
        purpose: what the draw is for, e.g. "sampler", "user", "tasks".
        key: further coordinates, usually (step, task id, member).
    """
    text = "\x1f".join([str(run_seed), purpose, *map(str, key)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(run_seed: int, purpose: str, *key: int | str) -> np.random.Generator:
    """Return a NumPy generator (Philox, counter based) for this purpose and key."""
    return np.random.Generator(np.random.Philox(key=seed_for(run_seed, purpose, *key)))
