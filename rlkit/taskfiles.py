"""Where a task set's rows are: a set by name, a file, a folder, the Hugging Face hub. Reads rows, knows nothing of prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.errors import DataError, nearest
from rlkit.formats import FORMATS, SETS, Format, of_hub_id

SUFFIXES = (".jsonl", ".parquet")
_SPLITS = ("train", "test", "validation", "dev")  # file names that say a split and not a set
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")

Rows = Iterator[tuple[dict[str, Any], str]]  # (row, where it stands)


@dataclass(frozen=True)
class Source:
    """A set that was found: its name and split, the known format of its rows, and how to read them."""

    name: str
    split: str
    form: Format
    rows: Callable[[], Rows]


def find(name_or_path: str | Path, split: str, data_dir: str | Path | None) -> Source:
    """Look for a set; see `rlkit.load_tasks` for what may be given.

    Raises:
        DataError: it is not there; the message names the nearest known name, the file or the splits that exist.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    roots = places(data_dir)
    if _NAME.fullmatch(text):
        folders = [root / text for root in roots if (root / text).is_dir()]
        if folders:
            return _in_folder(next((f for f in folders if split in split_files(f)), folders[0]), split)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path} is neither JSONL nor Parquet: its name should end with {' or '.join(SUFFIXES)}.")
        return _in_file(path, split)
    if path.is_dir():
        return _in_folder(path.resolve(), split)
    if path.suffix in SUFFIXES:
        raise DataError(f"There is no file {path}.")
    if _HUB_ID.fullmatch(text) and len(path.parts) == 2:
        return Source(text, split, of_hub_id(text), lambda: _hub_rows(text, split))
    if text in SETS:
        raise DataError(f"The public set {text!r} is not shipped with rlkit, and not here. {how_to_get(text, split)}")
    known = sorted({folder.name for root in roots for folder in root.iterdir() if folder.is_dir()})
    raise DataError(
        f"There is no task set {text!r}{nearest(text, [*known, *FORMATS]) or '.'} Sets here: {', '.join(known)}. It may also be a .jsonl "
        f"or .parquet file, or a Hugging Face hub id such as openai/gsm8k:main."
    )


def places(data_dir: str | Path | None) -> list[Path]:
    """Where a set is looked for by name, in this order: ``data_dir``, the shipped sets, what was fetched.

    Raises:
        DataError: ``data_dir`` is no folder.
    """
    return [*given(data_dir), *shipped(), *cached()]


def given(data_dir: str | Path | None) -> list[Path]:
    """``data_dir``, when there is one.

    Raises:
        DataError: it is no folder.
    """
    if data_dir is None:
        return []
    path = Path(data_dir).expanduser()
    if not path.is_dir():
        raise DataError(f"data_dir {str(data_dir)!r} is no folder.")
    return [path]


def shipped() -> list[Path]:
    """The folder of the generated sets: ``eval/data`` of a checkout, ``rlkit/eval/data`` when installed from a wheel."""
    package = Path(__file__).resolve().parent
    return [p for p in (package / "eval" / "data", package.parent / "eval" / "data") if p.is_dir()][:1]


def cached() -> list[Path]:
    """The folder of what ``rlkit data get`` fetched, once there is one."""
    return [p for p in (cache(),) if p.is_dir()]


def cache() -> Path:
    """``$RLKIT_HOME/data``."""
    from rlkit.localhead import home

    return home() / "data"


def how_to_get(name: str, split: str) -> str:
    """What to do for a public set that is not here."""
    known = SETS[name]
    place = f"put its rows at DIR/{name}/{split}.jsonl and say data_dir=DIR, or at {cache() / name / f'{split}.jsonl'}"
    if known.hub is not None and split in known.hub.splits:
        return f"Fetch it (rlkit data get {name} --split {split}), or {place}."
    return f"No copy of its split {split!r} on the Hugging Face hub is known: {place}. It was published at {known.homepage}."


def split_files(folder: Path) -> dict[str, Path]:
    """The file of each split in a set's folder; JSONL before Parquet."""
    return {p.stem: p for suffix in reversed(SUFFIXES) for p in sorted(folder.glob(f"*{suffix}")) if not p.name.startswith(".")}


def _in_folder(folder: Path, split: str) -> Source:
    files = split_files(folder)
    if split not in files:
        there = f"it has {', '.join(sorted(files))}" if files else f"it holds no {' or '.join(SUFFIXES)} file"
        more = f" {how_to_get(folder.name, split)}" if folder.name in SETS else ""
        raise DataError(
            f"The task set {folder.name!r} in {folder.parent} has no split {split!r}{nearest(split, files) or ':'} {there}.{more}"
        )
    return Source(folder.name, split, FORMATS.get(folder.name, Format()), lambda: file_rows(files[split]))


def _in_file(path: Path, split: str) -> Source:
    name, said = (path.resolve().parent.name, path.stem) if path.stem in _SPLITS else (path.stem, split)
    return Source(name, said, Format(), lambda: file_rows(path))


def file_rows(path: Path) -> Rows:
    """The rows of a JSONL or Parquet file, one by one.

    Raises:
        DataError: a row is malformed; the message names file and line.
    """
    return _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)


def _jsonl_rows(path: Path) -> Rows:
    with path.open("rb") as f:
        for number, line in enumerate(f, 1):
            where = f"{path}, line {number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                row = json.loads(text)
            except (ValueError, RecursionError) as error:  # of both steps; nested too deep
                raise DataError(f"{where}: not valid JSON: {error}. Every line of a JSONL file is one JSON object.") from error
            if not isinstance(row, dict):
                raise DataError(f"{where}: a JSON {type(row).__name__} where an object with fields should be.")
            yield row, where


def _parquet_rows(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield row, f"{path}, row {number}"
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error


def _hub_rows(hub_id: str, split: str) -> Rows:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"Loading {hub_id!r} from the Hugging Face hub needs the package datasets: pip install datasets") from error
    repo, _, config = hub_id.partition(":")
    try:
        rows = datasets.load_dataset(repo, config or None, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{hub_id!r} is no file or folder here, and the Hugging Face hub gave no split {split!r} of it: {reason}"
        ) from error
    for number, row in enumerate(rows):
        yield dict(row), f"{hub_id} {split}, row {number}"
