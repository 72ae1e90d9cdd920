"""Which kernels an update takes, that compiled layers change nothing, and when activations are recomputed."""

import numpy as np
import pytest
import torch

from rlkit.config import TrainSpec
from rlkit.errors import ConfigError
from rlkit.zero import attention, kernels, layout, memory, policy

GIB = 2**30


def qwen(**changes):
    from transformers import Qwen2Config

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 64}
    return Qwen2Config(**(sizes | {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True} | changes))


def test_what_auto_means():
    assert kernels.choose(TrainSpec()) == "plain"
    assert kernels.choose(TrainSpec(gpus_per_rank=1)) == "compile"
    assert kernels.choose(TrainSpec(gpus_per_rank=1, kernels="plain")) == "plain"


def test_kernels_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    assert kernels.choose(TrainSpec(gpus_per_rank=1, zero_stage=3)) == "plain"
    with pytest.raises(ConfigError, match="pip install liger-kernel"):
        kernels.choose(TrainSpec(gpus_per_rank=1, kernels="liger"))


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True])
def test_compiled_layers_give_the_same_log_probs_and_gradients(recompute):
    from transformers import Qwen2ForCausalLM

    found = []
    for kind in ("plain", "compile"):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(qwen(num_hidden_layers=1))
        attention.use(model, gpu=False)
        policy.no_dropout(model)
        # The traced graph is run as it is: what a code generator makes of it is not at stake.
        assert kernels.apply(model, kind, backend="aot_eager") == ({"layers": 1} if kind == "compile" else {})
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        rows = [np.arange(1, n) for n in (9, 5, 12)]
        for part in (rows[:2], rows):  # other lengths, as micro-batches have
            inputs = layout.varlen(part, np.full(len(part), 2)).to(torch.device("cpu"))
            logprobs, entropy = policy.token_logprobs(model, *inputs)
            model.zero_grad()
            (logprobs.sum() + entropy.sum()).backward()
        found.append([logprobs.detach(), *[p.grad for p in model.parameters()]])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_activations_of_a_layer_are_counted_tensor_by_tensor():
    shape = memory.Shape.of(qwen())
    assert shape == memory.Shape(layers=2, hidden=16, heads=16, kv=8, mlp=24, vocab=32)
    spec = TrainSpec(gpus_per_rank=1, micro_batch_tokens=10)
    # Inputs of the linear maps 2 x 16 + 16 + 24, query 16, key and value 16, attention output counted above as an input, norms 2 x 16,
    # gate and up 48, the attention's own output 16: 200 numbers of 2 bytes a token.
    layer = 2 * 16 + 2 * 16 + 24 + 16 + 2 * 8 + 2 * 16 + 2 * 24
    head = 2 * 10 * 32 + 4 * 32 * 16
    assert memory.activation_bytes(shape, spec, "liger", checkpointing=False) == 2 * 10 * 3 * layer + head
    assert memory.activation_bytes(shape, spec, "liger", checkpointing=True) == 2 * 10 * (2 * 16 + 2 * layer) + head
    assert memory.activation_bytes(shape, spec, "plain", False) > memory.activation_bytes(shape, spec, "liger", False)


def test_checkpointing_follows_from_the_free_memory():
    config = qwen(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12)
    config.num_key_value_heads = 2
    params = 1_543_000_000
    spec = TrainSpec(gpus_per_rank=1, zero_stage=2)
    # bf16: 2 + 4 + 12 bytes a parameter (the table in placement), and 2 more for a backward pass's own gradients.
    assert memory.state_bytes(params, params, spec) == 20.0 * params
    offloaded = spec.but(offload_optimizer=True)
    assert memory.state_bytes(params, params, offloaded) == 8.0 * params
    needed, why = memory.checkpointing_needed(config, spec, params, params, "liger", 139 * GIB)
    assert not needed
    assert why.startswith("off: activations of 16384 tokens take about")
    needed, why = memory.checkpointing_needed(config, spec, params, params, "liger", 40 * GIB)
    assert needed
    assert why.startswith("on: ")
    assert memory.checkpointing_needed(config, spec.but(micro_batch_tokens=2048), params, params, "liger", 48 * GIB)[0] is False
