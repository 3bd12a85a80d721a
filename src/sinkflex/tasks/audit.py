"""`sinkflex tasks audit`: which tasks of a suite are faulty, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sinkflex.config import Verdict
from sinkflex.envs.tau2.tasks import load
from sinkflex.tasks.faults import CHECKS, Case
from sinkflex.tasks.suites import domain_of, scored_tasks


@dataclass(frozen=True, slots=True)
class Finding:
    """What the audit says about a task.

    Attributes:
        faults: what was found, in words, by verdict; empty for a clean task.
    """

    task_id: str
    faults: dict[Verdict, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The one verdict: the first fault in the order of `CHECKS`, or clean."""
        return next(iter(self.faults), "clean")


def audit(domain: str, task_ids: Sequence[str], solo: bool = False, verdicts: Sequence[str] = ()) -> list[Finding]:
    """Look for faults in tasks, in the order given.

    Args:
        domain: of tau2.
        task_ids: its tasks.
        solo: as tickets, without a user.
        verdicts: what to look for; everything if empty.
    """
    findings = []
    for task_id in task_ids:
        case = Case(domain, task_id, solo)
        found: dict[Verdict, str] = {}
        for name, check in CHECKS.items():
            if (not verdicts or name in verdicts) and (fault := check(case)):
                found[name] = fault
        findings.append(Finding(task_id, found))
    return findings


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of a suite."""

    suite: str
    split: str
    solo: bool
    findings: list[Finding]

    def record(self) -> dict[str, Any]:
        """Return everything as JSON values; `verdicts` counts tasks by verdict, `faults` every fault."""
        return {
            "suite": self.suite,
            "split": self.split,
            "solo": self.solo,
            "tasks": len(self.findings),
            "verdicts": self._counted([finding.verdict for finding in self.findings]),
            "faults": self._counted([name for finding in self.findings for name in finding.faults]),
            "findings": [{"task": f.task_id, "verdict": f.verdict, "faults": f.faults} for f in self.findings],
        }

    def __str__(self) -> str:
        record = self.record()
        lines = [f"{self.suite}, {self.split}{', solo' if self.solo else ''}: {len(self.findings)} tasks", ""]
        lines.append(f"{'verdict':26}{'tasks':>7}{'with this fault':>18}")
        for name in (*CHECKS, "clean"):
            count, faults = record["verdicts"][name], record["faults"].get(name, "")
            lines.append(f"{name:26}{count:7}{faults:18}" if faults != "" else f"{name:26}{count:7}")
        lines.append("")
        lines += [
            f"{finding.task_id}: {name}: {fault}" for finding in self.findings for name, fault in finding.faults.items()
        ]
        return "\n".join(lines)

    def _counted(self, names: Sequence[str]) -> dict[str, int]:
        counts = Counter(names)
        return {name: counts[name] for name in (*CHECKS, "clean")}


def audit_suite(suite: str, split: str | None = None, solo: bool = False) -> Audit:
    """Audit a suite.

    Args:
        suite: for instance tau2/retail.
        split: a split of it; None takes the package's base tasks, which are train and test together.
        solo: as tickets, without a user.

    Raises:
        ValueError: no such suite or split.
    """
    domain = domain_of(suite)
    specs = load(domain, "base") if split is None else scored_tasks(domain, split)
    return Audit(suite, split or "base", solo, audit(domain, [spec.task_id for spec in specs], solo))
