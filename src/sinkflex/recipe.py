"""From a recipe file and `--set` to a checked `Config`; every mistake becomes one line a user can act on.

Precedence: defaults < recipe < `--set section.key=value`.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from sinkflex.config import Config

SectionT = TypeVar("SectionT", bound=BaseModel)

# What pydantic calls a type, and what somebody who writes TOML calls it.
_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text in quotes",
    "a valid boolean": "true or false",
    "a valid tuple": "a list in [brackets]",
}


class ConfigError(ValueError):
    """A mistake in a recipe or in `--set`: what was found, what was expected, what to type."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe, apply `section.key=value` overrides, check everything.

    Args:
        path: a TOML file, for instance `recipes/smoke.toml` or the `config.toml` of a run.
        overrides: texts of `--set`; a value that is not TOML is taken as a string.

    Raises:
        ConfigError: one line for each mistake.
    """
    path = Path(path)
    data = _read_toml(path)
    for override in overrides:
        _assign(data, *_parse_override(override), override)
    run = data.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    return parse_section(Config, data, str(path), sources=sources_of(overrides))


def sources_of(overrides: Sequence[str]) -> dict[str, str]:
    """Return where each overridden option comes from, as a message says it: {"run.seed": "--set run.seed=x"}."""
    return {".".join(_parse_override(override)[0]): f"--set {override}" for override in overrides}


def config_of(source: Path, recipe: Path | None, overrides: Sequence[str]) -> Config | None:
    """Return the config that a policy is played with: the run's own, or a recipe's. Recorded episodes have none.

    Args:
        source: a run directory, a Hugging Face folder, or a file of trajectories.
        recipe: instead of the run's own.
        overrides: texts of `--set`.

    Raises:
        ConfigError: there is no such source or recipe, or a mistake in it.
    """
    expected = "expected a run directory, a Hugging Face folder or a .jsonl.zst file"
    if source.suffix == ".toml" and source.is_file():
        directory = load_config(source).run_directory
        first = "" if directory.is_dir() else f" after {shlex.join(['sinkflex', 'train', str(source)])}"
        command = shlex.join(["sinkflex", "evaluate", str(directory)])
        raise ConfigError(f"{source} is a recipe, {expected}. Type {command}{first}")
    if source.is_file():
        return None
    if not source.is_dir():
        hint = did_you_mean(str(source), map(str, source.parent.glob("*")))
        raise ConfigError(f"{source}: no such folder, {expected}.{hint}")
    if recipe or (source / "config.toml").is_file():
        return load_config(recipe or source / "config.toml", overrides)
    if (source / "config.json").is_file() or (source / "adapter_config.json").is_file():
        raise ConfigError(f"{source} is a model without a recipe: name that of environment and prompt with --recipe")
    around = [*sorted(source.glob("*/config.toml")), *(folder / "config.toml" for folder in source.parents)]
    runs = [str(path.parent) for path in around if path.is_file()]
    hint = f" Type {shlex.join(['sinkflex', 'evaluate', runs[0]])}" if runs else ""
    raise ConfigError(f"{source} is no run: there is no config.toml in it, {expected}.{hint}")


def parse_section(
    model: type[SectionT],
    data: Mapping[str, Any],
    source: str,
    prefix: str = "",
    sources: Mapping[str, str] | None = None,
) -> SectionT:
    """Validate `data` with a pydantic model and turn its errors into lines a user can act on.

    Args:
        model: the model, for instance a method's options.
        data: what was written.
        source: starts each line; usually the file.
        prefix: dotted path of this section ("method"), for the names in the messages.
        sources: keys that came from elsewhere, {dotted key: where}.

    Raises:
        ConfigError: one line for each mistake.
    """
    try:
        return model.model_validate(dict(data))
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False):
            location = [str(part) for part in item["loc"]]
            key = ".".join([prefix, *location] if prefix else location)
            text = _explain(model, item, location, key)
            # What contradicts another option is in no place of its own: its text names the options.
            named = {key, *re.findall(r"[a-z_]+(?:\.[a-z_]+)+", text)} if item["type"] == "value_error" else {key}
            unknown = item["type"] == "extra_forbidden"  # perhaps a section: what was to be set in it names it
            related = [
                where
                for name, where in (sources or {}).items()
                if (unknown and name.startswith(f"{key}.")) or any(f"{k}.".startswith(f"{name}.") for k in named)
            ]
            lines.append(f"{', '.join(related) or source}: {text}")
        raise ConfigError("\n".join(lines)) from None


def dump_config(config: Config) -> str:
    """Return the complete config as TOML; `load_config` reads it back to an equal one."""
    lines: list[str] = []
    for section, values in config.model_dump(mode="json").items():
        tables = {section: {}}
        for key, value in values.items():
            target, pairs = (f"{section}.{key}", value) if isinstance(value, dict) else (section, {key: value})
            tables.setdefault(target, {}).update(pairs)
        for title, pairs in tables.items():
            # A JSON scalar or list is valid TOML as it stands, but for one character.
            texts = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in pairs.items())
            lines += [f"[{title}]", *texts, ""]
    return "\n".join(lines).replace("\x7f", "\\u007f")


def did_you_mean(found: str, choices: Iterable[str]) -> str:
    """Return " Did you mean X?" for the nearest choice, or an empty string."""
    names = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(found.lower(), names, n=1)
    return f" Did you mean {names[near[0]]}?" if near else ""


def _explain(model: type[BaseModel], item: Mapping[str, Any], location: list[str], key: str) -> str:
    """Return one mistake in words: what was found, what was expected, what to type."""
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    if item["type"] == "extra_forbidden":
        return _explain_unknown(model, location, key)
    if item["type"] == "missing":
        return f"{key} is missing, and has no default. Type {key} = VALUE."
    found = json.dumps(item["input"], ensure_ascii=False, default=str)
    if item["type"] == "model_type":
        return f"{key} = {found}, expected a section [{key}] with options of its own."
    expected = item["msg"].removeprefix("Input should be ")
    for theirs, ours in _WORDS.items():
        expected = expected.replace(theirs, ours)
    field = _field(model, location)
    if item["type"] == "literal_error":
        expected += "." + did_you_mean(str(item["input"]), re.findall(r"'(.*?)'", item["ctx"]["expected"]))
    elif field is not None and not field.is_required() and field.default:
        expected += f", for instance {json.dumps(field.default, default=str)}."
    else:
        expected += "."
    about = f" ({field.description})" if field is not None and field.description else ""
    return f"{key} = {found}, expected {expected}{about}"


def _explain_unknown(model: type[BaseModel], location: list[str], key: str) -> str:
    """Return the message for a key that does not exist, with the nearest one that does."""
    parent = _section(model, location[:-1])
    here = [key.removesuffix(location[-1]) + name for name in parent.model_fields]
    namesakes = [name for name in _options(model) if name.split(".")[-1] == location[-1]]
    if near := difflib.get_close_matches(location[-1], parent.model_fields, n=1):
        hint = f"Did you mean {key.removesuffix(location[-1])}{near[0]}?"
    elif namesakes:
        hint = f"Did you mean {' or '.join(namesakes)}?"
    else:
        hint = f"There are {', '.join(here)}."
    return f"{key} is not {'a section' if parent is Config else 'an option'}. {hint}"


def _options(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted name of every option."""
    for name in model.model_fields:
        inner = _section(model, [name])
        if inner is model:
            yield f"{prefix}{name}"
        else:
            yield from _options(inner, f"{prefix}{name}.")


