"""The comparison with TRL: what its hooks hand over, a step of both sides, and the table.

pip install --no-deps trl==1.16.0 accelerate datasets   (beside this package's own dependencies)
pytest -m peers tests/bench
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sinkflex.build import chat_tools, make_env
from sinkflex.demonstrations import corpus, demonstrations
from sinkflex.policy.chat import Chat
from sinkflex.policy.tiny import build_tokenizer

SCRIPT = importlib.util.spec_from_file_location("against_trl", Path(__file__).parents[2] / "benchmarks/against_trl.py")
assert SCRIPT is not None and SCRIPT.loader is not None
against_trl: Any = importlib.util.module_from_spec(SCRIPT)
SCRIPT.loader.exec_module(against_trl)

SMALL = [
    "model.tiny.layers=1",
    "model.tiny.hidden=32",
    "model.tiny.vocabulary=1024",
    "warmup.steps=1",
    "warmup.demonstrations=2",
    "warmup.repeats=1",
    "warmup.forget={}",
    "rollout.groups=2",
    "rollout.group_size=2",
    "rollout.max_turn_tokens=6",
    "env.max_turns=3",
    "validation.split=test",
    "learner.learning_rate=1e-9",
]


def options_of(out: Path, steps: int = 1, sets: list[str] = SMALL) -> argparse.Namespace:
    return argparse.Namespace(out=out, steps=steps, our_steps=steps, save_every=1, trl_batch=2, set=sets)


def test_a_demonstration_through_the_hooks_has_the_reward_it_had(tmp_path: Path) -> None:
    config = against_trl.config_of(options_of(tmp_path, sets=[*SMALL, "env.max_turns=24"]), "start")
    env = make_env(config)
    tools = chat_tools(config, env)
    build_tokenizer(corpus(config), 1024).save_pretrained(tmp_path)
    chat = Chat(AutoTokenizer.from_pretrained(tmp_path), env.policy, tools)
    hooked = against_trl.tokenizer_for_trl(tmp_path, chat, tools)
    desk = against_trl.desk_of(config)()
    dialogues = demonstrations(config)
    assert any(dialogue.reward == 1.0 for dialogue in dialogues)
    for dialogue in dialogues:
        desk.reset(task_id=dialogue.task_id, prompt="")
        opening = [{"role": m.role, "content": m.content} for m in dialogue.opening]
        seen = hooked.apply_chat_template(opening, tools=[desk.act], add_generation_prompt=True, return_dict=False)
        assert seen == chat.start(dialogue.opening)
        reply = {}
        for action, observation in dialogue.exchanges:
            reply = hooked.parse_response(chat.action_ids(action), prefix=seen)
            for call in reply["tool_calls"]:
                assert (
                    getattr(desk, call["function"]["name"])(**call["function"]["arguments"]) == observation[0].content
                )
        assert not reply["tool_calls"]
        assert desk._finish(reply) == dialogue.reward


def test_without_trl_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(SystemExit, match="pip install --no-deps trl=="):
        against_trl.require_trl()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.15.2")
    with pytest.raises(SystemExit, match=r"trl is 1\.15\.2"):
        against_trl.require_trl()


def test_the_table_divides_what_a_second_does(tmp_path: Path) -> None:
    def row(step: int, rollout: float, update: float) -> dict[str, float]:
        counts = {"episodes": 8, "generated_tokens": 100, "row_tokens": 1000, "turns": 3, "reward": 0.5}
        times = {
            f"{part}_{clock}": x for part, x in (("rollout", rollout), ("update", update)) for clock in ("wall", "cpu")
        }
        return {"step": step, **times, **counts, "peak_bytes": 1e6}

    for side, rollout, update in (("ours", 1.0, 2.0), ("trl", 10.0, 8.0)):
        for step in (1, 2):
            against_trl.append(tmp_path / f"{side}.jsonl", row(step, rollout, update))
        for step, score in enumerate((0.1, 0.3, 0.5) if side == "ours" else (0.1, 0.2, 0.3)):
            against_trl.append(tmp_path / "scores.jsonl", {"side": side, "step": step, "score": score})
    text = against_trl.table(tmp_path)
    assert "| episodes/s, cpu | 8 | 0.8 | 10.0 | 8 |" in text
    assert "| update tokens/s, wall | 500 | 125 | 4.0 | 3 |" in text
    assert "| seconds to TRL's best score (0.300), cpu | 3 | 36 | 12.0 | 5 |" in text
    assert "no finished step" in against_trl.table(tmp_path / "elsewhere")


@pytest.mark.peers
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_both_sides_make_a_step_and_are_scored(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed: pip install --no-deps trl==1.16.0")
    options = options_of(tmp_path)
    against_trl.warm_start(options)
    for side, run in (("ours", against_trl.ours), ("trl", against_trl.trl_side)):
        run(options)
        assert against_trl.finished(options, side)
        assert against_trl.model_folder(options, side, 1).is_dir()
    rows = [json.loads((tmp_path / f"{side}.jsonl").read_text()) for side in ("ours", "trl")]
    assert rows[0].keys() == rows[1].keys()
    assert rows[0]["episodes"] == rows[1]["episodes"] == 4
    assert all(row["turns"] <= 3 and row["rollout_cpu"] > 0 and row["update_cpu"] > 0 for row in rows)
    assert "episodes/s" in against_trl.table(tmp_path)
