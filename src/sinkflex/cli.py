"""The command line. Arguments and recipes are checked before torch is imported: each command imports what it needs.

To add a command: write a function below `@command`; what it returns is printed, as JSON with `--json`.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sinkflex.interrupt import first_interrupt_waits
from sinkflex.mistakes import Command, errors_as_lines, warn
from sinkflex.plain import plain

_SCORED = "A run directory (its best checkpoint), a Hugging Face folder, or recorded trajectories (.jsonl.zst)."
app = typer.Typer(
    help="Train language-model agents that talk to a user and call tools over many turns.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
tasks_app = typer.Typer(help="Task suites.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure, against what is promised.", no_args_is_help=True)
app.add_typer(tasks_app, name="tasks")
app.add_typer(bench_app, name="bench")

Recipe = Annotated[Path, typer.Argument(help="A recipe, for instance recipes/smoke.toml.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one option of the recipe. May be repeated."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Tokens = Annotated[list[int] | None, typer.Option("--tokens", help="Sequence length. May be repeated.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]


def command(group: typer.Typer, name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Register a function as a command: its result is printed, its errors become one clear line and an exit status."""

    def register(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(**arguments: Any) -> None:
            with errors_as_lines(arguments["debug"]):
                result = function(**arguments)
                _print_result(result, arguments["as_json"])

        return group.command(name, cls=Command)(run)

    return register


@command(app)
def train(
    recipe: Recipe,
    profile: Annotated[bool, typer.Option("--profile", help="At the end, say where the time of a step went.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Any:
    """Run a recipe: warm start, then reinforcement learning. Continues a run directory that exists."""
    return _train(recipe, overrides or [], profile)


@command(app)
def sft(recipe: Recipe, overrides: Overrides = None, as_json: AsJson = False, debug: Debug = False) -> Any:
    """Run the warm start of a recipe alone; `train` goes on from there."""
    return _train(recipe, [*(overrides or []), "train.steps=0"])


@command(app)
def evaluate(
    source: Annotated[Path, typer.Argument(help=_SCORED)],
    against: Annotated[Path | None, typer.Option(help="Another one, compared with the first task by task.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="Environment and prompt; the run's own if left out.")] = None,
    suite: Annotated[str | None, typer.Option(help="For instance tau2/airline; the recipe's own if left out.")] = None,
    split: Annotated[str | None, typer.Option(help="test (default), held_out, train, pool or base.")] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Episodes of each task; 1 if left out.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy, as one trial is by default; several sample as the recipe.")
    ] = None,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Sample from the likeliest ids of this weight.")] = 1.0,
    save: Annotated[Path | None, typer.Option(help="File for the trajectories, .jsonl.zst.")] = None,
    per_task: Annotated[bool, typer.Option("--per-task", help="Also every task, beside its floors.")] = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Any:
    """Score a run, a model or recorded episodes, with the floors beside it; or compare two of them."""
    from sinkflex.recipe import config_of
    from sinkflex.tasks.suites import in_suite
    from sinkflex.trajectory import require_writable

    if save is not None:
        require_writable(save)
    # Suite and split go through the config, which checks one against the other.
    chosen = [*(overrides or []), *(in_suite(suite) if suite else ()), f"validation.split={split or 'test'}"]
    config = config_of(source, recipe, chosen)
    # Both meet the same users.
    chosen += [f"run.seed={config.run.seed}"] if config else []
    other = config_of(against, recipe, chosen) if against else None
    if config is None and other is None and (recipe, suite, split, trials, temperature, save, overrides) != (None,) * 7:
        raise ValueError(f"{source} is recorded: nothing is played, so give no option but --against and --per-task")
    from sinkflex.evaluate import evaluate, play, recorded
    from sinkflex.report.score import score_text

    def played(path: Path, recipe: Any, save: Path | None = None) -> Any:
        if recipe is None:
            return recorded(path)
        return play(recipe, path, recipe.validation.split, trials or 1, temperature, save, top_p)

    result = evaluate(played(source, config, save), played(against, other) if against else None, per_task)
    return result if as_json else score_text(result)


@command(app)
def rollout(
    recipe: Recipe,
    episodes: Annotated[int, typer.Option(min=1, help="How many, rounded up to whole groups.")] = 8,
    overrides: Overrides = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Any:
    """Roll out episodes of a recipe's training tasks with the run's policy, or a new one, and keep the trajectories."""
    from sinkflex.recipe import load_config

    config = load_config(recipe, overrides or [])
    from sinkflex.evaluate import roll_out_training_tasks
    from sinkflex.report.score import score_text

    result = roll_out_training_tasks(config, episodes)
    return result if as_json else score_text(result)


@command(app)
def export(
    source: Annotated[Path, typer.Argument(help="A run directory (its newest validation), or a .jsonl.zst file.")],
    to: Annotated[
        str, typer.Option(help="text (to read), tau2 (results of the package), parquet or model.", show_default=False)
    ],
    out: Annotated[Path | None, typer.Option(help="File, or folder of a model; beside the source if left out.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Any:
    """Write recorded episodes as text to read, or these or a run's policy in a format of other programs."""
    from sinkflex.report.export import export

    return export(source, to, out)


@command(app)
def check(recipe: Recipe, overrides: Overrides = None, as_json: AsJson = False, debug: Debug = False) -> Any:
    """Prove on this very recipe that tokens, masks, sinks and gradients are exact. Exits with 1 if anything fails."""
    from sinkflex.recipe import load_config

    config = load_config(recipe, overrides or [])
    from sinkflex.check import report

    raise typer.Exit(report(config, as_json))


@command(bench_app, "attention")
def bench_attention(tokens: Tokens = None, as_json: AsJson = False, debug: Debug = False) -> Any:
    """Measure attention of one layer: eager, transformers' other paths, and ours."""
    return _bench("attention", as_json, **({"tokens": tuple(tokens)} if tokens else {}))


@command(bench_app, "step")
def bench_step(
    tokens: Tokens = None,
    rho: Annotated[bool, typer.Option("--rho", help="Also at the attention share of a 20B model (8 GB).")] = False,
    budget: Annotated[
        bool, typer.Option("--budget", help="Also the longest sequence in 2.5 GB (half an hour).")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Any:
    """Measure a whole training step: memory and speed, eager and ours."""
    return _bench("step", as_json, rho=rho, budget=budget, **({"tokens": tuple(tokens)} if tokens else {}))


@command(bench_app, "update")
def bench_update(as_json: AsJson = False, debug: Debug = False) -> Any:
    """Measure a learner update of the main job's policy: eager and ours."""
    return _bench("update", as_json)


@command(bench_app, "packing")
def bench_packing(as_json: AsJson = False, debug: Debug = False) -> Any:
    """Measure an update of a group with the full policy in its prompt, rows alone and in one forest."""
    return _bench("packing", as_json)


@command(bench_app, "rollout")
def bench_rollout(
    run: Annotated[Path, typer.Argument(help="A run directory, for instance runs/telecom_cpu.", show_default=False)],
    as_json: AsJson = False,
    debug: Debug = False,
) -> Any:
    """Measure rollouts of a trained policy by what the sampler keeps, their memory, and what a late turn costs."""
    return _bench("rollout", as_json, source=run)


@command(bench_app, "env")
def bench_env(as_json: AsJson = False, debug: Debug = False) -> Any:
    """Measure environments: reset, step, score, memory of 300 live ones."""
    return _bench("env", as_json)


@command(tasks_app, "list")
def list_tasks(
    trained: Annotated[
        str | None, typer.Option(help="Roles for a run that trains on this suite, for instance tau2/retail.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Any:
    """List the suites and their splits: number of tasks, and role for a run that trains on the suite."""
    from sinkflex.config import SPLITS
    from sinkflex.tasks.suites import domain_of, role, scored_tasks

    home = domain_of(trained) if trained else None
    return [
        {
            "suite": f"tau2/{domain}",
            "split": split,
            "tasks": len(scored_tasks(domain, split)),
            "role": role(domain, split, home),
        }
        for domain, splits in SPLITS.items()
        for split in splits
    ]


@command(tasks_app, "audit")
def audit_tasks(
    suite: Annotated[str, typer.Argument(help="For instance tau2/retail.", show_default=False)],
    split: Annotated[str | None, typer.Option(help="One split; all of the package's base tasks if left out.")] = None,
    solo: Annotated[bool, typer.Option("--solo", help="As tickets, without a user.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Any:
    """Look for faulty tasks: no skill is paid, gold fails or errs, a changed gold is paid, an order decides."""
    from sinkflex.tasks.audit import audit_suite

    result = audit_suite(suite, split, solo)
    return result.record() if as_json else str(result)


@command(app)
def methods(
    name: Annotated[
        str | None, typer.Argument(help="One of them, or package.module:Class.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> Any:
    """List the methods with their papers; or say what one of them is, and how its options differ from GRPO's."""
    from sinkflex.report.methods import method_text, methods_report, methods_text

    if as_json:
        return methods_report(name)
    return method_text(name) if name else methods_text()


def main() -> None:
    """Entry point of the `sinkflex` command."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    sys.path.append(os.getcwd())  # methods and users of one's own, last so that they hide nothing
    warnings.showwarning = _show_warning
    app()


def _train(recipe: Path, overrides: list[str], profile: bool = False) -> dict[str, Any]:
    from sinkflex.recipe import ConfigError, load_config, parse_section, sources_of

    config = load_config(recipe, overrides)
    from sinkflex.methods.method import method_class

    # A wrong option of the method is found before all the rest is imported.
    sources = sources_of(overrides)
    try:
        options = method_class(config.method.name).Options
    except ValueError as error:
        raise ConfigError(f"{sources.get('method.name', recipe)}: {error}") from error
    parse_section(options, config.method.options, str(recipe), "method", sources)
    from sinkflex.report.ending import remarks
    from sinkflex.train import train

    with first_interrupt_waits() as interrupted:
        run = train(config, interrupted)
    if profile:
        from sinkflex.report.profile import profile_of

        print(profile_of(run), file=sys.stderr)
    for remark in remarks(run):
        warn(remark)
    return {"run": str(run.directory), "step": run.step}


def _bench(name: str, as_json: bool, **options: Any) -> Any:
    module = importlib.import_module(f"sinkflex.bench.{name}")
    rows = module.run(**options)
    return rows if as_json else module.table(rows)


def _print_result(result: Any, as_json: bool) -> None:
    """Print what a command returned: as JSON, or a list of records as a table, or a record as lines."""
    if as_json:
        print(json.dumps(result), flush=True)
    elif isinstance(result, str):
        print(plain(result))
    elif isinstance(result, list):
        columns = list(result[0])
        table = Table(*columns, box=None, header_style="bold")
        for record in result:
            table.add_row(*(Text(_text(record[column])) for column in columns))
        Console().print(table)
    else:
        for key, value in result.items():
            print(f"{plain(str(key))}: {_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{plain(str(key))} {_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else plain(str(value))


def _show_warning(message: Warning | str, category: type[Warning], *place: Any) -> None:
    warn(message)
