"""What goes wrong at the command line: mistakes, a full or forbidden disk and Ctrl-C become one line; bugs pass."""

from __future__ import annotations

import errno
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from sinkflex.plain import plain

USER_MISTAKE, INTERRUPTED = 2, 130
# What the user can do when the system refuses a file.
_SPACE = "Free some space, or choose another disk with --set run.directory=FOLDER."
_FOLDER = "Choose a folder you may write to with --set run.directory=FOLDER."
_REMEDIES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EACCES: _FOLDER,
    errno.EPERM: _FOLDER,
    errno.EROFS: _FOLDER,
    errno.EEXIST: _FOLDER,
    errno.ENOTDIR: _FOLDER,
}


class Command(TyperCommand):
    """A command that knows a forgotten `--set` when it sees one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, unless an option of a recipe stands there by itself: no file, and no value of another option."""
        valued = {
            name for parameter in self.params if not getattr(parameter, "is_flag", True) for name in parameter.opts
        }
        loose = [
            word
            for before, word in pairwise(["", *args])
            if before not in valued and re.match(r"\w+(\.\w+)+=", word) and not Path(word).exists()
        ]
        if loose and any(parameter.name == "overrides" for parameter in self.params):
            told = " ".join(f"--set {shlex.quote(word)}" for word in loose)
            raise typer.BadParameter(f"{', '.join(loose)}. Type {told}", ctx)
        return super().parse_args(ctx, args)


@contextmanager
def errors_as_lines(debug: bool) -> Iterator[None]:
    """Turn a user's mistake, a full or forbidden disk, and Ctrl-C into one line and an exit status; bugs pass."""
    again = shlex.join(["sinkflex", *sys.argv[1:]])
    try:
        yield
    except KeyboardInterrupt as stop:
        fail(f"stopped{f', {stop}' if str(stop) else ''}; continue with: {again}", INTERRUPTED)
    except BrokenPipeError:
        # Whoever reads our output has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
    except Exception as error:
        line = _user_mistake(error, again)
        if line is None or debug:
            raise
        fail(line, USER_MISTAKE)


def fail(text: str, status: int) -> NoReturn:
    """Print a line on standard error, and exit."""
    print(plain(text), file=sys.stderr)
    raise typer.Exit(status)


def warn(text: object) -> None:
    """Print a warning on standard error."""
    print(plain(f"warning: {text}"), file=sys.stderr)


def _user_mistake(error: Exception, again: str) -> str | None:
    """Return the line to show for this error, None if it is a bug."""
    if isinstance(error, ValueError) and _raised_by_us(error):
        return str(error)
    number = error.errno if isinstance(error, OSError) else None
    # Libraries written in Rust put the system's error into the text.
    if match := re.search(r"os error (\d+)", str(error)):
        number = int(match[1])
    if number not in _REMEDIES:
        return None
    place = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return f"{os.strerror(number)}{place}. {_REMEDIES[number]} Then continue with: {again}"


def _raised_by_us(error: Exception) -> bool:
    """True if the error was raised in this package: by convention our ValueErrors are made for users."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return frames[-1][0].f_globals.get("__name__", "").startswith("sinkflex.")
