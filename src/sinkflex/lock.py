"""One process works in a run directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO


def lock_directory(directory: Path) -> IO[str]:
    """Take a run directory for this process; the system frees it when the process ends, however it ends.

    Raises:
        ValueError: another process has it.
    """
    lock = (directory / ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read(20) or "another process"
        lock.close()
        raise ValueError(
            f"{directory} is in use by {owner}. Wait for it or stop it, or choose another run directory with "
            "--set run.directory=FOLDER."
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()}")
    lock.flush()
    return lock


def free_directory(lock: IO[str]) -> None:
    """Give back what `lock_directory` took."""
    if not lock.closed:
        lock.truncate(0)
        lock.close()
