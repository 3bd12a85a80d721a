"""TRL's GRPOTrainer and SinkFlex side by side: same model, weights, tasks, limits and loss, one thread a side.

    pip install --no-deps trl==1.16.0 accelerate datasets   (beside this package's own dependencies)
    python benchmarks/against_trl.py --out runs/against_trl
    python benchmarks/against_trl.py --out runs/against_trl --table

The policy works alone on tau2's telecom tickets (solo): there TRL's tool loop can express the task. Both sides start
from one warm start and draw the same tasks, each in a process of its own; then the models that they saved on the way
are scored by one evaluator. What is done already is not done again.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:  # at run time only the stages import it: what starts a process counts in the peak memory of that one
    from sinkflex.config import Config
    from sinkflex.envs.env import Action
    from sinkflex.policy.chat import Chat

VERSION = "1.16"
RECIPE = Path(__file__).parent.parent / "recipes" / "bench.toml"
# One update a batch, so that TRL needs no second pass for the probabilities it sampled with.
CHANGES = (
    "env.solo=true",
    "env.max_turns=24",
    "tasks.sampling=uniform",
    "rollout.max_tokens=1536",
    "learner.schedule=constant",
    "learner.warmup_steps=0",
    "learner.mini_batches=1",
    "method.count_zero_groups=true",
    "run.threads=1",
    "train.validate_every=0",
    'log.writers=["jsonl"]',
)
# glibc gives a large tensor back to the system at once and asks for the next one. Both sides keep what they have: TRL,
# whose tensors are larger, would else spend half its time there.
MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33), "MALLOC_TOP_PAD_": str(2**28)}
STAGES = ("start", "ours", "trl", "scores")
BARS = {"episodes/s": 8.0, "update tokens/s": 3.0, "seconds to TRL's best score": 5.0}


def config_of(options: argparse.Namespace, stage: str) -> Config:
    """Return the recipe of a stage; the tables in the stages' folders come from it alone."""
    from sinkflex.recipe import load_config

    steps = ["train.steps=0"] if stage == "start" else ["warmup.steps=0", f"train.steps={steps_of(options, stage)}"]
    start = [] if stage == "start" else [f"model.path={options.out / 'start' / 'warm_start'}"]
    saved = [f"train.checkpoint_every={options.save_every}", f"train.keep_checkpoints={options.our_steps + 1}"]
    return load_config(RECIPE, [*CHANGES, *options.set, *steps, *start, *saved, f"run.directory={options.out / stage}"])


def steps_of(options: argparse.Namespace, side: str) -> int:
    """Return the GRPO steps of a side."""
    return options.steps if side == "trl" else options.our_steps


class Clock:
    """Wall and CPU seconds of one step, and of its rollout; the rest of a step is its update."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        self._began = (time.perf_counter(), time.process_time())
        self._rollout = (0.0, 0.0)

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, whose time counts as rollout."""

        def call(*arguments: Any, **named: Any) -> Any:
            before = (time.perf_counter(), time.process_time())
            result = function(*arguments, **named)
            spent = (time.perf_counter() - before[0], time.process_time() - before[1])
            self._rollout = (self._rollout[0] + spent[0], self._rollout[1] + spent[1])
            return result

        return call

    def seconds(self) -> dict[str, float]:
        """Return what has been spent since `begin`."""
        wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        return {
            "rollout_wall": self._rollout[0],
            "rollout_cpu": self._rollout[1],
            "update_wall": wall - self._rollout[0],
            "update_cpu": cpu - self._rollout[1],
        }


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a line to a file of JSON objects."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of such a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def warm_start(options: argparse.Namespace) -> None:
    """Make the policy that both sides start from."""
    from sinkflex.train import train

    train(config_of(options, "start"))


def ours(options: argparse.Namespace) -> None:
    """Train with this package; validation, logs and checkpoints are not timed."""
    from sinkflex import train
    from sinkflex.run import Run

    clock, conclude, file = Clock(), train.conclude, options.out / "ours.jsonl"

    def measured(run: Run, interrupted: Callable[[], bool]) -> None:
        found = run.unlogged or {}
        if run.step > 0:
            counts = {
                "episodes": found["rollout/episodes"],
                "generated_tokens": found["rollout/sampled_tokens"],
                "row_tokens": found["learner/row_tokens"],
                "turns": found["rollout/turns_mean"],
                "reward": found["reward/mean"],
            }
            append(file, {"step": run.step, **clock.seconds(), **counts, "peak_bytes": train.peak_memory_bytes()})
        conclude(run, interrupted)
        clock.begin()

    with patch.object(train, "conclude", measured), patch.object(Run, "rollout", clock.timed(Run.rollout)):
        train.train(config_of(options, "ours"))


