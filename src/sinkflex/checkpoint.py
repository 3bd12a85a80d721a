"""Checkpoints that are either complete or not there.

A checkpoint is written to a hidden folder, synced to disk, and renamed into place, so no partial one is ever visible:

    checkpoints/step_40/
      about.json            step, score, and where it comes from: config, code version, data fingerprints
      state.json            the state tree; tensors in it are names in tensors.safetensors
      tensors.safetensors   every tensor of the state tree
      model/                whatever a writer put there, here a Hugging Face folder
      SHA256SUMS            one line a file; `sha256sum -c SHA256SUMS` checks it too

Nothing is pickled. A damaged checkpoint is found by its hashes, and the previous one is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FORMAT = 1
_SUMS = "SHA256SUMS"
_HIDDEN = ".writing_"
# Keys of an origin that hold many things, of which a change tells the names.
NAMED = ("code", "data", "tasks")
_SHOWN = 3


class CheckpointError(ValueError):
    """No checkpoint can be used."""


class CheckpointWarning(UserWarning):
    """A checkpoint was skipped because it is damaged."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        path: its folder.
        step: steps done when it was written.
        score: what `best` compares, None if it was not measured at this step.
        provenance: what was recorded about its origin.
    """

    path: Path
    step: int
    score: float | None
    provenance: dict[str, Any]

    def state(self) -> dict[str, Any]:
        """Return the state tree as it was saved, tensors on the CPU."""
        tensors = load_file(self.path / "tensors.safetensors")
        return _unpack(json.loads((self.path / "state.json").read_text(encoding="utf-8")), tensors)

    def changes(self, provenance: Mapping[str, Any]) -> list[str]:
        """Return a line for each key in which this checkpoint's origin differs from `provenance`."""
        old, new = self.provenance, json.loads(json.dumps(provenance))
        keys = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
        return [_change(key, old.get(key), new.get(key)) for key in keys]


def save(
    directory: Path,
    step: int,
    state: Mapping[str, Any],
    *,
    provenance: Mapping[str, Any],
    folders: Mapping[str, Callable[[Path], object]] | None = None,
    score: float | None = None,
    keep: int = 2,
) -> Checkpoint:
    """Write a checkpoint, then remove old ones.

    Args:
        directory: folder of all checkpoints of a run.
        step: steps done.
        state: nested dicts, lists and tuples of JSON values and tensors, for instance `optimizer.state_dict()`.
        provenance: JSON values to compare on resume: config, versions, and under `NAMED` hashes by name.
        folders: {name: function that fills the folder of this name}, for instance {"model": model.save_pretrained}.
        score: what `best` compares; higher is better.
        keep: how many of the newest to keep, besides the best.

    Raises:
        TypeError: `state` holds something that is neither JSON nor a tensor; the text names its place.
        OSError: the disk is full or not writable; nothing visible has changed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(f"{_HIDDEN}*"):
        shutil.rmtree(leftover)
    draft = directory / f"{_HIDDEN}step_{step}"
    try:
        draft.mkdir()
        tensors: dict[str, torch.Tensor] = {}
        packed = _pack(state, "state", tensors)
        save_file(tensors, draft / "tensors.safetensors")
        (draft / "state.json").write_text(json.dumps(packed), encoding="utf-8")
        about = {"format": FORMAT, "step": step, "score": score, "provenance": dict(provenance)}
        (draft / "about.json").write_text(json.dumps(about, indent=1), encoding="utf-8")
        for name, write in (folders or {}).items():
            (draft / name).mkdir()
            write(draft / name)
        (draft / _SUMS).write_text(_sums(draft), encoding="utf-8")
        _sync_tree(draft)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    final = directory / f"step_{step}"
    if final.exists():
        # A damaged one that was passed over, or the same state saved again.
        final.rename(directory / f"{_HIDDEN}replaced_{step}")
    draft.rename(final)
    _sync(directory)
    _prune(directory, step, keep)
    return _read(final)


def latest(directory: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint, None if there is none at all.

    Warns:
        CheckpointWarning: for each damaged one that was skipped.

    Raises:
        CheckpointError: there are checkpoints, all damaged.
    """
    damages = []
    for path in reversed(paths(directory)):
        damage = verify(path)
        if not damage:
            return _read(path)
        damages.append(f"{path}: {damage}")
        warnings.warn(f"damaged checkpoint skipped: {path}: {damage}", CheckpointWarning, stacklevel=2)
    if damages:
        raise CheckpointError(
            f"every checkpoint in {directory} is damaged ({'; '.join(damages)}). "
            "Remove the run directory to start again, or restore one from a backup."
        )
    return None


