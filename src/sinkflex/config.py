"""Every option of a run: typed, documented, checked before anything heavy is imported.

A recipe is a TOML file that holds only what differs from these defaults (`recipe.py` reads it). To add an option: add a
field with a docstring to its section, and a line to `contradictions.py` if it cannot go with another one. Options of a
method live in the method's own file (see `MethodConfig`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Split = Literal["train", "pool", "base", "test", "held_out"]
Role = Literal["train", "holdout", "sealed"]
# The suites: the splits of each domain, and what a run that trains on the domain may do with them (`tasks/suites.py`).
SPLITS: dict[str, dict[str, Role]] = {
    "telecom": {"train": "train", "pool": "train", "test": "holdout", "held_out": "holdout"},
    "retail": {"train": "train", "test": "holdout"},
    "airline": {"train": "train", "test": "holdout"},
    "mock": {"base": "train"},
}
# The splits of an environment of one's own.
OWN_SPLITS: dict[str, Role] = {"train": "train", "test": "holdout"}
Verdict = Literal[
    "instr_verifier_mismatch",
    "instr_env_mismatch",
    "answer_leak",
    "task_trivial",
    "verifier_too_weak",
    "instr_ambiguous",
    "other",
]

USERS = ("scripted", "endpoint", "replay")


class Section(BaseModel):
    """A section of a recipe: unknown keys are errors, values keep their TOML type, nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class RunConfig(Section):
    """Where and how a run executes."""

    name: str = ""
    """Name of the run; the recipe's file name if empty."""
    directory: str = ""
    """Run directory; runs/<name> if empty. One that exists is continued."""
    seed: CountOrZero = 0
    """Seed of every random stream."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto takes a CUDA GPU if there is one."""
    threads: CountOrZero = 0
    """CPU threads of torch; 0 leaves the choice to torch."""
    processes: Count = 1
    """Cores that share the work: forks in a rollout, threads in an update; more than 1 on Linux and CPU alone."""
    deterministic: bool = True
    """Same seed, same bits: deterministic kernels, and no wall-clock deadlines."""


class TinyConfig(Section):
    """Shape of the gpt-oss-like model that `model.path = "tiny"` builds and trains from scratch."""

    hidden: Count = 128
    """Width of the residual stream."""
    layers: Count = 4
    """Transformer layers; even ones use the sliding window, odd ones see everything."""
    heads: Count = 4
    """Query heads, each with a learned sink."""
    kv_heads: Count = 2
    """Key and value heads."""
    head_dim: Count = 32
    """Size of one head; even, for rotary positions."""
    intermediate: Count = 128
    """Width of one expert."""
    experts: Count = 4
    """Experts in each layer."""
    experts_per_token: Count = 2
    """Experts that see one token."""
    window: Count = 64
    """Keys a sliding-window layer sees, the token itself included."""
    vocabulary: Annotated[int, Field(ge=512)] = 2048
    """Size of the tokenizer trained on the domain's texts."""
    max_tokens: Count = 2048
    """Longest sequence the model accepts; above 2048, full layers begin by looking at equal tokens."""


class LoraConfig(Section):
    """Adapters of low rank, trained in place of the weights (LoRA, arXiv 2106.09685). Needs the `lora` extra."""

    rank: CountOrZero = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Positive = 32.0
    """What an adapter adds counts alpha / rank times."""
    targets: tuple[str, ...] = Field(default=("all-linear",), strict=False, min_length=1)
    """Names of the layers that get one; all-linear: each linear layer but the output, and no experts in one tensor."""


class ModelConfig(Section):
    """The policy."""

    path: str = "tiny"
    """`tiny`, or a local Hugging Face folder."""
    trust_remote_code: bool = False
    """Run Python files found in the model folder. Only for folders whose code you have read."""
    tiny: TinyConfig = TinyConfig()
    """Shape, when path is `tiny`."""
    lora: LoraConfig = LoraConfig()
    """What is trained, when not the whole model."""


class EndpointConfig(Section):
    """The OpenAI-compatible server whose model plays the user when `env.user = "endpoint"`."""

    base_url: str = ""
    """Address of the server, usually ending in /v1."""
    model: str = ""
    """Name of the model on that server."""
    api_key_variable: str = ""
    """Environment variable that holds the key; none is sent if empty."""
    timeout_seconds: Positive = 60.0
    """For a whole answer."""
    retries: CountOrZero = 3
    """Further attempts at an answer, before the episode is invalid."""
    temperature: NotNegative = 0.0
    """Of the user's words; 0 is greedy."""


