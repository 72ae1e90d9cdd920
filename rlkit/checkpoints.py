"""Where a run's checkpoints lie, which one is the newest, and how many are kept. What is in one is `rlkit.zero.checkpoint`'s matter."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from rlkit.errors import ConfigError, RlkitError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STEP = re.compile(r"step-(\d{6,})")


def check_name(name: str) -> str:
    """A run's name becomes a folder and a Ray namespace: letters, digits, ``.``, ``_``, ``-``, not starting with a sign.

    Raises:
        ConfigError: anything else.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"A run's name is 1 to 100 letters, digits, '.', '_' or '-', starting with a letter or digit; got {name!r}.")
    return name


def storage_of(cluster: Any, name: str) -> str:
    """The run's folder as a path for the recorder. A relative ``storage`` is taken from the notebook's folder when the notebook runs on
    the cluster, and from the home folder of the recorder's node when it is connected from outside (``ray://``)."""
    storage = Path(cluster.spec.storage).expanduser()
    if cluster.via == "driver":
        storage = storage.resolve()
    return str(storage / name)


def path_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:06d}"


def found(folder: Path) -> list[int]:
    """Steps that have a checkpoint folder, ascending. Unfinished ones have another name and do not count."""
    root = folder / "checkpoints"
    matches = [_STEP.fullmatch(p.name) for p in root.iterdir()] if root.is_dir() else []
    return sorted(int(m.group(1)) for m in matches if m)


def verify(folder: Path, step: int) -> str | None:
    """What is wrong with a checkpoint, or None when its sizes and hashes are right."""
    from rlkit.zero import checkpoint

    try:
        checkpoint.verify(path_of(folder, step))
    except RlkitError as error:
        return str(error)
    return None


def prune(folder: Path, keep: int) -> list[int]:
    """Remove all but the newest ``keep`` checkpoints; returns the steps removed. ``keep`` 0 keeps all."""
    old = found(folder)[:-keep] if keep > 0 else []
    for step in old:
        shutil.rmtree(path_of(folder, step))
    return old
