"""Models of real sizes with random weights, written as transformers directories: speed does not depend on what a model has learnt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {  # SmolLM2-135M
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
    },
    "1.5b": {  # Qwen2.5-1.5B
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
    },
    "7b": {  # Llama-2-7B
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    },
    "tiny": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "vocab_size": 512,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
    },
}


SHARD_BYTES = 2e9


def write(name: str, folder: Path, context: int = 8192) -> Path:
    """A model of shape ``name`` in ``folder``: bfloat16 weights in shards of at most 2 GB, and the bundled tiny model's tokenizer.

    Weights are normal with standard deviation 0.02, norms are 1, biases 0.
    """
    import torch
    from accelerate import init_empty_weights
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlkit.models import resolve

    folder.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name] | {"max_position_embeddings": context, "dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(shape, indent=1))
    for file in Path(resolve("tiny").path).iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy(file, folder / file.name)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    device = "cuda" if torch.cuda.is_available() else "cpu"  # 7e9 normal numbers take minutes on a CPU
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    total = size = 0

    def flush() -> None:
        nonlocal shard, size
        file = f"model-{len(set(where.values())):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, file))
        shard, size = {}, 0

    for key, p in model.named_parameters():
        if key == "lm_head.weight" and shape["tie_word_embeddings"]:
            continue
        if p.dim() == 1:
            value = torch.zeros(p.shape) if key.endswith("bias") else torch.ones(p.shape)
        else:
            value = torch.empty(p.shape, device=device, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        if size + value.numel() * 2 > SHARD_BYTES:
            flush()
        shard[key] = value.to("cpu", torch.bfloat16)
        size += value.numel() * 2
        total += value.numel() * 2
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    return folder


def parameters(name: str) -> int:
    """Parameters, the tied embedding counted once."""
    s = SHAPES[name]
    h, kv = s["hidden_size"], s["num_key_value_heads"] * (s["hidden_size"] // s["num_attention_heads"])
    bias = h + 2 * kv if s["model_type"] == "qwen2" else 0
    layer = 2 * h * h + 2 * h * kv + bias + 3 * h * s["intermediate_size"] + 2 * h
    return s["num_hidden_layers"] * layer + h + s["vocab_size"] * h * (1 if s["tie_word_embeddings"] else 2)


def kv_bytes(name: str) -> int:
    """Bytes of key-value cache a token, bfloat16."""
    s = SHAPES[name]
    return 2 * s["num_hidden_layers"] * s["num_key_value_heads"] * (s["hidden_size"] // s["num_attention_heads"]) * 2