class EnvConfig(Section):
    """The environment and its user."""

    domain: str = "telecom"
    """Domain of tau2-bench, or `package.module:callable` that returns an environment of your own (envs/own.py)."""
    solo: bool = False
    """The agent works alone from a ticket and owns the user's tools too."""
    user: str = "scripted"
    """Who the agent talks to, unless solo: scripted, endpoint, replay, or `package.module:callable` of your own."""
    replay: str = ""
    """File of trajectories whose users are played again, when user is `replay`."""
    endpoint: EndpointConfig = EndpointConfig()
    """The server, when user is `endpoint`."""
    max_turns: Count = 30
    """Agent turns after which an episode is truncated."""
    deadline_seconds: NotNegative = 0.0
    """For one call of the environment, its tools and user included: it runs in a process of its own that is killed
    then, and the episode is invalid. 0: no deadline, no process."""
    memory_gigabytes: NotNegative = 0.0
    """What such a process may take, with those that it starts; beyond it, it is killed and the episode is invalid.
    What all of them share counts in each. 0: no limit."""


class PromptConfig(Section):
    """What the policy reads before the conversation."""

    policy_text: Literal["full", "short", "none"] = "full"
    """The domain's policy document: as it is, our summary of it, or nothing."""
    tools: Literal["full", "compact"] = "full"
    """Tool schemas: JSON with descriptions, or one signature a line."""
    tool_format: Literal["auto", "compact", "deepseek", "harmony", "hermes", "llama", "mistral", "qwen_xml"] = "auto"
    """How the model writes tool calls; auto sees it from the chat template."""


class TasksConfig(Section):
    """Which tasks are trained on, and how they are drawn."""

    split: Split = "train"
    """The official train split; pool: telecom's full set without test and held-out tasks; base: all (mock)."""
    exclude: tuple[Verdict, ...] = Field(default=(), strict=False)
    """Verdicts of `sinkflex tasks audit`; tasks with such a fault are not trained on."""
    sampling: Literal["uniform", "variance", "dtac"] = "uniform"
    """Uniform; by 4P(1-P) of the pass rate P of the task's bucket; or that with replays of rare successes."""
    bucket: tuple[str, ...] = Field(default=("family", "faults"), strict=False, min_length=1)
    """Task tags that define a bucket; "task_id" makes each task one (variance, dtac)."""
    ema: Fraction = 0.3
    """Weight of the newest pass rate in a bucket's moving average (variance, dtac)."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.02
    """Least weight of a bucket, so that none is forgotten (variance, dtac)."""
    replay_band: tuple[Fraction, Fraction] = Field(default=(0.02, 0.25), strict=False)
    """Successes of buckets with a pass rate in this band are kept and replayed (dtac)."""
    replay_uses: Count = 3
    """How often one success is replayed (dtac)."""
    replay_share: Fraction = 0.25
    """Most groups of a step that get a replay (dtac)."""
    infeasible_share: Fraction = 0.05
    """Part of all groups that are infeasible tasks, where the domain has any: telecom and retail (dtac)."""
    pass_band: tuple[Fraction, Fraction] = Field(default=(0.125, 0.875), strict=False)
    """Tasks whose own pass rate is outside are left out (variance, dtac; while `recalibrate_every` is not 0)."""
    recalibrate_every: CountOrZero = 0
    """Steps after which pass rates are measured anew and every task is back; 0 leaves no task out."""


class WarmupConfig(Section):
    """The warm start: supervised training on a scripted expert. Off while steps is 0."""

    steps: CountOrZero = 0
    """Optimizer steps; 0 switches the stage off."""
    demonstrations: Count = 16
    """Train tasks shown by the expert."""
    repeats: Count = 4
    """Episodes of the expert on each of them; in retail one, the others with practice customers."""
    omit: Fraction = 0.0
    """Probability with which the expert leaves out a check or a remedy, so that exploration has something to find."""
    forget: dict[str, Fraction] = {}
    """The same probability for single remedies of the phone, by tool, in place of omit."""
    diagnose: bool = True
    """The expert mends what it sees broken; if false it has every remedy tried."""
    shuffle: bool = True
    """Randomize the order of the expert's checks."""
    learning_rate: Positive = 1e-5
    """Peak learning rate; cosine to 0."""
    batch_tokens: Count = 8192
    """Tokens of one step."""