def best(directory: Path) -> Checkpoint | None:
    """Return the whole checkpoint with the highest score, the newest of equal ones; None if none has a score."""
    return next((_read(path) for path in reversed(_ranking(paths(directory))) if not verify(path)), None)


def verify(path: Path) -> str:
    """Return what is wrong with the checkpoint in this folder, an empty string if nothing is."""
    try:
        recorded, actual = (path / _SUMS).read_text(encoding="utf-8"), _sums(path)
    except (OSError, UnicodeDecodeError) as error:
        return f"{_SUMS} cannot be read ({error})"
    if recorded == actual:
        return ""
    wrong = sorted({line.split("  ")[-1] for line in set(recorded.splitlines()) ^ set(actual.splitlines())})
    return f"hashes differ for {', '.join(wrong) or _SUMS}"


def paths(directory: Path) -> list[Path]:
    """Return the checkpoint folders, oldest first."""
    numbered = [(int(path.name[5:]), path) for path in directory.glob("step_*") if path.name[5:].isdigit()]
    return [path for _, path in sorted(numbered)]


def _read(path: Path) -> Checkpoint:
    about = json.loads((path / "about.json").read_text(encoding="utf-8"))
    if about["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {about['format']}, this version reads format {FORMAT}")
    return Checkpoint(path, about["step"], about["score"], about["provenance"])


def _ranking(folders: list[Path]) -> list[Path]:
    """Return the checkpoints that have a score, best last; of equal ones the newest last."""
    scores = {}
    for path in folders:
        with contextlib.suppress(OSError, ValueError, KeyError):
            scores[path] = json.loads((path / "about.json").read_text(encoding="utf-8"))["score"]
    return sorted((path for path in scores if scores[path] is not None), key=lambda path: scores[path])


def _prune(directory: Path, step: int, keep: int) -> None:
    """Keep the newest `keep` and the best.

    One of a later step than `step` is damaged, or the run would have continued from it: it goes too.
    """
    past = [path for path in paths(directory) if int(path.name[5:]) <= step]
    kept = {*past[-keep:], *_ranking(past)[-1:]}
    for path in {*directory.glob("step_*"), *directory.glob(f"{_HIDDEN}*")} - kept:
        # Hidden first, so that a crash half-way leaves no partial checkpoint in sight.
        hidden = directory / f"{_HIDDEN}{path.name.removeprefix(_HIDDEN)}"
        path.rename(hidden)
        shutil.rmtree(hidden)


def _sums(folder: Path) -> str:
    """Return the text of SHA256SUMS for what is in the folder now; a file browser's hidden files do not count."""
    lines = []
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    for path in files:
        if path == folder / _SUMS:
            continue
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(folder).as_posix()}\n")
    return "".join(lines)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _change(key: str, old: Any, new: Any) -> str:
    """Return a change of an origin in words."""
    if key not in NAMED:
        return f"{key} was {json.dumps(old)}, is now {json.dumps(new)}"
    if not isinstance(old, dict):
        return f"{key} may have changed: the checkpoint is of a version that did not record names"
    found = {
        "changed": [name for name in new if name in old and new[name] != old[name]],
        "new": [name for name in new if name not in old],
        "gone": [name for name in old if name not in new],
    }
    told = [f"{len(names)} {what} ({_some(names)})" for what, names in found.items() if names]
    return f"{key}: {', '.join(told)}"


def _some(names: list[str]) -> str:
    return ", ".join([*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])


def _pack(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Turn a state tree into JSON, its tensors going to `tensors`; what JSON cannot say is marked with a $ key."""
    match value:
        case torch.Tensor():
            tensors[place] = value.detach().cpu().contiguous().clone()
            return {"$tensor": place}
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_pack(item, f"{place}.{i}", tensors) for i, item in enumerate(value)]
        case tuple():
            return {"$tuple": [_pack(item, f"{place}.{i}", tensors) for i, item in enumerate(value)]}
        case dict() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _pack(item, f"{place}.{key}", tensors) for key, item in value.items()}
        case dict() if all(isinstance(key, int) for key in value):
            return {"$items": [[key, _pack(item, f"{place}.{key}", tensors)] for key, item in value.items()]}
    raise TypeError(f"{place} is a {type(value).__name__}; a checkpoint holds JSON values and tensors only")


def _unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$tuple": items}:
            return tuple(_unpack(item, tensors) for item in items)
        case {"$items": items}:
            return {key: _unpack(item, tensors) for key, item in items}
        case dict():
            return {key: _unpack(item, tensors) for key, item in value.items()}
        case list():
            return [_unpack(item, tensors) for item in value]
    return value
