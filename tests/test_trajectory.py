"""Trajectories on disk: what was written is read back, and damage is told from an end."""

from __future__ import annotations

import json
from hashlib import sha512
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sinkflex.envs.env import Action, Message, StopReason, ToolCall
from sinkflex.trajectory import (
    Group,
    Outcome,
    Trajectory,
    Turn,
    from_record,
    read_trajectories,
    to_record,
    write_trajectories,
)


def episode(task_id: str, member: int = 0, reward: float | None = 1.0) -> Trajectory:
    call, own = ToolCall("get_line", {"line": ["L1", 2, None]}, "c0"), ToolCall("run_speed_test", {}, "user_call_3")
    answer = Message("tool", '{"zażółć": 1}', tool_call_id="c0")
    turns = [
        Turn([1, 2], [3], [-0.25], 7, Action(tool_calls=(call,)), (answer,), forks=True, reward_parts={"x": 0.5}),
        Turn([4], [5, 6], [-1.0, -2.0], 7, Action(error="unfinished"), finish="length"),
    ]
    record = [
        ("assistant", Message("assistant", "Hi!")),
        ("user", Message("user", "", (own,))),
        ("user", Message("tool", "Error: no", (), "user_call_3", True)),
        ("assistant", Message("assistant", "", (call,))),
        ("assistant", answer),
    ]
    outcome = Outcome.INVALID if reward is None else Outcome.SOLVED
    fault = "the server is down" if reward is None else None
    return Trajectory(
        task_id,
        member,
        turns,
        outcome,
        StopReason.USER_STOP,
        reward,
        {"DB": 1.0},
        "endpoint",
        2**62,
        fault,
        {"family": "mms", "faults": 3},
        "telecom",
        record,
        [Message("system", "Be brief."), Message("user", "Hm?")],
    )


def written(path: Path) -> list[Group]:
    groups = [
        Group("a", [episode("a", 0), episode("a", 1, None)]),
        Group("b", [episode("b", 0), episode("b", 1)]),
        Group("a", [episode("a", 0)]),
    ]
    write_trajectories(path, groups)
    return groups


def test_groups_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.jsonl.zst"
    groups = written(path)
    assert read_trajectories(path) == groups
    plain = tmp_path / "t.jsonl"
    plain.write_bytes(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
    assert read_trajectories(plain) == groups


def test_a_file_of_an_earlier_version_is_read_without_what_it_lacks(tmp_path: Path) -> None:
    values: dict[str, Any] = {"group": 0, **to_record(episode("a"))} | {"version": 1}
    del values["domain"], values["record"], values["opening"]
    (tmp_path / "t.jsonl").write_text(json.dumps(values) + "\n")
    read = read_trajectories(tmp_path / "t.jsonl")[0].members[0]
    assert (read.domain, read.record, read.opening) == ("", [], []) and read.turns == episode("a").turns


@pytest.mark.parametrize("kept", [-1, -3, -400])
def test_a_cut_last_line_is_left_out_with_a_warning(tmp_path: Path, kept: int) -> None:
    written(tmp_path / "t.jsonl.zst")
    data = zstandard.ZstdDecompressor().decompress((tmp_path / "t.jsonl.zst").read_bytes())
    (tmp_path / "cut.jsonl").write_bytes(data[:kept])
    if kept == -1:  # only the end of line is missing
        assert len(read_trajectories(tmp_path / "cut.jsonl")) == 3
        return
    with pytest.warns(UserWarning, match="cut off; the 4 episodes"):
        assert [len(group.members) for group in read_trajectories(tmp_path / "cut.jsonl")] == [2, 2]


def test_a_cut_compressed_file_gives_what_is_before_the_cut(tmp_path: Path) -> None:
    groups = [Group(str(i), [episode(str(i))]) for i in range(2000)]
    for i, group in enumerate(groups):  # text that does not compress to nothing
        group.members[0].fault = sha512(str(i).encode()).hexdigest() * 2
    write_trajectories(tmp_path / "t.jsonl.zst", groups)
    data = (tmp_path / "t.jsonl.zst").read_bytes()
    (tmp_path / "t.jsonl.zst").write_bytes(data[: len(data) // 2])
    with pytest.warns(UserWarning, match="cut off"):
        read = read_trajectories(tmp_path / "t.jsonl.zst")
    assert 100 < len(read) < 1999 and read == groups[: len(read)]


def test_damage_in_the_middle_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    line = json.dumps({"group": 0, **to_record(episode("a"))})
    for bad in (
        "{",
        "[1]",
        '{"version": 2}',
        line.replace('"solved"', '"won"'),
        line.replace('"error": true', '"x": 1'),
    ):
        (tmp_path / "t.jsonl").write_text(f"{line}\n{bad}\n{line}\n")
        with pytest.raises(ValueError, match=r"t\.jsonl: line 2 is no trajectory"):
            read_trajectories(tmp_path / "t.jsonl")


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    written(tmp_path / "t.jsonl.zst")
    data = bytearray((tmp_path / "t.jsonl.zst").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "t.jsonl.zst").write_bytes(data)
    with pytest.raises(ValueError, match="expected"):
        read_trajectories(tmp_path / "t.jsonl.zst")


@pytest.mark.parametrize("content", [b"", b"\n", b"hello", b"\x00" * 100])
@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.zst"])
def test_another_file_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="expected"):
        read_trajectories(tmp_path / name)


def test_a_missing_file_names_the_nearest_and_a_newer_version_says_so(tmp_path: Path) -> None:
    written(tmp_path / "validation_3.jsonl.zst")
    with pytest.raises(ValueError, match=r"Did you mean .*validation_3\.jsonl\.zst"):
        read_trajectories(tmp_path / "validation_4.jsonl.zst")
    with pytest.raises(ValueError, match="version 99, expected 1 to"):
        from_record(to_record(episode("a")) | {"version": 99})
