"""A model's files on disk: are they complete, what do their headers say, have they changed. Loads nothing and imports no torch."""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from rlkit.errors import ModelError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_INDEX = "model.safetensors.index.json"
_WHOLE = 64 << 20  # bytes: smaller weight files are hashed whole
_PIECE = 4096  # bytes from the middle of each tensor of a larger one
_MAX_HEADER = 100 << 20  # the limit of the safetensors format


def check_folder(path: Path) -> None:
    """Whether a folder holds a whole model.

    Raises:
        ModelError: it does not exist, or lacks config, weights or tokenizer, or a weight file is missing or cut short; each is named.
    """
    if not path.is_dir():
        raise ModelError(f"There is no model folder {path}." if not path.exists() else f"{path} is a file; give the folder it is in.")
    model_config(path)
    for file in weight_files(path):
        read_header(file)
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise ModelError(
            f"{path} has no tokenizer ({', '.join(_TOKENIZERS[:3])} ...). Save it beside the model: "
            f"tokenizer.save_pretrained({str(path)!r})."
        )


def model_config(path: Path) -> dict[str, Any]:
    """config.json; of a model with several parts, its text part.

    Raises:
        ModelError: it is missing or not a JSON object.
    """
    config = read_json(path / "config.json", f"{path} has no config.json; a model folder holds config.json, *.safetensors and a tokenizer.")
    return {**config, **config["text_config"]} if isinstance(config.get("text_config"), dict) else config


def weight_files(path: Path) -> list[Path]:
    """The safetensors files, in order.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    if (path / _INDEX).is_file():
        index = read_json(path / _INDEX)
        if not isinstance(index.get("weight_map"), dict) or not index["weight_map"]:
            raise ModelError(f"{path / _INDEX} has no weight_map.")
        files = [path / name for name in sorted(set(index["weight_map"].values()))]
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise ModelError(f"{path} lacks {len(missing)} of {len(files)} weight files that {_INDEX} names: {', '.join(missing[:4])}.")
        return files
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    if any(any(path.glob(pattern)) for pattern in _PICKLED):
        raise ModelError(
            f"{path} has weights only as pickle files, which can run code when they are read. "
            f"Save the model again with model.save_pretrained(folder), which writes safetensors."
        )
    raise ModelError(f"{path} has no weights (*.safetensors).")


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> ``dtype``, ``shape``, ``data_offsets``. Reads the header and compares it with the file's size.

    Raises:
        ModelError: the file is damaged or cut short.
    """
    stat = file.stat()
    return _header(file, stat.st_mtime_ns, stat.st_size)[0]


def fingerprint(path: Path) -> str:
    """16 hex digits over all that decides what a model says: its configs, its tokenizer with the chat template, and its weight files.

    Weight files over 64 MiB are sampled: their header and 4 KiB from the middle of each tensor, so that even a large model takes
    well under a second, and a change to any one trained tensor shows.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in (*_text_files(path), *weight_files(path)):
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{_digest(file, stat.st_mtime_ns, stat.st_size)}\0".encode())
    return digest.hexdigest()


def _text_files(path: Path) -> list[Path]:
    """Configs, tokenizer and chat template, in a fixed order. The index of sharded weights says nothing that the weights do not."""
    found = [f for f in path.iterdir() if f.suffix in (".json", ".jinja", ".model", ".txt") and not f.name.endswith(".index.json")]
    return sorted(found, key=lambda f: f.name)


@functools.lru_cache(maxsize=1024)
def _digest(file: Path, mtime_ns: int, size: int) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as f:
        if size <= _WHOLE or file.suffix != ".safetensors":
            while block := f.read(1 << 20):
                digest.update(block)
            return digest.hexdigest()
        tensors, start = _header(file, mtime_ns, size)
        digest.update(f.read(start))
        for begin, end in sorted(tuple(t["data_offsets"]) for t in tensors.values()):
            f.seek(start + begin + max(0, (end - begin - _PIECE) // 2))
            digest.update(f.read(min(_PIECE, end - begin)))
    return digest.hexdigest()


@functools.lru_cache(maxsize=1024)
def _header(file: Path, mtime_ns: int, size: int) -> tuple[dict[str, dict[str, Any]], int]:
    """(tensors, offset of the data)."""
    with file.open("rb") as f:
        raw = f.read(8)
        length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else -1
        if not 0 < length <= min(_MAX_HEADER, size - 8):
            raise ModelError(f"{file} is no safetensors file, or is cut short ({size} bytes).")
        try:
            header = json.loads(f.read(length))
        except ValueError as error:
            raise ModelError(f"The header of {file} cannot be read: {error}") from error
    header.pop("__metadata__", None)
    end = 8 + length + max((int(t["data_offsets"][1]) for t in header.values()), default=0)
    if end != size:
        raise ModelError(f"{file} has {size} bytes where its header says {end}: it is damaged or cut short. Copy or download it again.")
    return header, 8 + length


def read_json(file: Path, missing: str = "") -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: with the text ``missing`` when there is no such file, else saying that it is damaged.
    """
    if not file.is_file():
        raise ModelError(missing or f"There is no file {file}.")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object.")
    return value