def require_trl() -> None:
    """Check that TRL is there without importing it.

    Raises:
        SystemExit: it is not, or it is another version, whose inner methods may have other names.
    """
    try:
        found = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        found = "not installed"
    if not found.startswith(f"{VERSION}."):
        raise SystemExit(
            f"trl is {found} in {sys.executable}, expected {VERSION} beside sinkflex. Type\n"
            f"    pip install --no-deps trl=={VERSION}.0 accelerate datasets\n"
            "and what these name as missing; torch and transformers stay as they are."
        )


def ends(action: Action) -> bool:
    """True if the action says that the work is done."""
    from sinkflex.envs.tau2.actions import DONE

    return any(call.name == DONE for call in action.tool_calls)


def tokenizer_for_trl(folder: Path, chat: Chat, shown: list[Any]) -> Any:
    """Return the tokenizer with the two things TRL asks it for: prompts with tools, and what a reply calls.

    Prompts show the recipe's tools, in its order. A reply is one call of `Desk.act` with the parsed action, whatever
    it is, so that errors come back to the policy as they do here; the one that ends the work calls nothing, and TRL's
    loop leaves the episode.
    """
    from transformers import PreTrainedTokenizerFast

    class Tokenizer(PreTrainedTokenizerFast):
        def apply_chat_template(self, *arguments: Any, tools: Any = None, **named: Any) -> Any:
            return super().apply_chat_template(*arguments, tools=shown if tools else None, **named)

        def parse_response(self, ids: list[int], prefix: list[int] = (), tools: Any = None) -> dict[str, Any]:  # type: ignore[override]
            action = chat.parse(ids, "stop" if ids and ids[-1] in chat.stop_ids else "length", prefix)
            call = {"type": "function", "function": {"name": "act", "arguments": {"action": action}}}
            return {"role": "assistant", "content": "", "action": action, "tool_calls": [] if ends(action) else [call]}

    tokenizer = Tokenizer.from_pretrained(folder)
    tokenizer.response_template = {}  # which tells TRL that replies can be parsed
    return tokenizer


def desk_of(config: Config) -> type:
    """Return the class of TRL's environments: an episode of the recipe's environment each."""
    from sinkflex.build import make_env

    class Desk:
        def __init__(self) -> None:
            self._env = make_env(config)
            self._over = False

        def reset(self, task_id: str, **_: Any) -> None:
            self._env.reset(seed=0, options={"task_id": task_id})
            self._over, self._reward = False, 0.0

        def act(self, action: Action) -> str:
            """Do what the policy decided.

            Args:
                action: the parsed reply.
            """
            if self._over:
                return "Error: the episode has ended"
            observation, self._reward, terminated, truncated, _ = self._env.step(action)
            self._over = terminated or truncated
            return "\n".join(message.content for message in observation)

        def _finish(self, last: dict[str, Any]) -> float:
            if "action" in last and ends(last["action"]):
                self.act(last["action"])
            return self._reward if self._over else 0.0

    return Desk


def trl_options(config: Config, options: argparse.Namespace, prompt_tokens: int) -> dict[str, Any]:
    """Return the recipe in the words of TRL's GRPOConfig."""
    learner, rollout = config.learner, config.rollout
    episodes = rollout.groups * rollout.group_size
    return {
        "output_dir": str(options.out / "trl"),
        "per_device_train_batch_size": options.trl_batch,
        "gradient_accumulation_steps": episodes // options.trl_batch,
        "num_generations": rollout.group_size,
        "temperature": rollout.temperature,
        "max_completion_length": rollout.max_tokens - prompt_tokens,
        "generation_kwargs": {"max_new_tokens": rollout.max_turn_tokens},
        "max_tool_calling_iterations": config.env.max_turns - 1,
        "beta": config.method.options["kl_coefficient"],
        "loss_type": "dapo",  # a mean over the tokens of the batch, as here
        "learning_rate": learner.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": learner.warmup_steps,
        "adam_beta1": learner.betas[0],
        "adam_beta2": learner.betas[1],
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.clip_norm,
        "max_steps": config.train.steps,
        "seed": config.run.seed,
        "model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"},  # the one it has for sinks on CPUs
        "shuffle_dataset": False,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def trl_side(options: argparse.Namespace) -> None:
    """Train with TRL; its model is saved on the way, which is not timed."""
    make_trainer(options).train()


