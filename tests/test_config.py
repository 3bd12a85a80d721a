"""Every option is documented, every mistake becomes a line that says what to type, and configs survive a round trip."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from sinkflex.config import Config, Section
from sinkflex.recipe import ConfigError, dump_config, load_config, parse_section

RECIPES = sorted(Path("recipes").glob("*.toml"))


def sections(model: type[BaseModel] = Config):
    """Yield every section model of the config."""
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield field.annotation
            yield from sections(field.annotation)


def load(tmp_path: Path, text: str = "", *overrides: str) -> Config:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    return load_config(recipe, overrides)


def mistakes(tmp_path: Path, text: str = "", *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, *overrides)
    return str(error.value).replace(str(tmp_path / "recipe.toml"), "RECIPE")


def test_every_option_has_a_docstring_and_a_default():
    for section in sections():
        assert section.__doc__
        for name, field in section.model_fields.items():
            if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
                assert field.description, f"{section.__name__}.{name}"
            assert not field.is_required(), f"{section.__name__}.{name}"


def test_there_are_few_enough_options_to_read():
    assert len(Config().flat()) <= 90


def test_recipe_and_override_win_over_defaults(tmp_path):
    config = load(tmp_path, "[train]\nsteps = 7\n[rollout]\ngroups = 3", "rollout.groups=4", "env.domain=telecom")
    assert (config.train.steps, config.rollout.groups, config.rollout.group_size) == (7, 4, 8)
    assert config.env.domain == "telecom"


def test_a_run_is_named_after_its_recipe_unless_told_otherwise(tmp_path):
    assert load(tmp_path).run_directory == Path("runs/recipe")
    assert load(tmp_path, "", "run.name=other").run_directory == Path("runs/other")
    assert load(tmp_path, "", "run.directory=/tmp/x").run_directory == Path("/tmp/x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[rollout]\ngroup_siz = 8", "RECIPE: rollout.group_siz is not an option. Did you mean rollout.group_size?"),
        ("[rolout]\ngroups = 8", "RECIPE: rolout is not a section. Did you mean rollout?"),
        (
            "[rollout]\nlearning_rate = 1.0",
            "RECIPE: rollout.learning_rate is not an option. "
            "Did you mean warmup.learning_rate or learner.learning_rate?",
        ),
        ("[model.tiny]\nhiden = 8", "RECIPE: model.tiny.hiden is not an option. Did you mean model.tiny.hidden?"),
        (
            '[rollout]\ngroups = "eight"',
            'RECIPE: rollout.groups = "eight", expected a whole number, for instance 14. (Tasks of one step.)',
        ),
        (
            '[rollout]\ngroups = "8"',
            'RECIPE: rollout.groups = "8", expected a whole number, for instance 14. (Tasks of one step.)',
        ),
        (
            "[rollout]\ngroups = 0",
            "RECIPE: rollout.groups = 0, expected greater than or equal to 1, for instance 14. (Tasks of one step.)",
        ),
        ("rollout = 3", "RECIPE: rollout = 3, expected a section [rollout] with options of its own."),
        ("run = 3", "RECIPE: run = 3, expected a section [run] with options of its own."),
        (
            '[env]\ndomain = "telcom"',
            'RECIPE: env.domain = "telcom": there is no such domain. Type "telecom" or "package.module:callable". '
            "Domains: telecom, retail, airline, mock.",
        ),
    ],
)
def test_a_mistake_names_file_key_finding_expectation_and_remedy(tmp_path, text, expected):
    assert mistakes(tmp_path, text) == expected


def test_all_mistakes_are_told_at_once_each_with_its_source(tmp_path):
    text = '[rollout]\ngroups = 0\n[learner]\nbetas = [0.9, "x"]\n[train]\nsteps = -1'
    lines = mistakes(tmp_path, text, "rollout.slots=many").splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "RECIPE: rollout.groups = 0",
        '--set rollout.slots=many: rollout.slots = "many"',
        'RECIPE: learner.betas.1 = "x"',
        "RECIPE: train.steps = -1",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "rollout.groups=0",
        "env.domain=telekom",
        "env.user=nobody",
        "tasks.split=test",
        "validation.split=base",
        "model.tiny.kv_heads=3",
        "train.stepz=1",
    ],
)
def test_a_mistake_is_blamed_on_the_recipe_or_on_the_override_that_it_came_from(tmp_path, override):
    section, _, assignment = override.rpartition(".")
    key, _, value = assignment.partition("=")
    text = f"[{section}]\n{key} = {value if value.isdigit() else repr(value)}"
    in_file, in_override = mistakes(tmp_path, text), mistakes(tmp_path, "", override, "run.seed=1")
    assert in_file.startswith("RECIPE: ") and "--set" not in in_file
    assert in_override == in_file.replace("RECIPE: ", f"--set {override}: ")


def test_a_section_that_does_not_exist_is_blamed_on_the_override_that_names_it(tmp_path):
    assert mistakes(tmp_path, "", "trian.steps=3") == "--set trian.steps=3: trian is not a section. Did you mean train?"


def test_a_longer_key_is_not_blamed_on_an_override_that_starts_like_it(tmp_path):
    text = mistakes(tmp_path, '[rollout]\ngroups = "x"', "rollout.group=3")
    assert 'RECIPE: rollout.groups = "x"' in text
    assert "--set rollout.group=3: rollout.group is not an option" in text


@pytest.mark.parametrize("override", ["steps", "steps=3", "=3", "train.=3", ".steps=3"])
def test_an_override_without_section_or_value_says_the_form(tmp_path, override):
    assert mistakes(tmp_path, "", override).endswith("expected section.key=value, for instance --set train.steps=20")


@pytest.mark.parametrize(
    ("override", "meant"), [("groups=3", "rollout.groups=3"), ("method=stepo", "method.name=stepo")]
)
def test_an_override_without_its_section_is_told_the_one_option_that_it_can_mean(tmp_path, override, meant):
    assert mistakes(tmp_path, "", override).endswith(f"expected section.key=value, for instance --set {meant}")


def test_an_override_through_a_value_is_refused(tmp_path):
    assert "train is a value, not a section" in mistakes(tmp_path, "train = 3", "train.steps=3")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["model.tiny.heads=3"], "Type model.tiny.kv_heads = 3 or a divisor of it."),
        (["model.tiny.head_dim=33"], "model.tiny.head_dim = 33 is odd. Type 34."),
        (["model.tiny.experts=1"], "Type model.tiny.experts_per_token = 1 or less."),
        (["rollout.max_tokens=5000"], "Type rollout.max_tokens = 2048 or less, or model.tiny.max_tokens = 5000."),
        (["env.memory_gigabytes=1.0"], "Type env.deadline_seconds = 60 and run.deterministic = false"),
        (["method.reward_seconds=5.0"], "Type run.deterministic = false or method.reward_seconds = 0."),
        (["tasks.floor=0.0"], "tasks.floor = 0.0, expected greater than 0"),
        (["rollout.max_turn_tokens=1536"], "leaves no room in rollout.max_tokens = 1536"),
        (["learner.mini_batches=15"], "Type learner.mini_batches = 14 or less."),
        (["env.domain=mock"], 'tasks.split = "train": mock has no such split. Type "base".'),
        (["env.domain=retail", "tasks.split=pool"], 'retail has no such split. Type "train".'),
        (["tasks.split=test"], 'tasks.split = "test": it is holdout, no run trains on it. Type "train" or "pool".'),
        (["validation.split=base"], 'telecom has no such split. Type "train" or "pool" or "test" or "held_out".'),
    ],
)
def test_contradictions_are_refused_with_a_way_out(tmp_path, overrides, part):
    assert part in mistakes(tmp_path, "", *overrides)


def test_a_long_context_is_no_contradiction_for_a_model_from_a_folder(tmp_path):
    assert load(tmp_path, "", "rollout.max_tokens=5000", "model.path=/models/x").rollout.max_tokens == 5000


def test_options_of_a_method_pass_through_to_its_own_model(tmp_path):
    class Options(Section):
        """Options of some method."""

        clip_low: float = 0.2
        """How far the ratio may fall."""

    config = load(tmp_path, "[method]\nclip_low = 0.3\nclip_lo = 1.0")
    assert config.method.options == {"clip_low": 0.3, "clip_lo": 1.0}
    with pytest.raises(
        ConfigError, match=r"^r\.toml: method\.clip_lo is not an option\. Did you mean method\.clip_low\?$"
    ):
        parse_section(Options, config.method.options, "r.toml", prefix="method")
    assert parse_section(Options, {"clip_low": 0.3}, "r.toml").clip_low == 0.3


@pytest.mark.parametrize("content", [b"[rollout\n", b"\xff\xfe", b"a = \n"])
def test_a_file_that_is_no_toml_says_where(tmp_path, content):
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: not a TOML file: "):
        load_config(path)


def test_a_missing_recipe_names_the_nearest_one(tmp_path):
    (tmp_path / "telecom_cpu.toml").touch()
    with pytest.raises(ConfigError, match=r"telecom_cp\.toml: no such file.* Did you mean .*telecom_cpu\.toml\?"):
        load_config(tmp_path / "telecom_cp.toml")
    with pytest.raises(ConfigError, match=r"is a folder, expected a recipe\.$"):
        load_config(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(ConfigError, match=r"is a folder, expected a recipe\. Type .*/config\.toml"):
        load_config(tmp_path)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(name=text, rate=st.floats(1e-300, 1e300), extra=st.one_of(text, st.booleans(), st.lists(text, max_size=3)))
def test_a_dumped_config_reads_back_equal(tmp_path_factory, name, rate, extra):
    config = Config.model_validate(
        {"run": {"name": name}, "learner": {"learning_rate": rate}, "method": {"name": "grpo", "extra": extra}}
    )
    path = tmp_path_factory.mktemp("dump") / "config.toml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    assert load_config(path) == config


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_hold_only_what_differs_from_the_defaults(recipe):
    config, defaults = load_config(recipe).flat(), Config().flat()
    written = re.findall(r"^(\w+) =", recipe.read_text(), re.MULTILINE)
    changed = [key for key, value in config.items() if key != "run.name" and defaults.get(key) != value]
    assert sorted(written) == sorted(key.split(".")[-1] for key in changed)


def test_reading_a_config_imports_nothing_heavy():
    program = "import sys, sinkflex.recipe; print({'torch', 'transformers', 'numpy', 'tau2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


class Demanding(Section):
    """Options as a method of one's own may have them: without a default, or with one that is no JSON."""

    needed: float
    place: Path = Path("here")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({}, "method.needed is missing, and has no default. Type method.needed = VALUE."),
        ({"needed": "x"}, 'method.needed = "x", expected a number.'),
        ({"needed": 1, "place": 3}, 'method.place = 3, expected an instance of Path, for instance "here".'),
    ],
)
def test_options_without_a_default_or_with_an_unusual_one_are_explained_too(data, line):
    with pytest.raises(ConfigError) as error:
        parse_section(Demanding, data, "R", "method")
    assert str(error.value) == f"R: {line}"
