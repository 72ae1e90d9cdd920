"""Rollout engines: one protocol (`base.Engine`), served by vLLM (`vllm`) or by a plain transformers loop (`hf`)."""

from __future__ import annotations

from typing import Any


def engine_class(kind: str) -> type[Any]:
    """The actor class of ``"vllm"`` or ``"hf"``. Neither imports vLLM or a model before `Engine.start`."""
    if kind == "hf":
        from rlkit.engines.hf import HfEngine

        return HfEngine
    from rlkit.engines.vllm import VllmEngine

    return VllmEngine
