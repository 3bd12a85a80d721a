"""The command line answers quickly, names mistakes in one line, and leaves a run that continues."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from sinkflex import cli
from sinkflex.mistakes import errors_as_lines

SOURCE = Path(cli.__file__).parents[1]
# The smallest run there is: nine tasks, few turns, no warm start.
SMALL = ["env.domain=mock", "env.max_turns=2", "tasks.split=base", "validation.split=base", "warmup.steps=0"]


def train(*overrides: str) -> list[str]:
    """Return the arguments of a small training run."""
    return ["train", "recipes/smoke.toml", *(text for override in (*SMALL, *overrides) for text in ("--set", override))]


@pytest.fixture
def here(monkeypatch, capsys):
    """Return a function that runs the command in this process, where torch is imported once."""
    import torch

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sinkflex", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return (stop.value.code, *capsys.readouterr())

    yield run
    torch.use_deterministic_algorithms(False)


def sinkflex(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as a user does."""
    program = [sys.executable, "-c", "from sinkflex.cli import main; main()", *arguments]
    return subprocess.run(program, capture_output=True, text=True, check=False)


def failing(error: BaseException, debug: bool = False) -> None:
    with errors_as_lines(debug):
        raise error


def test_help_answers_within_a_second_and_imports_nothing_heavy():
    seconds = []
    for _ in range(3):
        before = os.times()
        done = sinkflex("--help")
        after = os.times()
        # CPU time of the command: what it would take if nothing else ran.
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) <= 1.0
    assert done.returncode == 0
    for name in ("train", "sft", "evaluate", "rollout", "bench", "tasks", "methods"):
        assert re.search(rf"\b{name}\b", done.stdout)
    program = "import sys, sinkflex.cli; print({'torch', 'transformers', 'numpy', 'tau2'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "set()"


