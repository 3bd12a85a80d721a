"""The audit finds the known faults of the package's tasks, and faults that are put into clean ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from sinkflex.config import Verdict
from sinkflex.envs.tau2 import tasks
from sinkflex.tasks import faults
from sinkflex.tasks.audit import Finding, audit, audit_suite
from sinkflex.tasks.faults import CHECKS, Case
from sinkflex.tasks.suites import scored_tasks, training_tasks


def faulty(domain: str, verdict: Verdict, solo: bool = False) -> dict[str, str]:
    """Tasks of a domain with this fault, and what was found."""
    ids = [spec.task_id for spec in tasks.load(domain, "base")]
    return {f.task_id: f.faults[verdict] for f in audit(domain, ids, solo, [verdict]) if f.faults}


# --- Faults of the package that are known from its issues ------------------------------------------------------


def test_gold_calls_that_fail_are_found():
    found = faulty("retail", "instr_env_mismatch")
    assert sorted(map(int, found)) == [2, 3, 4, 12, 13, 21, 35, 37, 38, 39, 46, 47, 54, 55, 64, 67, 68, 105]
    assert all("get_product_details" in found[task_id] for task_id in ("2", "3", "4", "21"))
    assert not faulty("airline", "instr_env_mismatch")


def test_items_whose_order_decides_are_found():
    assert sorted(map(int, faulty("retail", "instr_ambiguous"))) == [20, 21, 36, 37, 100]


def test_changes_and_hand_overs_that_nobody_grades_are_found():
    found = {f.task_id: f.faults for f in audit("retail", ["12", "13", "50", "64", "105", "0"])}
    assert all("verifier_too_weak" in found[task_id] for task_id in ("12", "13", "50", "64", "105"))
    assert found["50"]["verifier_too_weak"] == "paid without call 0, transfer_to_human_agents"
    assert found["0"] == {}


def test_tasks_that_pay_for_nothing_are_found():
    assert list(faulty("airline", "task_trivial").values()) == ["paid: do_nothing, always_transfer, echo"] * 19


def test_tickets_that_lack_what_the_user_would_say_are_found():
    found = faulty("telecom", "instr_verifier_mismatch", solo=True)
    assert len(found) == 30 and all("[mms_issue]" in task_id for task_id in found)
    assert set(found.values()) == {"the ticket does not say gb_amount of refuel_data, which the user would"}
    assert not faulty("telecom", "instr_verifier_mismatch")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("suite", "counts"),
    [
        ("tau2/retail", {"instr_env_mismatch": 18, "task_trivial": 5, "verifier_too_weak": 3, "instr_ambiguous": 3}),
        ("tau2/airline", {"task_trivial": 19, "instr_ambiguous": 7}),
        ("tau2/telecom", {"task_trivial": 20, "verifier_too_weak": 5}),
    ],
)
def test_the_audit_of_a_whole_suite(suite, counts):
    found = audit_suite(suite)
    verdicts = found.record()["verdicts"]
    clean = len(found.findings) - sum(counts.values())
    assert {name: count for name, count in verdicts.items() if count} == {**counts, "clean": clean}
    assert audit_suite(suite).record() == found.record()


# --- Faults put into clean tasks -------------------------------------------------------------------------------

CLEAN = {"retail": "1", "telecom": "[mobile_data_issue]data_saver_mode_on[PERSONA:Easy]"}


@pytest.fixture
def changed(monkeypatch):
    """Returns a function that audits a clean task after a change of its JSON."""

    def run(domain: str, change: Callable[[dict[str, Any]], object]) -> Finding:
        text = json.loads(tasks._texts(domain)[CLEAN[domain]])
        text["id"] = task_id = CLEAN[domain] if domain == "telecom" else "changed"  # telecom's ids have a form
        change(text)
        monkeypatch.setitem(tasks._texts(domain), task_id, json.dumps(text))
        tasks.read.cache_clear()
        faults.scoring._gold_world.cache_clear()
        (finding,) = audit(domain, [task_id])
        return finding

    yield run
    tasks.read.cache_clear()
    faults.scoring._gold_world.cache_clear()


def gold(task: dict[str, Any]) -> list[dict[str, Any]]:
    return task["evaluation_criteria"]["actions"]


@pytest.mark.parametrize("domain", CLEAN)
def test_an_unchanged_task_is_clean(changed, domain):
    assert changed(domain, lambda task: None).verdict == "clean"


def test_a_task_without_gold_changes_is_trivial(changed):
    assert changed("retail", lambda task: gold(task).clear()).verdict == "task_trivial"


def test_a_change_that_is_not_graded_makes_the_verifier_too_weak(changed):
    def words_alone(task):
        task["evaluation_criteria"] |= {"reward_basis": ["COMMUNICATE"], "communicate_info": ["54.04"]}

    finding = changed("retail", words_alone)
    assert list(finding.faults) == ["verifier_too_weak"]
    assert "paid without call" in finding.faults["verifier_too_weak"]


def test_gold_that_is_not_paid_is_found(changed):
    def opposite(task):
        for assertion in task["evaluation_criteria"]["env_assertions"]:
            assertion["assert_value"] = not assertion["assert_value"]

    finding = changed("telecom", opposite)
    assert finding.verdict == "instr_verifier_mismatch" and "other" in finding.faults  # the oracle is not paid either


def test_an_id_that_does_not_exist_is_found(changed):
    def other_order(task):
        instructions = task["user_scenario"]["instructions"]
        instructions["task_instructions"] += " The order is #W0000001."

    assert changed("retail", other_order).faults == {"instr_env_mismatch": "in no database: #W0000001"}


def test_a_gold_call_that_fails_is_found(changed):
    def unknown_product(task):
        gold(task).insert(0, {**gold(task)[0], "name": "get_product_details", "arguments": {"product_id": "1"}})

    assert "returns an error" in changed("retail", unknown_product).faults["instr_env_mismatch"]


def test_an_answer_in_the_prompt_is_found(changed, monkeypatch):
    def unread(task):  # gold that never reads: its ids are neither told nor found
        gold(task)[:] = [action for action in gold(task) if "details" not in action["name"]]

    assert changed("retail", unread).verdict == "clean"
    new_item = gold(json.loads(tasks._texts("retail")["changed"]))[-1]["arguments"]["payment_method_id"]
    monkeypatch.setattr(faults.policies, "policy", lambda *_: f"For instance {new_item}.")
    assert "the prompt holds payment_method_id" in changed("retail", unread).faults["answer_leak"]


def test_an_unstable_verdict_is_found(monkeypatch):
    case, flips = Case("retail", CLEAN["retail"]), iter([1.0, 1.0, 0.0])
    real = faults.scoring.score
    monkeypatch.setattr(faults.scoring, "score", lambda *a: faults.scoring.Score(next(flips), real(*a).parts))
    assert CHECKS["other"](case) == "unstable: the same state is scored otherwise"


# --- What the audit is for -------------------------------------------------------------------------------------


def test_training_leaves_out_what_is_excluded_and_never_everything():
    whole, kept = scored_tasks("airline", "train"), training_tasks("airline", "train", ["task_trivial"])
    assert len(whole) - len(kept) == 13 and set(kept) < set(whole)
    assert training_tasks("mock", "base", ["answer_leak"]) == scored_tasks("mock", "base")


def test_a_pool_that_is_empty_after_the_exclusion_says_so(monkeypatch):
    monkeypatch.setitem(CHECKS, "other", lambda case: "so it is")
    with pytest.raises(ValueError, match=r'tasks.exclude = \["other"\] leaves none of the 9 tasks of mock base'):
        training_tasks("mock", "base", ["other"])


def test_the_audit_reads_as_a_table_and_as_json():
    found = audit_suite("tau2/mock")
    record = json.loads(json.dumps(found.record()))
    assert record["tasks"] == len(record["findings"]) == sum(record["verdicts"].values()) == 9
    assert set(record["verdicts"]) == {*CHECKS, "clean"}
    table = str(found).splitlines()
    assert table[0] == "tau2/mock, base: 9 tasks"
    assert "create_task_1_nl_eval: task_trivial: paid: do_nothing, always_transfer, echo" in table
    with pytest.raises(ValueError, match="tau2/mock"):
        audit_suite("tau2/mok")
