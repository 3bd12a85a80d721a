"""The endpoint user against a real, tiny model: a small server around transformers' own generation."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from scripted_server import completion, send, serving

from sinkflex.envs.env import Action, StopReason
from sinkflex.envs.tau2 import tasks
from sinkflex.envs.tau2.env import Tau2Env
from sinkflex.envs.tau2.policies import GREETING
from sinkflex.users.chat_server import ChatServer
from sinkflex.users.endpoint import EndpointUser, system_text


class TinyModel:
    """A random model behind the chat completion protocol; greedy, so that equal requests get equal answers."""

    def __init__(self) -> None:
        from sinkflex.config import TinyConfig
        from sinkflex.policy.tiny import build_model, build_tokenizer

        texts = [system_text(tasks.read("retail", str(i)), False) for i in range(5)]
        self.tokenizer = build_tokenizer(texts, 500)
        self.model = build_model(TinyConfig(hidden=64, intermediate=64, layers=2, max_tokens=4096), 500, seed=0).eval()

    def answer(self, messages: list[dict[str, Any]], max_tokens: int) -> str:
        inputs = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = self.model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens, min_new_tokens=4)
        return self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    def respond(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        messages = json.loads(json.dumps(body["messages"]))
        send(handler, completion({"role": "assistant", "content": self.answer(messages, body["max_tokens"])}))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_the_model_generates_is_what_the_agent_hears() -> None:
    import torch

    torch.set_num_threads(1)
    tiny = TinyModel()
    with serving(tiny.respond) as server:
        user = EndpointUser(ChatServer(server.url, "tiny", timeout_seconds=60.0), {"max_tokens": 16})
        env = Tau2Env("retail", "base", user=user, max_turns=3)
        observation, info = env.reset(seed=0, options={"task_id": "0"})
        heard = [observation[0].content]
        for _ in range(3):
            observation, *_, last = env.step(Action(text="What can I do for you?"))
            heard.append(observation[0].content)
    assert info["user"] == "endpoint" and last["stop_reason"] is StopReason.MAX_TURNS
    messages = [
        {"role": "system", "content": system_text(tasks.read("retail", "0"), False)},
        {"role": "user", "content": GREETING},
    ]
    for words in heard:
        assert words and words == tiny.answer(messages, 16).strip()
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": "What can I do for you?"}]
