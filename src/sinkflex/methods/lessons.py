"""SEED's options and analyzers: from a finished episode to one short lesson, by policy or rule (arXiv 2607.14777).

What an analyzer sees is what the agent did and what came back, and whether the task was solved. Neither the task's
answer nor the parts of its reward are shown. The rule is scripted: it only retells calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from sinkflex.behavior import command, output, repeated
from sinkflex.envs.env import Action, Message
from sinkflex.learner.scorer import Scorer
from sinkflex.methods.options import Options
from sinkflex.policy.chat import Chat
from sinkflex.tasks.gold import reads
from sinkflex.trajectory import Outcome, Trajectory, Turn

MAX_LETTERS, LINE_LETTERS, ATTEMPTS = 400, 160, 2


class SEEDOptions(Options):
    """SEED's options."""

    analyzer: Literal["policy", "rule"] = "policy"
    """Who writes lessons: the policy as it is, or a scripted rule."""
    opd_weight: float = Field(0.01, ge=0)
    """Weight of the likelihood term (lambda); 0 is GRPO without lessons."""
    beta: float = Field(5.0, ge=0)
    """Steepness of the gate; 0 makes it one half everywhere."""
    center: bool = False
    """Take the gate less one half."""
    teacher: Literal["cached", "live"] = "cached"
    """With several mini-batches: score with the lesson once a step, or again before each of them."""
    statistics: Literal["trajectory", "row"] = "trajectory"
    """Mean and std of a group's rewards over episodes, or over their turns, so that long episodes weigh more."""
    lesson_tokens: int = Field(96, ge=1)
    """Longest answer of the policy as an analyzer."""
    kl_coefficient: float = Field(0.01, ge=0)
    """Weight of the estimate of KL(policy || reference); the reference is the policy after the warm start."""
    dual_clip: float = Field(3.0, ge=0)
    """Bound of the ratio where the advantage is negative, above 1; 0 switches it off."""
    shuffle_lessons: bool = False
    """Control experiment: episodes get lessons of other tasks."""

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        yield from super()._contradictions()
        yield (
            self.shuffle_advantages and self.statistics == "row",
            'method.shuffle_advantages does nothing with method.statistics = "row". '
            'Type method.statistics = "trajectory".',
        )


def by_rule(trajectory: Trajectory) -> str:
    """Return a lesson made of an episode's calls: a success's workflow, or what a failure should not do again."""
    calls = [
        call.name
        for turn in trajectory.turns
        for call in turn.action.tool_calls
        if not any(message.error for message in turn.observation)
    ]
    done = list(dict.fromkeys(name for name in calls if not reads(trajectory.domain, name)))
    if trajectory.outcome is Outcome.SOLVED:
        return f"This solves it: {', '.join(done or calls)}."[:MAX_LETTERS]
    again = [turn for turn, seen in zip(trajectory.turns, repeated(trajectory.turns), strict=True) if seen]
    loops = list(dict.fromkeys(call.name for turn in again for call in turn.action.tool_calls))
    avoid = f" Do not repeat {', '.join(loops)}." if loops else ""
    return f"This is not enough: {', '.join(done) or 'only looking'}.{avoid}"[:MAX_LETTERS]


def by_policy(trajectories: Sequence[Trajectory], scorer: Scorer, step: int, max_tokens: int) -> list[str]:
    """Let the policy write the lessons; "" where no attempt can be read.

    Args:
        trajectories: finished episodes.
        scorer: writes, with the weights as they are.
        step: keys the draws.
        max_tokens: of one answer.
    """
    lessons = [""] * len(trajectories)
    for attempt in range(ATTEMPTS):
        waiting = [i for i, lesson in enumerate(lessons) if not lesson]
        asked = [question(trajectories[i]) for i in waiting]
        texts = scorer.generate(asked, (0, f"analyzer/{attempt}", step), max_tokens, temperature=float(attempt > 0))
        for i, text in zip(waiting, texts, strict=True):
            lessons[i] = read(text)
    return lessons


def question(trajectory: Trajectory) -> list[Message]:
    """Return what an analyzer is asked about an episode."""
    solved = trajectory.outcome is Outcome.SOLVED
    wanted = "the workflow, for use in the next attempt" if solved else "what to avoid in the next attempt"
    lines = [f"{command(turn)[:LINE_LETTERS]} -> {output(turn)[:LINE_LETTERS]}" for turn in trajectory.turns]
    return [
        Message(
            "system",
            'Read the episode and answer with one JSON object: {"episode_summary": "...", "episode_skill": "..."}. The '
            f"skill is one short instruction to the agent: {wanted}, not a retelling.",
        ),
        Message("user", "\n".join([*lines, "solved" if solved else "not solved"])),
    ]


def demonstration(trajectory: Trajectory, lesson: str, chat: Chat) -> Trajectory:
    """Return the record of an analyzer that wrote this lesson about an episode, for supervised training."""
    action = Action(text=answer(trajectory, lesson))
    ids = chat.action_ids(action)
    return replace(trajectory, turns=[Turn(chat.start(question(trajectory)), ids, [0.0] * len(ids), -1, action)])


def answer(trajectory: Trajectory, lesson: str) -> str:
    """Return how an analyzer writes a lesson down; `read` reads it."""
    summary = " ".join(call.name for turn in trajectory.turns for call in turn.action.tool_calls)
    return json.dumps({"episode_summary": summary[:LINE_LETTERS], "episode_skill": lesson})


def read(text: str) -> str:
    """Return the lesson in an analyzer's answer, or "" if there is none that may stand in a prompt."""
    try:
        lesson = json.loads(text[text.index("{") : text.rindex("}") + 1])["episode_skill"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    usable = isinstance(lesson, str) and 0 < len(lesson.strip()) <= MAX_LETTERS and "<|" not in lesson
    return lesson.strip() if usable else ""


def of_other_tasks(lessons: Sequence[str], tasks: Sequence[str]) -> list[str]:
    """Return for each episode the lesson of the next episode of another task, "" if there is none."""
    order = range(len(lessons))
    return [next((lessons[j] for j in (*order[i + 1 :], *order[:i]) if tasks[j] != tasks[i]), "") for i in order]
