"""Whether a micro-batch's activations fit beside a rank's states on its GPU: what ``gradient_checkpointing: None`` leaves to decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlkit.config import TrainSpec
from rlkit.footprint import layer_numbers, model_states
from rlkit.zero.ds_config import CHUNK_BYTES, precision

MARGIN = 0.92  # of the free memory that may be planned with; the rest is for fragments, NCCL and libraries


@dataclass(frozen=True)
class Shape:
    """What the activations of a decoder layer follow from."""

    layers: int
    hidden: int
    heads: int  # query and output width, heads x head_dim
    kv: int  # key width
    mlp: int  # width of the gated MLP
    vocab: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a transformers config; a number that it lacks is taken as the usual multiple of the hidden size."""
        hidden = int(config.hidden_size)
        heads = int(config.num_attention_heads)
        dim = int(getattr(config, "head_dim", None) or hidden // heads)
        kv = int(getattr(config, "num_key_value_heads", None) or heads)
        mlp = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        return cls(int(config.num_hidden_layers), hidden, heads * dim, kv * dim, mlp, int(config.vocab_size))


def activation_bytes(shape: Shape, spec: TrainSpec, kernels: str, checkpointing: bool) -> float:
    """Bytes that one micro-batch keeps for its backward pass at the most, with its chunk of logits.

    Those of `layer_numbers`, in numbers of 2 bytes. Plain kernels also keep the norms' fp32 copies (two of 2 h each a norm), both rotated
    halves and the activated gate.
    """
    tokens, width = spec.micro_batch_tokens, 2.0 if precision(spec) == "bfloat16" else 4.0
    lean = layer_numbers(shape.hidden, shape.heads, shape.kv, shape.mlp)
    layer = lean + (8 * shape.hidden + 2 * shape.heads + 2 * shape.kv + shape.mlp if kernels == "plain" else 0)
    kept = shape.layers * shape.hidden + 2 * layer if checkpointing else shape.layers * layer + layer  # one more: its gradients
    logits = min(CHUNK_BYTES, width * tokens * shape.vocab) if spec.logits_chunk is None else width * spec.logits_chunk * shape.vocab
    return width * tokens * kept + logits + 4.0 * shape.vocab * shape.hidden  # and the head's gradient in fp32


def state_bytes(params: int, trained: int, spec: TrainSpec) -> float:
    """Bytes of parameters, gradients and optimizer states that will lie on this rank's GPU."""
    states = model_states(params, spec, trained)
    total = states.total
    if spec.offload_optimizer and spec.zero_stage > 0:
        total -= states.optimizer
    if spec.offload_param:
        total -= states.parameters
    return total + 2.0 * trained / (spec.world if spec.zero_stage >= 3 else 1)  # a backward pass's own gradients, before they are added


def checkpointing_needed(config: Any, spec: TrainSpec, params: int, trained: int, kernels: str, free: int) -> tuple[bool, str]:
    """(whether activations must be recomputed for ``free`` bytes, why, for the learner's info)."""
    states = state_bytes(params, trained, spec)
    wanted = activation_bytes(Shape.of(config), spec, kernels, checkpointing=False)
    room = MARGIN * free - states
    needed = wanted > room
    gib = 2.0**30
    return needed, (
        f"{'on' if needed else 'off'}: activations of {spec.micro_batch_tokens} tokens take about {wanted / gib:.1f} GiB, "
        f"{max(0.0, room) / gib:.1f} GiB are left of {free / gib:.1f} free beside {states / gib:.1f} of states"
    )
