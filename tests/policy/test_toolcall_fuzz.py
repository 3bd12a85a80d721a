# ruff: noqa: E501
"""Outputs of every format, mutated at random: no crash, and no call is lost or invented."""

from __future__ import annotations

import json
import random
import time
from collections import Counter

import pytest

from sinkflex.envs.env import ToolCall
from sinkflex.policy.toolcalls import FORMATS
from sinkflex.policy.toolcalls.reply import Format, Reply, call_id
from tests.policy.test_toolcalls import BAD, READ

MARKS = {
    "compact": ["<|call|>"],
    "hermes": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "qwen_xml": ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "<think>"],
    "llama": ["<|python_tag|>", ";", '{"name": "', '"parameters": ', "f(x=1)"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '"id": "a"'],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"],
    "harmony": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "to=functions.f", "final"],
}  # fmt: skip
SCRAPS = [
    *'{}[]":,\\ \n\t\0()<>|=;-',
    "\\u0041",
    "\\ud800",
    "1e999",
    "NaN",
    "null",
    "```",
    "é",
    "\U0001f600",
    "\ud800",
    "[" * 300,
]
NAMES = ["get_line", "f", "transfer_to_human_agents", "book_reservation"]
NOTES = ["", "I look.", "Let me see:\n", "It is 5 > 3 (a=1).", "\n"]


def value(rng: random.Random, depth: int = 0) -> object:
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 7:
        return {rng.choice("abc"): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return [None, True, rng.randrange(-9, 10**6), rng.random() * 1e9, 'say "<hi>"\n', f"L{rng.randrange(99)}, é"][kind]


def some_calls(rng: random.Random) -> list[ToolCall]:
    return [
        ToolCall(rng.choice(NAMES), {rng.choice("xyz"): value(rng) for _ in range(rng.randrange(4))}, call_id(k))
        for k in range(1 + rng.randrange(3))
    ]


def content(calls: tuple[ToolCall, ...] | list[ToolCall]) -> list[tuple[str, str]]:
    return [(call.name, json.dumps(dict(call.arguments))) for call in calls]


def damaged(rng: random.Random, output: str, marks: list[str]) -> str:
    """Change an output anywhere: drop, double, swap or cut pieces, put marks and scraps in."""
    for _ in range(1 + rng.randrange(4)):
        a, b = sorted(rng.randrange(len(output) + 1) for _ in range(2))
        b = min(b, a + rng.choice([1, 3, 30]))
        piece = rng.choice([rng.choice(marks), rng.choice(SCRAPS), output[a:b] * 2, ""])
        output = rng.choice([output[:a] + piece + output[b:], output[:a] + piece + output[a:], output[:b]])
    return output


def dressed(rng: random.Random, form: Format, calls: list[ToolCall]) -> str:
    """Write calls with whatever may stand around them."""
    output = form.write(calls)
    if form.name == "hermes":
        output = (
            rng.choice(["", "<think>\nf?\n</think>\n\n"])
            + rng.choice(NOTES)
            + output.replace("}\n</", rng.choice(["}</", "} \n</"]))
        )
        return output + rng.choice(NOTES)
    if form.name == "llama":
        return rng.choice(["", "\n", "<|python_tag|>", "I look.<|python_tag|>"]) + output + rng.choice(["", " \n", ";"])
    if form.name == "harmony":
        return rng.choice(["", "<|channel|>analysis<|message|>f? {}<|end|><|start|>assistant"]) + output
    return (rng.choice(NOTES) if form.name != "compact" else rng.choice(["", "\n"])) + output + rng.choice(["", "\n"])


def nicked(rng: random.Random, output: str, form: Format) -> str:
    """Drop one sign of the JSON, or of the tags where those hold the arguments."""
    signs = "<>=/" if form.name == "qwen_xml" else '{}":,'
    at = rng.choice([k for k, sign in enumerate(output) if sign in signs])
    return output[:at] + output[at + 1 :]


def check_any(output: str, reply: Reply, form: Format) -> None:
    """What holds for any output at all."""
    action = reply.action(output)
    assert (action.text is not None) + bool(action.tool_calls) + (action.error is not None) == 1
    if reply.error:
        reply.error.encode()
        assert reply.text == output
        return
    json.dumps([dict(call.arguments) for call in reply.calls], allow_nan=False).encode()
    assert len({call.id for call in reply.calls}) == len(reply.calls)
    if "\\" not in output:
        for name, times in Counter(call.name for call in reply.calls).items():
            assert output.count(name) >= times, f"{name} was invented"
    if all(call.name in NAMES for call in reply.calls):
        assert content(form.read(form.write(reply.calls)).calls) == content(reply.calls)


def fuzz(form: Format, outputs: int, seed: int) -> float:
    """Read so many outputs and return the mean CPU time of one in seconds."""
    rng = random.Random(seed)
    known = [row[1] for row in READ if row[0] == form.name] + BAD[form.name]
    spent = 0.0
    for number in range(outputs):
        calls = some_calls(rng)
        kind = number % 10
        if kind < 6:
            output = damaged(rng, dressed(rng, form, calls) if kind < 4 else rng.choice(known), MARKS[form.name])
        else:
            output = dressed(rng, form, calls)
            output = nicked(rng, output, form) if kind == 9 else output
        started = time.thread_time()
        reply = form.read(output)
        spent += time.thread_time() - started
        check_any(output, reply, form)
        if kind in (6, 7, 8):
            assert content(reply.calls) == content(calls), output
        if kind == 9:
            assert reply.error or len(reply.calls) == len(calls), output
    return spent / outputs


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_outputs_crash_no_parser_and_lose_or_invent_no_call(name: str) -> None:
    fuzz(FORMATS[name], 900, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_thousand_mutated_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    for name, form in FORMATS.items():
        mean = fuzz(form, 33_400, seed=2)
        with capsys.disabled():
            print(f"\n{name}: 33400 outputs, {mean * 1e6:.1f} us of CPU time each", end="")
        assert mean < 100e-6