def test_a_mistake_in_the_recipe_is_found_before_torch_is_imported():
    program = (
        "import sys\nfrom sinkflex.cli import main\n"
        "sys.argv = ['sinkflex', 'train', 'recipes/smoke.toml', '--set', 'train.stps=2']\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == "False\n"
    assert done.stderr == "--set train.stps=2: train.stps is not an option. Did you mean train.steps?\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["train", "recipes/smok.toml"],
            "smok.toml: no such file, expected a recipe. Did you mean recipes/smoke.toml?",
        ),
        (train("run.seed"), "--set run.seed: expected section.key=value"),
        (
            train("method.name=grop"),
            "--set method.name=grop: method.name: there is no method 'grop'. Did you mean grpo?",
        ),
        (train("method.name=STEP0"), "there is no method 'STEP0'. Did you mean stepo?"),
        (train("method.name=dapo"), "there is no method 'dapo'. It is options of grpo: Presets in docs/methods.md."),
        (train("method.clip_lo=1"), "Did you mean method.clip_low?"),
        (train("model.path=no/such/folder"), "no/such/folder"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_2(here, arguments, line, tmp_path):
    status, out, error = here(*arguments, "--set", f"run.directory={tmp_path / 'run'}")
    assert (status, out) == (2, "")
    assert line in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_wrong_command_names_the_nearest():
    done = sinkflex("tran")
    assert done.returncode == 2
    assert "Did you mean 'train'?" in done.stderr


@pytest.mark.parametrize("command", ["train", "sft", "rollout", "check"])
def test_a_forgotten_set_is_told(command):
    done = sinkflex(command, "recipes/smoke.toml", "--set", "run.seed=1", "train.steps=3", "env.domain=my mock")
    assert (done.returncode, done.stdout) == (2, "")
    told = re.sub(r"[\s│]+", " ", done.stderr)
    assert "Type --set train.steps=3 --set 'env.domain=my mock'" in told and "--set run.seed" not in told


@pytest.mark.parametrize("place", ["recipe", "value"])
def test_a_file_and_the_value_of_an_option_are_no_forgotten_set(place, here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("kl.weight=0.1").write_text("[run]\nseed = x")
    arguments = ["kl.weight=0.1"] if place == "recipe" else ["nowhere", "--recipe", "my.lr=3"]
    status, _, error = here("train" if place == "recipe" else "evaluate", *arguments)
    assert status == 2 and "--set" not in error and ("kl.weight=0.1: " in error or "nowhere: no such folder" in error)


def test_debug_shows_where_a_mistake_was_found():
    done = sinkflex("train", "recipes/smok.toml", "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr and "recipe.py" in done.stderr


def test_a_bug_is_not_dressed_up_as_a_mistake():
    with pytest.raises(ValueError, match="invalid literal"), errors_as_lines(debug=False):
        int("x")
    with pytest.raises(AssertionError):
        failing(AssertionError("ours"))


def test_a_forbidden_folder_is_one_line_with_a_way_on(capsys):
    with pytest.raises(typer.Exit) as stop:
        failing(PermissionError(errno.EACCES, "Permission denied", "runs/x"))
    assert stop.value.exit_code == 2
    assert capsys.readouterr().err.startswith("Permission denied: runs/x. Choose a folder you may write to with --set")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "runs/x/metrics.jsonl"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_line_with_a_way_on(capsys, monkeypatch, error):
    monkeypatch.setattr(sys, "argv", ["sinkflex", "train", "my recipe.toml"])
    with pytest.raises(typer.Exit) as stop:
        failing(error)
    assert stop.value.exit_code == 2
    line = capsys.readouterr().err
    assert line.startswith("No space left on device")
    assert "Free some space" in line
    assert line.endswith("continue with: sinkflex train 'my recipe.toml'\n")


def test_a_run_folder_that_is_a_file_is_one_line(here, tmp_path):
    (tmp_path / "file").touch()
    status, _, error = here(*train(f"run.directory={tmp_path / 'file'}"))
    assert status == 2
    assert re.fullmatch(r"File exists: .*/file\. Choose a folder .*\n", error)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_one_line(here, tmp_path):
    tmp_path.chmod(0o500)
    status, _, error = here(*train(f"run.directory={tmp_path / 'run'}"))
    assert status == 2
    assert re.fullmatch(r"Permission denied: .*Choose a folder .*\n", error)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Return the directory of a small finished run."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["sinkflex", *train(f"run.directory={directory}", "train.steps=1")])
        cli.main()
    assert stop.value.code == 0
    return directory


def test_evaluate_scores_a_run_and_a_model_folder_alike(here, finished):
    run = json.loads(here("evaluate", str(finished), "--split", "base", "--json")[1])
    assert (run["tasks"], run["suite"], run["split"]) == (9, "tau2/mock", "base")
    assert {"do_nothing", "always_transfer"} <= set(run["floors"])
    folder = str(Path(run["policy"]) / "model")
    recipe = str(finished / "config.toml")
    model = json.loads(here("evaluate", folder, "--recipe", recipe, "--split", "base", "--json")[1])
    assert model.pop("policy") != run.pop("policy")
    assert model == run
    assert "floors: do_nothing" in here("evaluate", str(finished), "--split", "base")[1]


def test_evaluate_says_what_is_missing(here, finished):
    assert "Did you mean" in here("evaluate", f"{finished}x")[2]
    status, out, error = here("evaluate", str(finished / "checkpoints"))
    assert (status, out) == (2, "") and error.endswith(f"Type sinkflex evaluate {finished}\n")
    assert here("evaluate", str(finished.parent))[2].endswith(f"Type sinkflex evaluate {finished}\n")
    assert "--recipe" in here("evaluate", str(finished / "warm_start"))[2]
    recipe = "recipes/telecom_cpu.toml"
    assert f"{recipe} is a recipe" in here("evaluate", recipe)[2]
    assert re.search("Type sinkflex evaluate runs/telecom_cpu", here("evaluate", recipe)[2])
    assert 'mock has no such split. Type "base".' in here("evaluate", str(finished))[2]


def test_rollout_keeps_trajectories_of_a_run_or_of_a_new_policy(here, finished, tmp_path):
    overrides = [text for override in SMALL for text in ("--set", override)]
    for directory, policy in ((finished, f"{finished}/checkpoints/step_"), (tmp_path, "untrained")):
        arguments = ["rollout", "recipes/smoke.toml", *overrides, "--set", f"run.directory={directory}"]
        result = json.loads(here(*arguments, "--episodes", "3", "--json")[1])
        assert result["policy"].startswith(policy)
        assert result["trials"] == 3
        assert Path(result["file"]).stat().st_size > 0


def test_tasks_and_methods_can_be_read_by_programs_and_people(here):
    tasks = json.loads(here("tasks", "list", "--json")[1])
    assert {"suite": "tau2/telecom", "split": "test", "tasks": 40, "role": "holdout"} in tasks
    assert re.search(r"telecom +test +40 +holdout", here("tasks", "list")[1])
    assert re.search(r"telecom +test +40 +sealed", here("tasks", "list", "--trained", "tau2/retail")[1])
    methods = json.loads(here("methods", "--json")[1])
    assert "grpo" in [method["method"] for method in methods]
    assert all("arXiv" in method["paper"] and method["options"] for method in methods)
    lines = here("methods")[1].splitlines()
    assert all(any(line.startswith(f"{method['method']} ") for line in lines) for method in methods)
    assert len(lines) <= len(methods) + 2 and max(map(len, lines)) <= 132
    for method in methods:
        text = here("methods", method["method"])[1]
        assert method["recipe"] in text and Path(method["recipe"]).is_file()
        assert all(f"method.{option} = " in text for option in method["options"])
    differs, shared = here("methods", "stepo")[1].split("Options as there")
    assert "method.clip_high = 0.28 (there 0.2)  The ratio is clipped above" in differs
    assert "method.turn_weight" in differs and "method.clip_low = 0.2" in shared
    assert "Did you mean stepo?" in here("methods", "step")[2]


@pytest.mark.parametrize("form", ["", "--json"])
def test_output_cut_by_a_pager_leaves_no_traceback(form):
    program = f"{sys.executable} -c 'from sinkflex.cli import main; main()' tasks list {form} | true"
    assert subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stderr == ""


def test_a_wrong_option_of_the_method_is_found_before_all_the_rest_is_imported(tmp_path):
    program = (
        "import sys\nfrom sinkflex.cli import main\n"
        f"sys.argv = ['sinkflex', 'train', 'recipes/smoke.toml', '--set', 'run.directory={tmp_path}/run', "
        "'--set', 'method.clip_lo=1']\n"
        "try:\n    main()\nfinally:\n    print({'transformers', 'tau2', 'sinkflex.run'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "set()\n")
    assert done.stderr.startswith("--set method.clip_lo=1: method.clip_lo is not an option. Did you")
    assert not (tmp_path / "run").exists()


def test_a_method_of_ones_own_lies_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "cautious.py").write_text(
        "from sinkflex.methods.method import Method, Options\n\n\nclass Caution(Options):\n    care: float = 1.0\n\n\n"
        "class Cautious(Method):\n    Options = Caution\n"
    )
    arguments = ["train", str(Path("recipes/smoke.toml").resolve()), "--set", "method.name=cautious:Cautious"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    done = sinkflex(*arguments, "--set", "method.car=2")
    assert "Did you mean method.care?" in done.stderr


def test_a_run_directory_belongs_to_one_process(here, tmp_path):
    program = (
        "import pathlib, sys\nfrom sinkflex.lock import lock_directory\n"
        "lock = lock_directory(pathlib.Path(sys.argv[1]))\nprint('locked', flush=True)\nsys.stdin.read()"
    )
    other = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(other, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        status, _, error = here(*train(f"run.directory={tmp_path}", "train.steps=0"))
        assert (status, len(error.splitlines())) == (2, 1)
        assert f"{tmp_path} is in use by process {process.pid}" in error
        process.kill()
    assert here(*train(f"run.directory={tmp_path}", "train.steps=0"))[0] == 0
    assert (tmp_path / ".lock").read_text() == ""


def test_rollout_takes_a_new_policy_where_a_run_has_left_no_checkpoint(here, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    overrides = [text for override in (*SMALL, f"run.directory={tmp_path}") for text in ("--set", override)]
    status, out, error = here("rollout", "recipes/smoke.toml", *overrides, "--episodes", "1", "--json")
    assert status == 0, error
    assert json.loads(out)["policy"] == "untrained"


def test_a_lost_reference_is_named(here, finished, tmp_path):
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    shutil.rmtree(directory / "warm_start")
    overrides = (f"run.directory={directory}", "train.steps=2", "method.kl_coefficient=0.1")
    status, _, error = here(*train(*overrides))
    assert status == 2
    assert "warm_start is gone, the policy that the method compares with" in error


def test_ctrl_c_leaves_a_checkpoint_and_says_how_to_continue(here, tmp_path):
    arguments = train(f"run.directory={tmp_path}", "train.steps=1000", "train.checkpoint_every=1000")
    program = [sys.executable, "-c", "from sinkflex.cli import main; main()", *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        metrics = tmp_path / "metrics.jsonl"
        deadline = time.monotonic() + 100
        while not (metrics.exists() and '"step": 2' in metrics.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "Traceback" not in error
    again = error.splitlines()[-1]
    steps = sorted(int(path.name[5:]) for path in (tmp_path / "checkpoints").iterdir())
    assert steps[-1] >= 2
    ending = (
        f"stopped, step {steps[-1]} is saved; continue with: sinkflex train recipes/smoke.toml --set env.domain=mock"
    )
    assert again.startswith(ending)
    assert len(metrics.read_text().splitlines()) == 1 + steps[-1]

    final = steps[-1] + 1
    status, out, error = here(*arguments, "--set", f"train.steps={final}", "--json")
    assert status == 0, error
    assert json.loads(out)["step"] == final
    assert f"train.steps was 1000, is now {final}" in error
    assert f"\nsteps = {final}\n" in (tmp_path / "config.toml").read_text()

    kept = (tmp_path / "config.toml").read_text()
    shape, domain = ["model.tiny.hidden=48"], ["env.domain=telecom", "tasks.split=train", "validation.split=test"]
    for changes, said in ((shape, "model.tiny.hidden was 32, is now 48"), (domain, 'env.domain was "mock", is now')):
        words = [word for change in (f"train.steps={final + 1}", *changes) for word in ("--set", change)]
        status, _, error = here(*arguments, *words)
        assert status == 2 and said in error and "--set run.name=NEW" in error
    assert (tmp_path / "config.toml").read_text() == kept


@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_really_full_disk_ends_in_one_line(here, tmp_path):
    disk = Path(tmp_path, "disk")
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        status, _, error = here(*train(f"run.directory={disk / 'run'}"))
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert status == 2, error
    assert error.splitlines()[-1].startswith("No space left on device")
    assert "Traceback" not in error
