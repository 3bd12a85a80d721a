"""Drafts: guesses of the next ids, so that one forward pass can check several ids of a turn.

An agent says much the same in many episodes. What followed the last few ids before, in this run, is likely to follow
them again. A draft changes what is computed together, never what is sampled: the sampler draws each id from the
policy's own distribution with the conversation's own random number, and keeps a drafted id only where the draw is that
id. (Speculative decoding, arXiv 2211.17192, with a draft from history in place of a draft model, and with common random
numbers in place of a rejection step.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from sinkflex.trajectory import Turn

CONTEXTS: tuple[int, ...] = (16, 8, 4, 2)  # ids looked back on, the longest first
REMEMBERED = 2**14  # contexts of each length that are kept
WORTH_IT = 0.4  # share of right guesses below which contexts of a length are asked no more for a while
TRIALS = 4  # right guesses that a length is credited with before its first


class Drafts:
    """Remembers what followed the last 16, 8, 4 and 2 ids.

    Attributes:
        limit: ids of one draft at most; 0 drafts nothing.
        tried, right: guesses that were checked, and that were the sampled id, by the context's length.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.tried = dict.fromkeys(CONTEXTS, 0)
        self.right = dict.fromkeys(CONTEXTS, 0)
        self._next: dict[int, dict[int, int]] = {size: {} for size in CONTEXTS}

    def copy(self) -> Drafts:
        """Return drafts that know the same and learn by themselves."""
        other = Drafts(self.limit)
        other.tried, other.right = dict(self.tried), dict(self.right)
        other._next = {size: dict(following) for size, following in self._next.items()}
        return other

    def fade(self) -> None:
        """Halve the counts, so that what was of no use once is tried again."""
        for counts in (self.tried, self.right):
            counts.update({size: count // 2 for size, count in counts.items()})

    def learn(self, ids: Sequence[int], start: int) -> None:
        """Remember what ids[start:] followed, and forget what has not been met for longest."""
        if not self.limit:
            return
        for size, following in self._next.items():
            for end in range(max(start, size), len(ids)):
                context = hash(tuple(ids[end - size : end]))
                following.pop(context, None)
                following[context] = ids[end]
            while len(following) > REMEMBERED:
                del following[next(iter(following))]

    def learn_episode(self, turns: Sequence[Turn]) -> None:
        """Remember the turns of an episode that another process sampled."""
        conversation: list[int] = []
        for turn in turns:
            conversation = [*([] if turn.forks else conversation), *turn.prompt_ids]
            said = [*conversation[-CONTEXTS[0] :], *turn.action_ids]
            self.learn(said, len(said) - len(turn.action_ids))
            conversation += turn.action_ids

    def propose(self, ids: Sequence[int], limit: int, stop: Collection[int]) -> tuple[list[int], list[int]]:
        """Guess what follows.

        Args:
            ids: the conversation so far, or its last ids.
            limit: further bound of the length.
            stop: ids that end a turn; a draft ends before one, since nothing is sampled after it.

        Returns:
            The guessed ids, and for each the length of the context that it followed.
        """
        tail = list(ids[-CONTEXTS[0] :])
        draft: list[int] = []
        sizes: list[int] = []
        asked = [size for size in CONTEXTS if self.right[size] + TRIALS >= WORTH_IT * (self.tried[size] + TRIALS)]
        while len(draft) < min(limit, self.limit):
            for size in asked:
                guess = self._next[size].get(hash(tuple(tail[-size:]))) if len(tail) >= size else None
                if guess is not None:
                    break
            else:
                break
            if guess in stop:
                break
            draft.append(guess)
            sizes.append(size)
            tail = [*tail[-CONTEXTS[0] + 1 :], guess]
        return draft, sizes

    def judge(self, sizes: Sequence[int], right: int) -> None:
        """Take note that the first `right` guesses of a draft were what was sampled, and the next one was not."""
        for place, size in enumerate(sizes[: right + 1]):
            self.tried[size] += 1
            self.right[size] += place < right

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is remembered as int64 tensors: drafts decide what is computed together, and so the last bits."""
        found = {"tried": torch.tensor(list(self.tried.values())), "right": torch.tensor(list(self.right.values()))}
        for size, following in self._next.items():
            found[str(size)] = torch.tensor([list(following.keys()), list(following.values())], dtype=torch.int64)
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` returned."""
        self.tried, self.right = (dict(zip(CONTEXTS, state[n].tolist(), strict=True)) for n in ("tried", "right"))
        self._next = {size: dict(zip(*state[str(size)].tolist(), strict=True)) for size in CONTEXTS}
