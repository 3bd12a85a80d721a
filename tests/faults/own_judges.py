"""A method of one's own whose judge hangs."""

from __future__ import annotations

import time

from sinkflex.methods.grpo import GRPO
from sinkflex.methods.hooks import RewardParts
from sinkflex.trajectory import Trajectory


class StuckJudge(GRPO):
    """Hangs on the first sibling of every group, and pays the others by their number."""

    async def reward(self, trajectory: Trajectory) -> RewardParts:
        if trajectory.member == 0:
            time.sleep(600)
        return RewardParts(float(trajectory.member), {"judge": 1.0})
