"""The learner's checkpoints: one directory with the trained fp32 parameters and Adam's moments, whole, and a manifest.

The files do not depend on the number of ranks or the ZeRO stage they were written with. They are safetensors and JSON: nothing in them
is executed when they are read. The manifest lists each file's size and SHA-256. A directory is written under another name and renamed
when all of it is on the disk, so a checkpoint that can be seen is complete.

Random numbers: the learner draws none that it would have to restore. Mini-batches and the seeds of losses are functions of (seed,
policy version, optimizer step, rank), all of which are in the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from rlkit.zero.engine import Engine
    from rlkit.zero.peers import Peers

FORMAT = "rlkit-learner-1"
MANIFEST = "manifest.json"
FILE_ELEMENTS = 1 << 24  # parameters in one file; with two moments 192 MiB


def verify(directory: str | Path) -> dict[str, Any]:
    """The manifest, after every file's size and SHA-256 were compared with it.

    Raises:
        CheckpointError: no checkpoint there, a file that is missing, cut short or changed, or another format.
    """
    directory = Path(directory)
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory} is not a checkpoint of a learner: it has no {MANIFEST}.")
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path} is cut short or damaged: {error}. Use an older checkpoint.") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{directory} has format {manifest.get('format')!r}; this version of rlkit reads {FORMAT!r}.")
    for name, fact in manifest["files"].items():
        file = directory / name
        if not file.is_file():
            raise CheckpointError(f"{directory} is incomplete: {name} is missing. Use an older checkpoint.")
        size = file.stat().st_size
        if size != fact["bytes"]:
            raise CheckpointError(f"{file} was cut short: it has {size} bytes, the manifest says {fact['bytes']}. Use an older checkpoint.")
        if _sha256(file) != fact["sha256"]:
            raise CheckpointError(f"{file} has changed since it was written (SHA-256 differs). Use an older checkpoint.")
    return manifest


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new directory that takes the place of ``target`` when the block ends well, and is removed when it does not.

    Raises:
        CheckpointError: the disk is full or cannot be written; ``target`` is as it was.
    """
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _sync(temporary)
        old = None
        if target.exists():
            old = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.old"
            target.rename(old)
        temporary.rename(target)
        _sync_directory(target.parent)
        if old is not None:
            shutil.rmtree(old)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error.strerror or error}. What was there before is unchanged and training can go on; "
            "free some space or choose another directory."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save(engine: Engine, peers: Peers, target: Path, facts: dict[str, Any]) -> None:
    """Write a checkpoint. Collective; rank 0 writes, one file's worth of whole parameters at a time.

    Raises:
        CheckpointError: the disk is full or cannot be written; ``target`` is as it was, and so is the engine.
    """
    from rlkit.zero.peers import Guard

    guard = Guard(f"Writing {target}", CheckpointError)
    chunks = _chunks(engine)
    if peers.rank == 0:
        with guard, replacing(target) as folder:
            shapes: dict[str, list[int]] = {}
            files: dict[str, dict[str, Any]] = {}
            for number, tensors in enumerate(chunks):
                name = f"state-{number:05d}.safetensors"
                files[name] = _write(folder / name, tensors)
                shapes |= {n.removeprefix("param/"): list(t.shape) for n, t in tensors.items() if n.startswith("param/")}
            manifest = facts | {"format": FORMAT, "moments": engine.has_moments(), "shapes": shapes, "files": files}
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for _ in chunks:  # what is left after an error, and all of it on the other ranks: gathering needs every rank
        pass
    peers.agree(guard)


def load(engine: Engine, peers: Peers, source: Path) -> dict[str, Any]:
    """Read a checkpoint into the engine, whatever its ranks and stage. Collective. Returns the manifest.

    Raises:
        CheckpointError: as `verify`, or the checkpoint is of another architecture. The engine is as it was.
    """
    from safetensors import safe_open

    from rlkit.zero.engine import MOMENTS, shape_of
    from rlkit.zero.peers import Guard

    guard = Guard(f"Reading {source}", CheckpointError)
    manifest: dict[str, Any] = {}
    with guard:
        # Rank 0 reads everything once to check it; the others trust what it found.
        manifest = verify(source) if peers.rank == 0 else json.loads((source / MANIFEST).read_bytes())
        _same_model({n: list(shape_of(p)) for n, p in engine.trainable()}, manifest["shapes"], source)
    peers.agree(guard)
    engine.discard()
    engine.clear_moments()
    if manifest["moments"]:
        engine.make_moments(int(manifest["steps"]))
    where: dict[str, str] = {}
    for name in manifest["files"]:
        with safe_open(source / name, framework="pt") as file:
            where |= dict.fromkeys(file.keys(), name)
    for name, parameter in engine.trainable():
        with safe_open(source / where[f"param/{name}"], framework="pt") as file:
            engine.write(parameter, file.get_tensor(f"param/{name}"))
            for moment in MOMENTS if manifest["moments"] else ():
                engine.write(parameter, file.get_tensor(f"{moment}/{name}"), moment)
    return manifest


def _chunks(engine: Engine) -> Iterator[dict[str, torch.Tensor]]:
    """Whole parameters and moments on CPU, a file's worth at a time. Collective."""
    from rlkit.zero.engine import MOMENTS

    moments = MOMENTS if engine.has_moments() else ()
    out: dict[str, torch.Tensor] = {}
    size = 0
    for name, parameter in engine.trainable():
        out[f"param/{name}"] = engine.read(parameter).contiguous()
        for moment in moments:
            out[f"{moment}/{name}"] = engine.read(parameter, moment).contiguous()
        size += out[f"param/{name}"].numel()
        if size >= FILE_ELEMENTS:
            yield out
            out, size = {}, 0
    if out:
        yield out


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    from safetensors.torch import save

    data = save(tensors)
    path.write_bytes(data)
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _same_model(mine: dict[str, list[int]], saved: dict[str, list[int]], source: Path) -> None:
    if mine == saved:
        return
    odd = next(n for n in [*mine, *saved] if mine.get(n) != saved.get(n))
    raise CheckpointError(
        f"{source} is of another model: {odd} is {saved.get(odd, 'missing')} there and {mine.get(odd, 'missing')} in the learner "
        f"({len(saved)} and {len(mine)} trained parameters). Start the learner with the model and LoRA settings of the checkpoint."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    _sync_directory(folder)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
