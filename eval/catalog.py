"""The sets of the evaluation: their names, where they lie here, and how the public ones are fetched.

A set is looked for as ``<name>/<split>.jsonl`` in ``data_dir``, among the sets that rlkit ships, and in ``$RLKIT_HOME/data``, in this
order. `fetch` (``rlkit data get``) fills the last from the Hugging Face hub. The sets themselves are one table, `rlkit.formats.SETS`,
whose module says how to add one; a set for which no copy on the hub is known is used all the same once its file lies in its place.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from rlkit.errors import DataError, nearest
from rlkit.formats import SETS, Format, Hub, read_row
from rlkit.taskfiles import SUFFIXES, cache, cached, file_rows, given, how_to_get, places, shipped, split_files

LISTING_TIMEOUT_S = 8.0  # for the first answer of the hub, name look-up included
_CONVERTED = "refs/convert/parquet"  # the branch in which the hub keeps a Parquet copy of every public set: <config>/<split>/0000.parquet

T = TypeVar("T")


# --- names -------------------------------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """Every set that the evaluation knows: the public ones, then those that rlkit ships."""
    return [*SETS, *(name for name in _folders(shipped()) if name not in SETS)]


def resolve(text: str, split: str = "test", data_dir: str | Path | None = None) -> list[str]:
    """The sets that a comma-separated list names, each once, in order. "all" stands for the public sets whose split is found here.

    A path or a hub id among them, which `rlkit.load_tasks` takes too, stays as it is.

    Raises:
        DataError: a name is unknown (the nearest one is named), nothing is named, or "all" finds none.
    """
    known = dict.fromkeys([*names(), *_folders([*given(data_dir), *cached()])])
    found: dict[str, None] = {}
    for name in (part.strip() for part in text.split(",")):
        if name == "all":
            found.update(dict.fromkeys(_here(split, data_dir)))
        elif name in known or "/" in name or name.endswith(SUFFIXES):
            found[name] = None
        elif name:
            raise DataError(f"There is no set {name!r}{nearest(name, [*known, 'all']) or '.'} Known: {', '.join(known)}; or all.")
    if not found:
        raise DataError(f"{text!r} names no set. Give names with commas between them, such as gsm8k,math500, or all.")
    return list(found)


def _here(split: str, data_dir: str | Path | None) -> list[str]:
    here = [name for name in SETS if locate(name, split, data_dir=data_dir)]
    if not here:
        looked = ", ".join(str(p) for p in [*given(data_dir), cache()])
        raise DataError(
            f"'all' means the public sets whose split {split!r} is here, and none is (looked in {looked}). Fetch some, such as "
            f"rlkit data get gsm8k math500 --split {split}, or say data_dir=DIR."
        )
    return here


# --- places ------------------------------------------------------------------------------------------------------------------------------


def locate(name: str, split: str = "test", *, data_dir: str | Path | None = None) -> Path | None:
    """The file of a split that `rlkit.load_tasks` would read, or None when it is not here.

    Raises:
        DataError: ``data_dir`` is no folder.
    """
    for root in places(data_dir):
        file = split_files(root / name).get(split)
        if file is not None:
            return file
    return None


@dataclass(frozen=True)
class Entry:
    """A line of ``rlkit data list``. ``file`` and ``rows`` are None when the split is not here, ``hub`` when no copy is known."""

    name: str
    file: Path | None
    rows: int | None
    hub: str | None

    @property
    def is_shipped(self) -> bool:
        return self.file is not None and any(self.file.is_relative_to(root) for root in shipped())


def entries(split: str = "test", *, data_dir: str | Path | None = None) -> list[Entry]:
    """Every set of `names`, with the number of rows of ``split`` where it is here.

    Raises:
        DataError: ``data_dir`` is no folder, or a file that is here cannot be read.
    """
    found = []
    for name in names():
        file = locate(name, split, data_dir=data_dir)
        hub = SETS[name].hub if name in SETS else None
        found.append(Entry(name, file, None if file is None else sum(1 for _ in file_rows(file)), None if hub is None else str(hub)))
    return found


def _folders(roots: Iterable[Path]) -> list[str]:
    return sorted({p.name for root in roots for p in root.iterdir() if p.is_dir() and split_files(p)})


# --- fetching ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fetched:
    """A split that lies at ``path`` now. ``new`` is False when it did before."""

    path: Path
    rows: int
    new: bool


def fetchable(wanted: Iterable[str], split: str = "test", *, data_dir: str | Path | None = None) -> list[str]:
    """Those of the sets that are public and have a copy of ``split`` on the hub, or a file in their place already: all, or an error.

    Raises:
        DataError: a name is unknown, ships with rlkit, or has no known copy and no file.
    """
    wanted = list(dict.fromkeys(wanted))
    for name in wanted:
        if name not in SETS:
            if name in names():
                raise DataError(f"The set {name!r} ships with rlkit; there is nothing to fetch.")
            raise DataError(f"There is no public set {name!r}{nearest(name, SETS) or '.'} Known: {', '.join(SETS)}.")
        hub = SETS[name].hub
        if (hub is None or split not in hub.splits) and not _target(name, split, data_dir).is_file():
            raise DataError(f"The set {name!r} cannot be fetched. {how_to_get(name, split)}")
    return wanted


def fetch(name: str, split: str = "test", *, data_dir: str | Path | None = None, force: bool = False) -> Fetched:
    """Write a split of a public set to ``<name>/<split>.jsonl`` in ``data_dir``, or in ``$RLKIT_HOME/data``.

    Every row is read with the set's format first; a file that is there is replaced at once and only by one that is whole.

    Args:
        force: fetch it even when the file is there.

    Raises:
        DataError: the set is unknown or has no known copy; the hub cannot be reached or does not give it; a row cannot be read.
    """
    fetchable([name], split, data_dir=data_dir)
    public, target = SETS[name], _target(name, split, data_dir)
    if target.is_file() and not force:
        try:
            return Fetched(target, len([read_row(row, public.form, where) for row, where in file_rows(target)]), False)
        except DataError as error:
            raise DataError(f"The file that is there cannot be used: {error} Fetch it anew with --force, or remove it.") from error
    if public.hub is None or split not in public.hub.splits:
        raise DataError(f"The set {name!r} cannot be fetched. {how_to_get(name, split)}")
    with tempfile.TemporaryDirectory(prefix="rlkit-data-") as folder:
        try:
            files = [file for each in public.hub.splits[split] for file in download(public.hub, each, Path(folder))]
        except DataError as error:
            raise DataError(f"{error} A file made by hand may be put at {target}: one JSON object a line; see {public.homepage}") from error
        rows = (row for file in files for row, _ in file_rows(file))
        return Fetched(target, _write(rows, public.form, public.hub, target), True)


def _target(name: str, split: str, data_dir: str | Path | None) -> Path:
    root = cache() if data_dir is None else Path(data_dir).expanduser()
    return root / name / f"{split}.jsonl"


def _write(rows: Iterator[dict[str, Any]], form: Format, hub: Hub, target: Path) -> int:
    """Write rows as they came, once each has been read as it will be; returns how many.

    Raises:
        DataError: a row cannot be read, there is none, or the folder cannot be written.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    count = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as out:
            for number, row in enumerate(rows, 1):
                if hub.skip is not None and hub.skip(row):
                    continue
                line = _as_json(row, f"{hub}, row {number}")
                read_row(json.loads(line), form, f"{hub}, row {number}")
                out.write(line + "\n")
                count += 1
        if not count:
            raise DataError(f"{hub} gave no rows.")
        os.replace(part, target)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return count


