"""Text of unknown origin on its way to a terminal: model output, tool results, servers' answers."""

from __future__ import annotations

import re

# Control characters but for newline and tab, and those that reverse the direction of what follows.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|[\ud800-\udfff]")


def plain(text: str) -> str:
    """Return the text with everything visible that would steer a terminal instead of being read."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)
