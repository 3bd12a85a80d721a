"""A checkpoint is complete or not there, damage is found, and what comes back equals what went in."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from sinkflex.checkpoint import CheckpointError, CheckpointWarning, best, latest, save, verify

PROVENANCE = {"version": "0.1.0", "learner.learning_rate": 1e-3}


def write(directory: Path, step: int, **options):
    """Save a small checkpoint whose content depends on the step."""
    state = {"weights": torch.full((3, 2), float(step)), "tasks": ["a", "b"]}
    folders = {"model": lambda folder: (folder / "config.json").write_text(f'{{"step": {step}}}')}
    return save(directory, step, state, provenance=PROVENANCE, folders=folders, **options)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_state_comes_back_as_it_was(tmp_path):
    state = {
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "nested": {"list": [1, 2.5, None, True, "é"], "tuple": (1, (2, torch.ones(1)))},
        "by_index": {0: {"exp_avg": torch.zeros(2)}, 7: "x"},
        "float": 0.1 + 0.2,
        "empty": {},
    }
    save(tmp_path, 1, state, provenance={})
    back = latest(tmp_path).state()
    assert torch.equal(back.pop("tensor"), state.pop("tensor"))
    assert torch.equal(back.pop("transposed"), state.pop("transposed"))
    assert torch.equal(back.pop("scalar"), state.pop("scalar"))
    assert torch.equal(back["by_index"][0].pop("exp_avg"), state["by_index"][0].pop("exp_avg"))
    assert torch.equal(back["nested"].pop("tuple")[1][1], state["nested"].pop("tuple")[1][1])
    assert back == state


def test_tied_tensors_are_saved_as_two(tmp_path):
    shared = torch.ones(2)
    save(tmp_path, 1, {"a": shared, "b": shared}, provenance={})
    assert torch.equal(latest(tmp_path).state()["b"], shared)


def test_optimizer_continues_bit_for_bit(tmp_path):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))

    def step(model, optimizer, seed):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()

    model, optimizer = build()
    for seed in range(3):
        step(model, optimizer, seed)
    save(tmp_path, 3, {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}, provenance={})
    step(model, optimizer, 3)

    resumed, resumed_optimizer = build()
    state = latest(tmp_path).state()
    resumed.load_state_dict(state["model"])
    resumed_optimizer.load_state_dict(state["optimizer"])
    step(resumed, resumed_optimizer, 3)
    assert torch.equal(model.weight, resumed.weight)
    assert torch.equal(
        optimizer.state[model.weight]["exp_avg_sq"], resumed_optimizer.state[resumed.weight]["exp_avg_sq"]
    )


def test_newest_and_best_are_kept(tmp_path):
    for step, score in [(10, 0.2), (20, 0.9), (30, 0.9), (40, 0.1), (100, None)]:
        write(tmp_path, step, score=score, keep=2)
    assert names(tmp_path) == ["step_100", "step_30", "step_40"]
    assert latest(tmp_path).step == 100
    assert best(tmp_path).step == 30


def test_no_checkpoint_is_none(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    assert best(tmp_path) is None


@pytest.mark.parametrize(
    "victim", ["about.json", "state.json", "tensors.safetensors", "model/config.json", "SHA256SUMS"]
)
def test_every_flipped_bit_and_every_cut_is_found(tmp_path, victim):
    path = write(tmp_path, 5).path / victim
    whole = path.read_bytes()
    choose = random.Random(0)
    for bit in choose.sample(range(len(whole) * 8), 40):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert verify(path.parents[len(Path(victim).parts) - 1]), f"bit {bit} of {victim}"
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert verify(path.parents[len(Path(victim).parts) - 1]), f"{victim} cut at {length}"
    path.write_bytes(whole)
    assert verify(tmp_path / "step_5") == ""


def test_damage_falls_back_to_the_previous_one_and_names_the_file(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "step_2" / "model" / "config.json").unlink()
    with pytest.warns(CheckpointWarning, match=r"step_2: hashes differ for model/config\.json"):
        assert latest(tmp_path).step == 1
    write(tmp_path, 2)
    assert latest(tmp_path).step == 2


def test_a_damaged_later_one_goes_with_the_next_save(tmp_path):
    write(tmp_path, 10)
    write(tmp_path, 20)
    (tmp_path / "step_20" / "SHA256SUMS").write_text("")
    write(tmp_path, 15)
    assert names(tmp_path) == ["step_10", "step_15"]


def test_only_damaged_ones_is_an_error_not_a_fresh_start(tmp_path):
    write(tmp_path, 1)
    (tmp_path / "step_1" / "state.json").write_text("{}")
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match=r"every checkpoint .* is damaged"):
        latest(tmp_path)


def test_a_hidden_file_of_a_file_browser_is_not_damage(tmp_path):
    checkpoint = write(tmp_path, 1)
    (checkpoint.path / ".DS_Store").write_text("x")
    assert verify(checkpoint.path) == ""


def test_a_failing_writer_leaves_nothing(tmp_path):
    write(tmp_path, 1)

    def full(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, {}, provenance={}, folders={"model": full})
    assert names(tmp_path) == ["step_1"]


def test_what_is_not_json_is_refused_by_its_place(tmp_path):
    with pytest.raises(TypeError, match=r"state\.sampler\.1 is a set"):
        save(tmp_path, 1, {"sampler": [1, {2}]}, provenance={})
    assert names(tmp_path) == []


def test_changed_origin_is_said(tmp_path):
    checkpoint = write(tmp_path, 1)
    assert checkpoint.changes(PROVENANCE) == []
    assert checkpoint.changes({"version": "0.2.0", "seed": "abc"}) == [
        "learner.learning_rate was 0.001, is now null",
        'seed was null, is now "abc"',
        'version was "0.1.0", is now "0.2.0"',
    ]


def test_changed_files_and_tasks_are_told_by_their_names(tmp_path):
    before = {"data": {"tasks.json": "1", "db.toml": "2", "old.md": "3"}, "tasks": dict.fromkeys("abcdef", "0")}
    saved = save(tmp_path, 1, {}, provenance=before)
    after = {"data": {"tasks.json": "1", "db.toml": "9", "new.md": "3"}, "tasks": dict.fromkeys("ag", "0")}
    assert saved.changes(after) == [
        "data: 1 changed (db.toml), 1 new (new.md), 1 gone (old.md)",
        "tasks: 1 new (g), 5 gone (b, c, d, ...)",
    ]
    older = save(tmp_path, 2, {}, provenance={**before, "data": "one hash"})
    assert older.changes(before)[0].startswith("data may have changed")


def test_equal_state_gives_equal_files(tmp_path):
    first, second = write(tmp_path / "a", 3), write(tmp_path / "b", 3)
    assert (first.path / "SHA256SUMS").read_bytes() == (second.path / "SHA256SUMS").read_bytes()


def test_death_at_any_point_leaves_whole_checkpoints(tmp_path):
    """Ends a process inside the k-th file operation of a save, for every k, and looks at what is visible."""
    program = textwrap.dedent(
        """
        import itertools, os, pathlib, sys
        import torch
        from sinkflex import checkpoint

        class Death:
            def __init__(self, directory, deadly):
                self.directory, self.left = str(directory), deadly

            def __call__(self, event, arguments):
                if event in FILE_OPERATIONS and self.directory in str(arguments[0]):
                    self.left -= 1
                    if self.left == 0:
                        os._exit(9)

        FILE_OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
        for deadly in itertools.count(1):
            directory = pathlib.Path(sys.argv[1], str(deadly))
            checkpoint.save(directory, 1, {"w": torch.ones(2)}, provenance={})
            child = os.fork()
            if child == 0:
                sys.addaudithook(Death(directory, deadly))
                checkpoint.save(directory, 2, {"w": torch.zeros(2)}, provenance={}, keep=1)
                os._exit(0)
            if os.waitpid(child, 0)[1] == 0:
                break
        """
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    directories = sorted(tmp_path.iterdir())
    assert len(directories) > 20
    for directory in directories:
        visible = [path for path in directory.iterdir() if not path.name.startswith(".")]
        assert visible
        assert [verify(path) for path in visible] == [""] * len(visible)
        write(directory, 3, keep=1)
        assert names(directory) == ["step_3"]
