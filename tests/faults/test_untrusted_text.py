"""What models, tools, users and servers say is shown, and never obeyed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sinkflex import cli
from sinkflex.config import Config
from sinkflex.envs.env import Action, Message, StopReason
from sinkflex.mistakes import fail
from sinkflex.plain import plain
from sinkflex.policy.model import load_policy
from sinkflex.report.score import score_text
from sinkflex.scores import summarize
from sinkflex.trajectory import Group, Outcome, Trajectory, Turn, read_trajectories, write_trajectories
from sinkflex.writers import ConsoleWriter
from tests.policy.tiny_policy import TOOLS, tiny_policy

HOSTILE = (
    "\x1b[2J\x1b[31mred",  # clears the screen
    "\x1b]0;title\x07\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\",
    "\x9b31m",  # the same in one byte
    "over\rwritten\x08\x08",
    "[bold red]markup[/] [link=file:///etc]x[/link] [/]",
    "%s %(levelname)s {} {0.__class__} ${HOME} $(id) `id`",
    "{{ 7 * 7 }} {% for x in ().__class__.__base__.__subclasses__() %}{% endfor %}",
    "\u202egnitirw desrever\u2066",
    "<script>alert(1)</script> <img src=x onerror='alert(1)'> &lt; \"quoted\"",
    ":warning: [@click=app.quit]x[/] \\[red]",
    "half a pair \ud83d of surrogates",
    "two\nlines\ttab",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_plain_text_keeps_what_is_read_and_shows_what_would_act(text: str) -> None:
    shown = plain(text)
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\r", "\x08", "\u202e", "\u2066", "\ud83d"}
    shown.encode()
    kept = [c for c in text if c.isascii() and (c.isprintable() or c in "\n\t")]
    assert [c for c in kept if c not in shown] == []
    assert plain("žluťoučký kůň 日本語 🙂\n") == "žluťoučký kůň 日本語 🙂\n"


@pytest.mark.parametrize("text", HOSTILE)
def test_the_console_prints_it_as_it_is(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    console = ConsoleWriter(Config())
    console.doing(text)
    console.say(text)
    console.close()
    assert capfd.readouterr().err == plain(text).expandtabs() + "\n"


@pytest.mark.parametrize("text", HOSTILE)
def test_results_and_errors_of_a_command_are_printed_as_they_are(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli._print_result([{"task": text, "fault": text}], as_json=False)
    cli._print_result({"invalid": {text: 3}}, as_json=False)
    cli._print_result(text, as_json=False)
    cli._show_warning(text, UserWarning)
    with pytest.raises(cli.typer.Exit):
        fail(text, 2)
    out, err = capsys.readouterr()
    assert not set(out + err) & {"\x1b", "\x07", "\x9b", "\r", "\x08", "\u202e", "\u2066"}
    assert plain(text).splitlines()[0] in out and plain(text) in err
    cli._print_result({"fault": text}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"fault": text}


def test_trajectories_hold_it_as_data(tmp_path: Path) -> None:
    turns = [
        Turn([1], [2], [-0.5], 0, Action(text=text), observation=(Message("tool", text, tool_call_id="a"),))
        for text in HOSTILE
    ]
    for text in HOSTILE:
        episode = Trajectory(text, 0, turns, Outcome.INVALID, StopReason.USER_FAULT, None, fault=text)
        write_trajectories(tmp_path / "t.jsonl.zst", [Group(text, [episode])])
        assert read_trajectories(tmp_path / "t.jsonl.zst") == [Group(text, [episode])]


@pytest.mark.parametrize("text", HOSTILE)
def test_the_text_of_a_score_shows_it_as_it_is(text: str) -> None:
    groups = [
        Group(text, [Trajectory(text, 0, [], Outcome.SOLVED, StopReason.USER_STOP, 1.0, {text: 1.0}, text)]),
        Group(
            "b",
            [Trajectory("b", 0, [], Outcome.INVALID, StopReason.USER_FAULT, None, fault=text, tags={"family": text})],
        ),
    ]
    score = {**summarize(groups), "policy": text, "suite": text, "split": "test", "temperature": 0.0, "about": text}
    score |= {"floors": {text: 0.0}, "per_task": [{"task": text, "mean@1": 1.0}], "wilson": [0.0, 1.0]}
    shown = plain(score_text(score))
    assert shown.count(plain(text).splitlines()[0].expandtabs()) >= 5


@pytest.mark.parametrize("text", HOSTILE)
def test_a_chat_template_renders_it_and_does_not_run_it(text: str) -> None:
    from sinkflex.policy.chat import Chat

    policy = tiny_policy()
    chat = Chat(policy.tokenizer, "", TOOLS)
    ids = chat.start([Message("user", text)])
    assert text.strip().replace("\ud83d", "\ufffd") in str(policy.tokenizer.decode(ids))


def test_a_model_folder_with_code_of_its_own_is_refused_unless_trusted(tmp_path: Path) -> None:
    marker = tmp_path / "was_run"
    folder = tmp_path / "model"
    tiny_policy().save(folder)
    code = f"open({str(marker)!r}, 'w').close()\nclass Own: pass\nclass OwnConfig: pass\n"
    (folder / "modeling_own.py").write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        settings = json.loads((folder / name).read_text())
        if name == "config.json":
            settings["model_type"] = "own"
        settings["auto_map"] = {
            "AutoConfig": "modeling_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.Own",
            "AutoTokenizer": ["modeling_own.Own", None],
        }
        (folder / name).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"model\.path: .*trust_remote_code"):
        load_policy(Config(), folder)
    assert not marker.exists()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.path: .*safetensors"):
        load_policy(Config(), tmp_path)
