"""What must hold for the ids of an episode, checked on its trajectory: the one check of all template tests."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from sinkflex.envs.env import Action, Message
from sinkflex.learner.rows import cut
from sinkflex.policy.chat import Chat, assistant_message
from sinkflex.policy.sampler import Sampled, Stream
from sinkflex.rollout.episode import Episode
from sinkflex.trajectory import Trajectory

Turns = Sequence[tuple[list[int], str, tuple[Message, ...]]]


class Answers:
    """An environment that has its answers ready, whatever is done."""

    def __init__(self, opening: tuple[Message, ...], answers: Sequence[tuple[Message, ...]]) -> None:
        self._opening, self._answers = opening, list(answers)

    def reset(self, seed: int, options: dict) -> tuple[tuple[Message, ...], dict]:
        return self._opening, {}

    def step(self, action: Action) -> tuple[tuple[Message, ...], float, bool, bool, dict]:
        answer = self._answers.pop(0)
        return answer, 1.0, not self._answers, False, {"stop_reason": "user_stop", "reward_parts": {}}


def play(chat: Chat, opening: tuple[Message, ...], turns: Turns, max_tokens: int = 10**6) -> Trajectory:
    """Run an episode in which the policy samples these ids: (ids, finish, the environment's answer) a turn."""
    episode = Episode(Answers(opening, [answer for _, _, answer in turns]), chat, "t", 0, 0, max_tokens, 0)
    episode.begin()
    stream = Stream(slot=-1, draws=np.random.default_rng(0), pending=[])
    for ids, finish, _ in turns:
        if episode.advance(Sampled(stream, list(ids), [-1.0] * len(ids), finish)) is None:
            break
    assert episode.trajectory is not None
    return episode.trajectory


def faults(chat: Chat, opening: Sequence[Message], trajectory: Trajectory, sampled: Sequence[list[int]]) -> list[str]:
    """Return what is wrong with the ids of an episode.

    Args:
        chat: the conversations.
        opening: what the environment said first.
        trajectory: the record; its prompts must equal one-shot renderings wherever the sampled ids are what the
            template writes, so give turns from `chat.action_ids`.
        sampled: the ids that the policy sampled, turn by turn.
    """
    found = []
    rows = cut(trajectory, np.arange(trajectory.sampled_tokens, dtype=np.float32), 0, 0)
    trained = np.concatenate([row.token_ids[row.loss_mask] for row in rows]).tolist()
    if trained != [i for ids in sampled for i in ids]:
        found.append("the trained ids are not the sampled ones, each once")
    if [row.advantages[row.loss_mask] for row in rows] and not np.array_equal(
        np.concatenate([row.advantages[row.loss_mask] for row in rows]), np.arange(len(trained))
    ):
        found.append("an id has another one's advantage")
    if any({len(row.token_ids)} != {len(array) for array in arrays(row)} for row in rows):
        found.append("ids, mask, log-probs or advantages differ in length")
    context: list[int] = []
    history = list(opening)
    for number, turn in enumerate(trajectory.turns):
        context = list(turn.prompt_ids) if turn.forks else context + turn.prompt_ids
        if context != chat.start(history):
            found.append(f"turn {number} is sampled after other ids than the template gives at once")
        context = context + turn.action_ids
        history += [assistant_message(turn.action), *turn.observation]
        said = [call.id for call in turn.action.tool_calls]
        if said and [m.tool_call_id for m in turn.observation] != said:
            found.append(f"turn {number} has other results than calls")
        prompt = chat.tokenizer.decode(chat.start(history), clean_up_tokenization_spaces=False)
        if any(not shown(message.content, prompt) for message in turn.observation):
            found.append(f"the prompt after turn {number} lacks a message")
    return found


def shown(content: str, prompt: str) -> bool:
    """True if a prompt holds a text, be it as JSON."""
    return content.strip() in prompt or json.dumps(content, ensure_ascii=False)[1:-1] in prompt


def arrays(row: object) -> list[np.ndarray]:
    """Return the arrays of a row."""
    fields = ("loss_mask", "behavior_logprobs", "advantages", "policy_version", "turn_index")
    return [getattr(row, name) for name in fields]