def make_trainer(options: argparse.Namespace) -> Any:
    """Return TRL's trainer for the recipe, with a clock in it."""
    require_trl()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it says that environments are experimental
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    from transformers import AutoTokenizer, TrainerCallback

    from sinkflex.build import chat_tools, make_env, set_up_torch
    from sinkflex.policy.chat import Chat
    from sinkflex.tasks.sampling import TaskSampler
    from sinkflex.tasks.suites import training_tasks
    from sinkflex.train import peak_memory_bytes

    config = config_of(options, "trl")
    set_up_torch(config)
    folder, env, clock, counts = Path(config.model.path), make_env(config), Clock(), {}
    tools = chat_tools(config, env)
    chat = Chat(AutoTokenizer.from_pretrained(folder), env.policy, tools)
    tasks = TaskSampler(training_tasks("telecom", config.tasks.split, (), True), config.tasks, config.run.seed, [])
    drawn = [d.task_id for step in range(config.train.steps) for d in tasks.draw(config.rollout.groups, step)]
    openings = {task_id: env.reset(seed=0, options={"task_id": task_id})[0] for task_id in set(drawn)}
    system = [{"role": "system", "content": env.policy}] if env.policy else []
    prompts = {t: [*system, *({"role": m.role, "content": m.content} for m in said)] for t, said in openings.items()}
    lengths = [len(chat.start(said)) for said in openings.values()]

    def reward(environments: list[Any], completions: list[Any], **_: Any) -> list[float]:
        scored = [desk._finish(messages[-1]) for desk, messages in zip(environments, completions, strict=True)]
        counts["reward"] = statistics.mean(scored)
        return scored

    class Trainer(trl.GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            result = clock.timed(super()._generate)(prompts)
            prompt_ids, completion_ids, sampled = result[:3]
            counts.update(
                episodes=len(prompt_ids),
                generated_tokens=sum(map(sum, sampled)),
                row_tokens=sum(map(len, prompt_ids)) + sum(map(len, completion_ids)),
                turns=sum(sum(m.get("role") == "assistant" for m in c) for c in result[3]) / len(prompt_ids),
            )
            return result

        def _calculate_rewards(self, *arguments: Any) -> Any:
            return clock.timed(super()._calculate_rewards)(*arguments)

    class Steps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            row = {"step": state.global_step, **clock.seconds(), **counts, "peak_bytes": peak_memory_bytes()}
            append(options.out / "trl.jsonl", row)
            if state.global_step % options.save_every == 0 or state.global_step == state.max_steps:
                saved = model_folder(options, "trl", state.global_step)
                model.save_pretrained(saved)
                chat.tokenizer.save_pretrained(saved)
            clock.begin()

    return Trainer(
        model=str(folder),
        reward_funcs=reward,
        args=trl.GRPOConfig(**trl_options(config, options, round(statistics.mean(lengths)))),
        train_dataset=datasets.Dataset.from_list([{"prompt": prompts[t], "task_id": t} for t in drawn]),
        processing_class=tokenizer_for_trl(folder, chat, tools),
        environment_factory=desk_of(config),
        callbacks=[Steps()],
    )


def model_folder(options: argparse.Namespace, side: str, step: int) -> Path:
    """Return where a side's model after some steps is; step 0 is the warm start."""
    if step == 0:
        return options.out / "start" / "warm_start"
    return options.out / side / "checkpoints" / f"step_{step}" / "model"


def scores(options: argparse.Namespace) -> None:
    """Score the saved models of both sides on the held-out tasks, greedily."""
    from sinkflex.evaluate import evaluate, play

    @cache  # the warm start is both sides' first model
    def score(source: Path) -> dict[str, Any]:
        return evaluate(play(config_of(options, "ours"), source, "held_out"))

    file = options.out / "scores.jsonl"
    done = {(row["side"], row["step"]) for row in lines(file)}
    for side in ("trl", "ours"):
        for step in saved_steps(options, side):
            if (side, step) not in done:
                found = score(model_folder(options, side, step))
                append(file, {"side": side, "step": step, "score": found["mean@1"], "interval": found["interval"]})


def saved_steps(options: argparse.Namespace, side: str) -> list[int]:
    """Return the steps after which a side's model is kept."""
    last = steps_of(options, side)
    return sorted({*range(0, last + 1, options.save_every), last})


def finished(options: argparse.Namespace, stage: str) -> bool:
    """True if a stage has left all its results; what an interrupted one left is removed, for it starts again."""
    if stage == "start":
        return model_folder(options, "", 0).is_dir()
    if stage == "scores":
        return False
    file = options.out / f"{stage}.jsonl"
    if len(lines(file)) == steps_of(options, stage):
        return True
    file.unlink(missing_ok=True)
    return False


def rates(rows: list[dict[str, Any]], clock: str) -> dict[str, float]:
    """Return what one side does in a second of a clock ("wall" or "cpu"), over all its steps."""
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    rollout, update = total[f"rollout_{clock}"], total[f"update_{clock}"]
    return {
        "episodes/s": total["episodes"] / rollout,
        "generated tokens/s": total["generated_tokens"] / rollout,
        "update tokens/s": total["row_tokens"] / update,
        "steps/s": len(rows) / (rollout + update),
    }


def seconds_to(level: float, rows: list[dict[str, Any]], scored: dict[int, float], clock: str) -> float | None:
    """Return the seconds of training after which a side's saved model first reaches a score; None if none does."""
    step = next((step for step in sorted(scored) if scored[step] >= level), None)
    if step is None:
        return None
    return sum(row[f"rollout_{clock}"] + row[f"update_{clock}"] for row in rows if row["step"] <= step)


def table(out: Path) -> str:
    """Return both sides and their ratios as Markdown."""
    rows = {side: lines(out / f"{side}.jsonl") for side in ("ours", "trl")}
    if not all(rows.values()):
        return f"{out}: one side has no finished step yet; give the command without --table"
    scored = {side: {r["step"]: r["score"] for r in lines(out / "scores.jsonl") if r["side"] == side} for side in rows}
    found = ["| | SinkFlex | TRL | ratio | bar |", "| --- | --- | --- | --- | --- |"]
    for clock in ("wall", "cpu"):
        speed = {side: rates(of_side, clock) for side, of_side in rows.items()}
        for name in speed["ours"]:
            a, b = speed["ours"][name], speed["trl"][name]
            found.append(f"| {name}, {clock} | {a:.3g} | {b:.3g} | {a / b:.1f} | {bar(name)} |")
        if all(scored.values()):
            level = max(scored["trl"].values())
            a, b = (seconds_to(level, rows[side], scored[side], clock) for side in ("ours", "trl"))
            assert b is not None, "TRL reaches what it reaches"
            name, reached, ratio = "seconds to TRL's best score", "not reached", ""
            if a is not None:
                reached, ratio = f"{a:.0f}", f"{b / a:.1f}" if a else "the warm start has it"
            found.append(f"| {name} ({level:.3f}), {clock} | {reached} | {b:.0f} | {ratio} | {bar(name)} |")
    for name, unit in (("peak_bytes", 1e-6), ("reward", 1), ("turns", 1), ("generated_tokens", 1), ("row_tokens", 1)):
        pick = max if name == "peak_bytes" else statistics.mean
        a, b = (pick(row[name] for row in rows[side]) * unit for side in ("ours", "trl"))
        ratio = f"{a / b:.2f}" if b else ""
        label = "peak memory, MB" if name == "peak_bytes" else f"{name.replace('_', ' ')} (mean of the steps)"
        found.append(f"| {label} | {a:.4g} | {b:.4g} | {ratio} | |")
    found += ["", *(f"{side}: score by step {json.dumps(by_step)}" for side, by_step in scored.items())]
    return "\n".join(found)


def bar(name: str) -> str:
    """Return the ratio that is aimed at, if there is one."""
    return f"{BARS[name]:g}" if name in BARS else ""


def run_stage(options: argparse.Namespace, stage: str) -> None:
    """Run a stage in a process of its own, with one thread."""
    command = [sys.executable, __file__, "--stage", stage, *sys.argv[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", **MEMORY}
    started = time.time()
    if subprocess.run(command, env=environment, check=False).returncode:
        raise SystemExit(f"{stage} did not finish; give the same command again to go on")
    print(f"{stage}: {time.time() - started:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    """Run what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/against_trl"))
    parser.add_argument("--steps", type=int, default=4, help="GRPO steps of TRL")
    parser.add_argument("--our-steps", type=int, default=16, help="of SinkFlex, to reach what TRL reached")
    parser.add_argument("--save-every", type=int, default=2, help="steps between the models that are scored")
    parser.add_argument("--trl-batch", type=int, default=16, help="episodes in a forward pass of TRL's update")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe of both")
    parser.add_argument("--stage", choices=STAGES, help="run only this one, in this process")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    options = parser.parse_args()
    stages = {"start": warm_start, "ours": ours, "trl": trl_side, "scores": scores}
    if options.stage:
        stages[options.stage](options)
        return
    if not options.table:
        require_trl()
        options.out.mkdir(parents=True, exist_ok=True)
        for stage in STAGES:
            if not finished(options, stage):
                run_stage(options, stage)
    print(table(options.out))


if __name__ == "__main__":
    main()
