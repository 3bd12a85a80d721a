"""The tau2 benchmark (retail, airline, telecom, mock) as seeded, forkable environments with dual control.

    tasks     which tasks there are: splits, tags, pools
    database  the state of a world: templates, copy-on-write records, hashes
    actions   what the agent may do: tool schemas, argument coercion, refusals
    policies  what the agent is told: policy texts, tickets
    scoring   the reward of a final state
    env       the environment itself

Importing any of them imports tau2 without its side effects: no log lines, no `.env` file, no download.
"""

from __future__ import annotations

import importlib
import os

from loguru import logger


def _import_quietly() -> None:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    logger.disable("tau2")
    before = os.environ.get("PYTHON_DOTENV_DISABLED")
    os.environ["PYTHON_DOTENV_DISABLED"] = "1"
    try:
        importlib.import_module("tau2.utils")
    finally:
        if before is None:
            del os.environ["PYTHON_DOTENV_DISABLED"]
        else:
            os.environ["PYTHON_DOTENV_DISABLED"] = before


_import_quietly()
