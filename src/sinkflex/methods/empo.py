"""EMPO: semi-online rollouts on expert trajectories (ACL 2026, 428; preprint UI-S1, arXiv 2509.11543), telecom solo.

The policy acts on its own history. While its call is one of the expert's, it is done; up to `patches` times a miss is
replaced by the expert's call in the history, and the policy's own miss is what is trained; then the episode stops.

    r[t] = 0.1 readable + 0.4 right tool + 0.5 right call
    R[t] = sum_{k=t}^{end} gamma^(k-t) r[k],   end = the first miss at or after t, or the last turn
    A[t] = A_E + step_weight * A_S[t],         A_S = standardized R[t] over the siblings that got to turn t,
                                               A_E = standardized sum_t r[t] over the siblings

`mode = "code"` is the published code where it differs: r = 0.1 + 0.9 (0.1, 0.5 or 1); R ends before a miss, which keeps
its own r; A_E standardizes the r of each turn over all turns of all siblings (one turn alone keeps r); a group counts
by the deviation of R at its first turn.

What we changed: the expert is the scripted one, alone with the ticket, in the real environment, which really executes
calls. "set" matching takes the expert's calls in any order, `done` last, since most are independent. A group below
`least_deviation` gets no advantage; it is not drawn again. The end of an episode is judged as ever, by the environment.
When it fails: what the expert does not do is a miss, also where it would work. Validation is free of the expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from sinkflex.envs.env import Action, StopReason, ToolCall
from sinkflex.methods.credit import EPSILON, shuffled, spread, standardize
from sinkflex.methods.hooks import Decision, Propose, TurnState
from sinkflex.methods.method import Method
from sinkflex.methods.options import Options
from sinkflex.tasks.gold import expert_calls, same_call
from sinkflex.trajectory import Group, Trajectory

SCORES = {"paper": (0.0, 0.1, 0.5, 1.0), "code": (0.0, 0.19, 0.55, 1.0)}  # unreadable, wrong tool, right tool, right


class EMPOOptions(Options):
    """EMPO's options."""

    kl_coefficient: float = Field(1e-4, ge=0)
    """Weight of the estimate of KL(policy || reference); the reference is the policy after the warm start."""
    mode: Literal["paper", "code"] = "paper"
    """The paper's formulas, or the published code's where they differ."""
    matching: Literal["set", "strict"] = "set"
    """The expert's calls count in any order, or in the expert's alone."""
    diagnose: bool = True
    """The expert mends what it sees broken; if false it tries every remedy."""
    patches: int = Field(1, ge=0)
    """Misses that are replaced by the expert's call; the next one ends the episode."""
    gamma: float = Field(0.5, ge=0, le=1)
    """Discount within a matching stretch."""
    step_weight: float = Field(1.0, ge=0)
    """Weight of the step part (omega)."""
    least_deviation: float = Field(0.3, ge=0)
    """Groups whose advantages (paper) or first returns (code) deviate less teach nothing (eta)."""


class EMPO(Method):
    """Advantages from an episode along an expert's trajectory."""

    Options = EMPOOptions
    options: EMPOOptions
    needs_solo = True

    async def act(self, propose: Propose, state: TurnState) -> Decision:
        """Do the policy's call if the expert makes it too, else the expert's while patches are left, else stop."""
        sampled = await propose()
        if state.phase != "train":
            return Decision(sampled)
        calls = expert_calls(state.task.domain, state.task.task_id, self.options.diagnose)
        strict = self.options.matching == "strict"
        done = [turn.executed or turn.action for turn in state.turns]
        level, expected = follow(state.task.domain, [*done, sampled.action], calls, strict)[-1]
        if level == 3:
            return Decision(sampled)
        if sum(turn.executed is not None for turn in state.turns) < self.options.patches:
            return Decision(sampled, executed=Action(tool_calls=(expected,)))
        return Decision(sampled, stop_reason=StopReason.TOO_MANY_ERRORS)

    def advantages(self, group: Group) -> list[np.ndarray]:
        """Return for each valid member the advantages of its sampled tokens."""
        levels = [self.levels(t) for t in group.valid]
        scores = [np.array(SCORES[self.options.mode])[of_turns] for of_turns in levels]
        table = self.credit(scores, [of_turns == 3 for of_turns in levels])
        table = shuffled(group, table) if self.options.shuffle_advantages else table
        return [spread(t, of_turns) for t, of_turns in zip(group.valid, table, strict=True)]

    def levels(self, trajectory: Trajectory) -> np.ndarray:
        """Return for each turn [K] how far it matched: 0 unreadable, 1 a call, 2 the right tool, 3 the right call."""
        calls = expert_calls(trajectory.domain, trajectory.task_id, self.options.diagnose)
        strict, done, found = self.options.matching == "strict", [], []
        for turn in trajectory.turns:
            found.append(follow(trajectory.domain, [*done, turn.action], calls, strict)[-1][0])
            done.append(turn.executed or turn.action)
        return np.array(found, int)

    def credit(self, scores: Sequence[np.ndarray], matched: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return A for the turns of each sibling, given their scores r and whether they matched, [K] each."""
        options, code = self.options, self.options.mode == "code"
        values = [returns(r, hit, options.gamma, code) for r, hit in zip(scores, matched, strict=True)]
        longest = max(map(len, values), default=0)
        steps = [standardize(np.array([v[t] for v in values if len(v) > t])) for t in range(longest)]
        reached = [[i for i, v in enumerate(values) if len(v) > t] for t in range(longest)]
        table = [np.array([steps[t][reached[t].index(i)] for t in range(len(v))]) for i, v in enumerate(values)]
        if code:
            pool = np.concatenate(scores) if scores else np.zeros(0)
            scale = (pool.std(ddof=1) + EPSILON) if len(pool) > 1 else 1.0
            episode = [(r - (pool.mean() if len(pool) > 1 else 0.0)) / scale for r in scores]
        else:
            episode = list(standardize(np.array([r.sum() for r in scores])))
        table = [e + options.step_weight * s for e, s in zip(episode, table, strict=True)]
        deciding = [v[0] for v in values] if code else [a for of_turns in table for a in of_turns]
        alike = len(deciding) > 1 and np.std(deciding, ddof=1) < options.least_deviation
        return [np.zeros_like(a) if alike else a for a in table]


def returns(r: np.ndarray, matched: np.ndarray, gamma: float, code: bool) -> np.ndarray:
    """Return R [K]: discounted scores up to the first miss; in the published code without it."""
    result, after = np.zeros(len(r)), 0.0
    for t in range(len(r) - 1, -1, -1):
        result[t] = r[t] + (gamma * after if matched[t] else 0.0)
        after = result[t] if matched[t] or not code else 0.0
    return result


def follow(
    domain: str, actions: Sequence[Action], calls: Sequence[ToolCall], strict: bool
) -> list[tuple[int, ToolCall]]:
    """Return for each action how far it matched (see `levels`), and the expert's call that was due."""
    left, found = list(calls), []
    for action in actions:
        due = left[:1] if strict else left[:-1] or left
        call = action.tool_calls[0] if len(action.tool_calls) == 1 else None
        right = next((c for c in due if call and same_call(domain, call, c)), None)
        tool = next((c for c in due if call and c.name == call.name), None)
        level = 3 if right else 2 if tool else int(bool(action.tool_calls))
        expected = right or tool or due[0]
        found.append((level, expected))
        if right:
            left.remove(right)
    return found
