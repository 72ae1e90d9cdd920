"""Reading files of lines while somebody appends to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def read_whole_lines(path: Path, at: int, most: int) -> bytes:
    """The complete lines from byte ``at`` on, about ``most`` bytes of them: a last line without its newline is still being written, or is
    what a crash left. Empty when there is nothing, or no file. One line longer than ``most`` is read whole."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            found = file.read(most)
            whole = found[: found.rfind(b"\n") + 1]
            if whole or len(found) < most:
                return whole
            found += file.readline()
            return found if found.endswith(b"\n") else b""
    except OSError:  # not there, not to be read, or a folder of that name
        return b""


def parse(raw: bytes, what: str, good: Callable[[Any], bool]) -> tuple[list[dict[str, Any]], list[str]]:
    """(objects that are ``good``, complaints about other lines) of lines of JSON."""
    found, complaints = [], []
    for line in raw.split(b"\n")[:-1]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # not JSON, not even UTF-8, or brackets without end
            value = None
        if good(value):
            found.append(value)
        else:
            complaints.append(f"A line of {what} is damaged and was left out: {line[:80].decode(errors='replace')!r}.")
    return found, complaints
