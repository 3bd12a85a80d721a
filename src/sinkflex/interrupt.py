"""Ctrl-C lets a step end and saves it; pressed again, it stops at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def first_interrupt_waits() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed; a second Ctrl-C stops at once."""
    pressed = False

    def remember(number: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        # Not print: the signal may arrive while the main program prints.
        os.write(2, b"stopping after this step; press Ctrl-C again to stop at once\n")

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
