"""Splits and tags of tau2's tasks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sinkflex.envs.tau2 import tasks

SIZES = {
    ("telecom", "train"): 74,
    ("telecom", "test"): 40,
    ("telecom", "base"): 114,
    ("telecom", "small"): 20,
    ("telecom", "full"): 2285,
    ("retail", "train"): 74,
    ("retail", "test"): 40,
    ("airline", "train"): 30,
    ("airline", "test"): 20,
    ("mock", "base"): 9,
}


@pytest.mark.parametrize(("domain", "split"), SIZES)
def test_a_split_has_the_packages_size(domain, split):
    specs = tasks.load(domain, split)
    assert len({spec.task_id for spec in specs}) == len(specs) == SIZES[domain, split]


def test_train_and_test_share_no_task():
    for domain in ("telecom", "retail", "airline"):
        train, test = ({spec.task_id for spec in tasks.load(domain, split)} for split in ("train", "test"))
        assert not train & test


def test_telecom_tags_are_read_off_the_task_id():
    spec = tasks.spec("telecom", "[mms_issue]airplane_mode_on|break_apn_mms_setting|data_mode_off[PERSONA:Hard]")
    assert spec.tags == {"family": "mms", "faults": 3, "persona": "Hard"}
    tags = [spec.tags for spec in tasks.load("telecom", "full")]
    assert {tag["family"] for tag in tags} == {"mms", "mobile_data", "service"}
    assert {tag["persona"] for tag in tags} == {"None", "Easy", "Hard"}
    assert {tag["faults"] for tag in tags} == set(range(1, 10))


def test_a_task_is_the_packages_own():
    for domain in tasks.DOMAINS:
        spec = tasks.load(domain, "base")[0]
        assert tasks.read(domain, spec.task_id).id == spec.task_id
        assert tasks.read(domain, spec.task_id) is tasks.read(domain, spec.task_id)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tasks.load("telecm", "train"), ["'telecm'", "'telecom'"]),
        (lambda: tasks.load("telecom", "trian"), ["'trian'", "'train'", "small"]),
        (lambda: tasks.load("retail", "held_out"), ["'held_out'", "train"]),
        (lambda: tasks.spec("retail", "1000"), ["'1000'", "tasks.load('retail', 'base')"]),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words)


def test_importing_is_quiet_and_reads_no_env_file(tmp_path):
    code = (
        "import os; before = dict(os.environ)\n"
        "from sinkflex.envs.tau2 import tasks; tasks.load('telecom', 'train')\n"
        "changed = {k for k in os.environ.keys() | before.keys() if os.environ.get(k) != before.get(k)}\n"
        "assert changed <= {'LITELLM_LOCAL_MODEL_COST_MAP'}, changed\n"
        "import sys; assert 'litellm' not in sys.modules and 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