def _as_json(row: Mapping[str, Any], where: str) -> str:
    try:
        return json.dumps(row, ensure_ascii=False)
    except TypeError as error:
        raise DataError(f"{where}: it cannot be written as JSON: {error}") from error


# --- the hub -----------------------------------------------------------------------------------------------------------------------------


def download(hub: Hub, split: str, folder: Path) -> list[Path]:
    """The Parquet or JSONL files of a split on the hub (``$HF_ENDPOINT``), copied to ``folder``.

    Raises:
        DataError: the hub cannot be reached, refuses, or has no such files.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    api = HfApi(endpoint=endpoint)
    try:
        revision, files = _files_on_hub(api, hub, split)
        got = [api.hf_hub_download(hub.id, f, repo_type="dataset", revision=revision, local_dir=folder / split) for f in files]
    except LocalEntryNotFoundError as error:
        raise DataError(_unreachable(endpoint, hub, error.__cause__ or error)) from error
    except HfHubHTTPError as error:
        raise DataError(f"{endpoint} does not give {hub}: {_first_line(error).rstrip('.')}.") from error
    except (HTTPError, OSError) as error:  # a time-out and HF_HUB_OFFLINE are OSErrors
        raise DataError(_unreachable(endpoint, hub, error)) from error
    return [Path(path) for path in got]


def _files_on_hub(api: Any, hub: Hub, split: str) -> tuple[str | None, list[str]]:
    """Revision and files of a split: of the main branch, else of the hub's own Parquet copy."""
    from huggingface_hub.errors import RevisionNotFoundError

    info = _within(LISTING_TIMEOUT_S, lambda: api.dataset_info(hub.id, timeout=LISTING_TIMEOUT_S))
    files = pick([f.rfilename for f in info.siblings or ()], hub.config, split)
    if files:
        return info.sha, files
    with suppress(RevisionNotFoundError):
        info = _within(LISTING_TIMEOUT_S, lambda: api.dataset_info(hub.id, revision=_CONVERTED, timeout=LISTING_TIMEOUT_S))
        files = pick([f.rfilename for f in info.siblings or ()], hub.config or "default", split)
    if not files:
        raise DataError(f"{hub} on the hub has no {' or '.join(SUFFIXES)} file of its split {split!r}.")
    return info.sha, files


def pick(files: Iterable[str], config: str | None, split: str) -> list[str]:
    """The files of a split, in order, among all of a repository; none when it is unclear which those are.

    They are called ``test.jsonl`` or ``test-00000-of-00001.parquet``, or are numbered in a folder ``test``. With a ``config``, only
    files below a folder of its name count. Parquet goes before JSONL.
    """
    groups: dict[PurePosixPath, dict[str, list[str]]] = {}
    for name in sorted(files):
        path = PurePosixPath(name)
        is_named = re.fullmatch(rf"{re.escape(split)}(-\d+-of-\d+(-\w+)?)?", path.stem)
        is_numbered = path.parent.name == split and path.stem.isdigit()
        if path.suffix in SUFFIXES and (is_named or is_numbered) and (config is None or config in path.parts[:-1]):
            groups.setdefault(path.parent, {}).setdefault(path.suffix, []).append(name)
    if len(groups) != 1:
        return []
    (by_suffix,) = groups.values()
    return by_suffix.get(".parquet") or by_suffix[".jsonl"]


def _within(seconds: float, call: Callable[[], T]) -> T:
    """What ``call`` returns, or raises. It goes on by itself when it takes longer: a name look-up knows no time limit.

    Raises:
        TimeoutError: it took longer.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again by result()
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="rlkit-hub").start()
    try:
        return result.result(seconds)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {seconds:.0f} s") from error


def _unreachable(endpoint: str, hub: Hub, error: BaseException) -> str:
    return f"{endpoint} cannot be reached for {hub} ({_first_line(error).rstrip('.')}): is there no network?"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
