"""The learner's weights under their Hugging Face names: for the rollout engines, and as a directory that transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from rlkit.zero.engine import GATHER_ELEMENTS, Engine


def hf_items(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, whole tensor) of every weight, tied ones once, LoRA merged. Collective: every rank runs through all of it.

    Under ZeRO-3 parameters are gathered in groups of at most 64M elements (or one parameter), and what is yielded is a copy.
    """
    adapted = _lora_layers(engine)
    group: list[tuple[str, torch.nn.Parameter]] = []
    size = 0
    named = [(n, p) for n, p in engine.model.named_parameters() if ".lora_" not in n]
    for name, parameter in named:
        numel = getattr(parameter, "ds_numel", parameter.numel())
        if group and size + numel > GATHER_ELEMENTS:
            yield from _whole_group(engine, group, adapted)
            group, size = [], 0
        group.append((name, parameter))
        size += numel
    yield from _whole_group(engine, group, adapted)


def _whole_group(
    engine: Engine, group: list[tuple[str, torch.nn.Parameter]], adapted: dict[str, torch.nn.Module]
) -> Iterator[tuple[str, torch.Tensor]]:
    layers = [adapted[n] for n, _ in group if n in adapted]
    with engine.whole([p for _, p in group] + [q for layer in layers for n, q in layer.named_parameters() if "lora_" in n]):
        out = []
        for name, parameter in group:
            weight = parameter.detach()
            if name in adapted:
                delta = adapted[name].get_delta_weight("default").detach()  # type: ignore[operator]
                weight = (weight.float() + delta.float()).to(weight.dtype)
            elif engine.stage == 3:
                weight = weight.clone()
            out.append((name.replace(".base_layer.", "."), weight))
    yield from out


def _lora_layers(engine: Engine) -> dict[str, torch.nn.Module]:
    """Name of a merged weight -> its LoRA layer."""
    if not engine.lora:
        return {}
    from peft.tuners.lora import LoraLayer

    return {f"{name}.base_layer.weight": module for name, module in engine.model.named_modules() if isinstance(module, LoraLayer)}


def write_hf(engine: Engine, source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write ``tensors`` with config and tokenizer of ``source`` into ``target`` (which must exist), as transformers loads it.

    Raises:
        OSError: the disk is full, or the directory cannot be written.
    """
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict({n: t.contiguous() for n, t in tensors.items()}, str(target), metadata={"format": "pt"})
    for file in sorted(source.iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth") or file.name.endswith(".index.json")
        if file.is_file() and not weights:
            shutil.copy2(file, target / file.name)
    config = json.loads((target / "config.json").read_text())
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    config |= {key: dtype for key in ("dtype", "torch_dtype") if key in config}
    config.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
