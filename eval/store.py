"""Where an evaluation's samples lie, so that a stopped one goes on: one folder a key, one JSON line a sample, whole problems only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.errors import DataError

FIELDS = {"id": str, "sample": int, "question": str, "response": str, "tokens": int, "finish": str, "verdict": str, "rule": str}
SAMPLES, CONFIG, SUMMARY, REPORT = "samples.jsonl", "config.json", "summary.json", "report.md"


class Store:
    """``folder`` holds ``config.json`` (all that the key is made of), ``samples.jsonl``, and at the end ``summary.json`` and ``report.md``.

    The key is part of the folder's name and stands in its config: samples of another key are never read.
    """

    def __init__(self, folder: Path, key: str, config: Mapping[str, Any], n: int) -> None:
        self.folder, self.key, self.config, self.n = folder, key, config, n
        self.spent = nothing_spent()

    @contextlib.contextmanager
    def open(self, resume: bool = True) -> Iterator[dict[str, list[dict[str, Any]]]]:
        """Problem id -> its n rows, of the problems that are done. While open, no other process can open it.

        Raises:
            DataError: another process evaluates into this folder, or the folder is another evaluation's.
        """
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"Another process is evaluating into {self.folder}; wait for it, or choose another output.") from None
            done = self._read() if resume else {}
            self._write_all(done)
            yield done

    def append(self, rows: Sequence[Mapping[str, Any]], rollout_s: float, grading_s: float) -> None:
        """Add the rows of whole problems; they are on disk when this returns."""
        add_spent(self.spent, rows, rollout_s, grading_s)
        path = self.folder / SAMPLES
        with _writing(path), path.open("a", encoding="utf-8", errors="backslashreplace") as out:
            out.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            out.flush()
            os.fsync(out.fileno())
        self._write_config()

    def finish(self, summary: Mapping[str, Any], report: str) -> None:
        """Write the summary and the report."""
        replace(self.folder / SUMMARY, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
        replace(self.folder / REPORT, report)

    def _read(self) -> dict[str, list[dict[str, Any]]]:
        config = self.folder / CONFIG
        if not config.exists():
            return {}
        try:
            held = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(f"{config} cannot be read ({error}); remove the folder to evaluate again.") from error
        key = held.get("key") if isinstance(held, dict) else None
        if key != self.key:
            raise DataError(f"{self.folder} holds another evaluation (key {key}, not {self.key}); choose another output.")
        self.spent |= {k: v for k, v in (held.get("spent") or {}).items() if k in self.spent and isinstance(v, int | float)}
        found: dict[str, list[dict[str, Any]]] = {}
        for row in rows_of(self.folder / SAMPLES):
            found.setdefault(row["id"], []).append(row)
        return {name: rows for name, rows in found.items() if [row["sample"] for row in rows] == list(range(self.n))}

    def _write_all(self, done: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Start from what is whole: what was being written when the process was killed is dropped."""
        for name in (SUMMARY, REPORT):
            (self.folder / name).unlink(missing_ok=True)
        replace(self.folder / SAMPLES, "".join(json.dumps(row, ensure_ascii=False) + "\n" for rows in done.values() for row in rows))
        self._write_config()

    def _write_config(self) -> None:
        replace(self.folder / CONFIG, json.dumps({"key": self.key, **self.config, "spent": self.spent}, indent=1, default=str) + "\n")


def nothing_spent() -> dict[str, float]:
    """Seconds of sampling and of grading, and sampled tokens, over all sittings."""
    return {"rollout_s": 0.0, "grading_s": 0.0, "tokens": 0}


def add_spent(spent: dict[str, float], rows: Sequence[Mapping[str, Any]], rollout_s: float, grading_s: float) -> None:
    """Count what some rows took."""
    spent["rollout_s"] += rollout_s
    spent["grading_s"] += grading_s
    spent["tokens"] += sum(row["tokens"] for row in rows)


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a samples file; a last line that was cut short is passed over.

    Raises:
        DataError: another line is damaged; names it.
    """
    if not path.exists():
        return
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:
            if number == len(lines):  # no newline after it
                return
            raise DataError(f"{path}, line {number}: not valid JSON: {error}.") from error
        wrong = [name for name, kind in FIELDS.items() if not isinstance(row, dict) or not isinstance(row.get(name), kind)]
        if wrong:
            raise DataError(f"{path}, line {number}: no sample of an evaluation ({', '.join(wrong)}); remove the file to sample again.")
        yield row


def replace(path: Path, text: str) -> None:
    """Write ``path`` at once: it holds the old text or the new one, also after a crash."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with _writing(path):
        try:
            part.write_text(text, encoding="utf-8", errors="backslashreplace")
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises:
    DataError: in place of an OSError of the block, such as a full disk.
    """
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}. What was there before is kept; the same call goes on.") from error


def folder_name(text: str) -> str:
    """A model's or a set's name as a folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "unnamed"