class RolloutConfig(Section):
    """How episodes are sampled in training."""

    groups: Count = 14
    """Tasks of one step."""
    group_size: Count = 8
    """Episodes of one task."""
    slots: Count = 128
    """Episodes that run at once."""
    temperature: Positive = 1.0
    """Sampling temperature; log-probs are taken at this temperature everywhere."""
    max_turn_tokens: Count = 48
    """Tokens the policy may sample in one turn."""
    max_tokens: Count = 1536
    """Tokens of a whole episode, prompt included; beyond it the episode is truncated."""
    retries: CountOrZero = 2
    """Further attempts at an episode that a fault ended, each from its start with the same seeds."""
    invalid_limit: Fraction = 0.5
    """Largest share of invalid episodes in a step or a validation; beyond it the run saves itself and stops."""
    context: Annotated[str, Field(pattern=r"^(full|window\([1-9][0-9]*\))$")] = "full"
    """What a prompt keeps of the history, in training and evaluation: full, or window(k), the last k exchanges."""

    @property
    def window(self) -> int:
        """Exchanges a prompt keeps; 0 keeps all."""
        return 0 if self.context == "full" else int(self.context[len("window(") : -1])


class MethodConfig(Section):
    """The method, and its own options: every further key of `[method]` is checked by the method's options model."""

    model_config = ConfigDict(extra="allow")

    name: str = "grpo"
    """A name from `sinkflex methods`, or `package.module:Class`."""
    reward_seconds: NotNegative = 0.0
    """For the method's reward of one episode (a program, a judge): it runs in a process of its own that is killed then,
    and the episode is invalid. 0: no deadline, no process. The reward of an environment has `env.deadline_seconds`."""

    @property
    def options(self) -> dict[str, Any]:
        """The method's own options as written; the method parses them with `recipe.parse_section`."""
        return dict(self.model_extra or {})


class LearnerConfig(Section):
    """The optimizer (AdamW) and how a batch is cut."""

    learning_rate: Positive = 1e-6
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), strict=False)
    """Decay rates of AdamW's two averages."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay; not applied to sinks, norms and biases."""
    warmup_steps: CountOrZero = 0
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, down to 0 at the last step."""
    clip_norm: Positive = 1.0
    """Largest norm of the gradient."""
    mini_batches: Count = 1
    """Optimizer updates one batch is cut into, by whole groups."""
    epochs: Count = 1
    """Passes over a batch."""
    micro_batch_tokens: Count = 8192
    """Tokens of one forward pass; changes memory, never the gradient."""
    checkpoint_layers: bool = True
    """Keep only each layer's input and attention output, and compute the rest again: less memory, about a third more
    time."""


class TrainConfig(Section):
    """The loop."""

    steps: CountOrZero = 100
    """Steps of reinforcement learning; 0 trains the warm start alone."""
    validate_every: CountOrZero = 10
    """Steps between validations; 0 validates only at both ends."""
    checkpoint_every: Count = 10
    """Steps between checkpoints; the last step always leaves one."""
    keep_checkpoints: Count = 2
    """Newest checkpoints kept, besides the best."""


class ValidationConfig(Section):
    """How the score `validation/mean@1` is measured."""

    split: Split = "test"
    """Tasks of the score: official splits; held_out: 200 of telecom, apart from both; base: all (mock)."""
    extra: tuple[Split, ...] = Field(default=(), strict=False)
    """Further splits scored at both ends of the run."""
    trials: Count = 1
    """Episodes of each task."""
    temperature: NotNegative = 0.0
    """Sampling temperature; 0 is greedy."""


class LogConfig(Section):
    """Where metrics go."""

    writers: tuple[Literal["console", "jsonl", "tensorboard", "wandb", "trackio"], ...] = Field(
        default=("console", "jsonl", "tensorboard"), strict=False
    )
    """Writers; wandb and trackio need the `trackers` extra."""


class Config(Section):
    """A whole recipe."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    env: EnvConfig = EnvConfig()
    prompt: PromptConfig = PromptConfig()
    tasks: TasksConfig = TasksConfig()
    warmup: WarmupConfig = WarmupConfig()
    rollout: RolloutConfig = RolloutConfig()
    method: MethodConfig = MethodConfig()
    learner: LearnerConfig = LearnerConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    log: LogConfig = LogConfig()

    @property
    def run_directory(self) -> Path:
        """Folder of the run."""
        return Path(self.run.directory or Path("runs") / (self.run.name or "run"))

    def flat(self) -> dict[str, Any]:
        """Return {"section.key": JSON value}, for comparing two configs."""
        return dict(_leaves(self, self.model_dump(mode="json")))

    @model_validator(mode="after")
    def _cross_checks(self) -> Self:
        from sinkflex.contradictions import contradictions  # which imports this file

        for wrong, message in contradictions(self):
            if wrong:
                raise ValueError(message)
        return self


def _leaves(section: Section, values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("section.key", value) for every option; one that is a table itself is one value."""
    for key, value in values.items():
        inner = getattr(section, key)
        if isinstance(inner, Section):
            yield from _leaves(inner, value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