def _section(model: type[BaseModel], location: list[str]) -> type[BaseModel]:
    """Return the model of the section at this location, or of the innermost section around it."""
    for part in location:
        inner = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        model = inner
    return model


def _field(model: type[BaseModel], location: list[str]) -> FieldInfo | None:
    """Return the field a mistake is in; for an entry of a list, the list's field."""
    fields = _section(model, location).model_fields
    return next((fields[part] for part in reversed(location) if part in fields), None)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        shipped = sorted(str(found) for found in Path("recipes").glob("*.toml"))
        hint = did_you_mean(str(path), [*shipped, *map(str, path.parent.glob("*.toml"))])
        hint = hint or (f" There are {', '.join(shipped)}." if shipped else "")
        raise ConfigError(f"{path}: no such file, expected a recipe.{hint}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from None
    except IsADirectoryError:
        hint = f" Type {path}/config.toml for that of this run." if (path / "config.toml").is_file() else ""
        raise ConfigError(f"{path}: is a folder, expected a recipe.{hint}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}), expected a recipe.") from None


def _parse_override(text: str) -> tuple[list[str], Any]:
    key, separator, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not separator or len(parts) < 2 or not all(parts):
        # What stands alone is perhaps an option without its section, or a section whose name was meant.
        near = [name for name in _options(Config) if name.endswith(f".{key.strip()}") or name == f"{key.strip()}.name"]
        instance = f"{near[0]}={value.strip()}" if separator and len(near) == 1 else "train.steps=20"
        raise ConfigError(f"--set {text}: expected section.key=value, for instance --set {instance}")
    try:
        return parts, tomllib.loads(f"value = {value.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        return parts, value.strip()


def _assign(data: dict[str, Any], key: list[str], value: Any, text: str) -> None:
    for part in key[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {text}: {part} is a value, not a section; expected section.key=value")
    data[key[-1]] = value
