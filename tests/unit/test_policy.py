"""Log-probs of padded and of packed samples against plain log_softmax and autograd, on a random head and on a random Qwen2."""

import numpy as np
import pytest
import torch

from rlkit.errors import ModelError
from rlkit.zero import attention, layout, policy
from rlkit.zero.ds_config import chunk_of
from rlkit.zero.logprobs import chunked_logprobs


def plain(hidden, weight, bias, targets, temperature):
    logp = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, dim=1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)


@pytest.mark.parametrize("chunk", [3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_value_and_gradient_equal_autograd(chunk, temperature):
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(s, dtype=torch.float64) for s in ((10, 5), (8, 5), (8,)))
    targets = torch.randint(0, 8, (10,))
    up = torch.randn(2, 10, dtype=torch.float64)
    grads = []
    for fn in (plain, lambda *a: chunked_logprobs(*a, chunk)):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        logprobs, entropy = fn(*leaves, targets, temperature)
        (up[0] * logprobs + up[1] * entropy).sum().backward()
        grads.append([logprobs.detach().double(), entropy.detach().double(), *[leaf.grad.double() for leaf in leaves]])
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_no_tokens_gives_zero_gradients():
    hidden, weight = torch.zeros(0, 5, requires_grad=True), torch.ones(8, 5, requires_grad=True)
    logprobs, _ = chunked_logprobs(hidden, weight, None, torch.zeros(0, dtype=torch.int64))
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert float(weight.grad.abs().sum()) == 0.0


def test_a_second_backward_pass_gives_the_same():
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 5, requires_grad=True), torch.randn(8, 5, requires_grad=True)
    logprobs, entropy = chunked_logprobs(hidden, weight, None, torch.arange(6))
    total = (logprobs * entropy).sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(total, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b)


def test_the_chunk_of_a_gpu_follows_from_the_vocabulary():
    assert chunk_of(100, 151936, True) == 100
    assert chunk_of(None, 151936, False) == 2048
    assert chunk_of(None, 151936, True) == 4096  # 1.25e9 / (2 x 151936) is 4113 tokens, in steps of 256
    assert chunk_of(None, 10**9, True) == 256


ROWS = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13]]
PROMPTS = [2, 1, 3]


def make(kind="qwen2", **changes):
    """Random, with grouped key-value heads; Qwen2's has biases."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config, cls = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[kind]
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.3}
    made = cls(config(**(sizes | heads | changes))).eval()
    with torch.no_grad():
        for name, p in made.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.3)
    return made


@pytest.fixture(scope="module")
def model():
    return make()


def arranged(how, rows=ROWS, prompts=PROMPTS):
    return how([np.array(r) for r in rows], np.array(prompts)).to(torch.device("cpu"))


def test_padded_rows_and_packed_rows_hold_the_same_predictions():
    ids, at, targets, *none = arranged(layout.padded)
    assert ids.tolist() == [[1, 2, 3, 4, 5], [7, 8, 0, 0, 0], [10, 11, 12, 0, 0]]
    assert at.tolist() == [1, 2, 3, 4, 5, 6, 12]
    assert targets.tolist() == [3, 4, 5, 6, 8, 9, 13]
    assert none == [None, None, 0]
    ids, at, targets, positions, cu_seqlens, max_len = arranged(layout.varlen)
    assert ids.tolist() == [[1, 2, 3, 4, 5, 7, 8, 10, 11, 12]]
    assert positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2]]
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, max_len) == ([0, 5, 7, 10], torch.int32, 5)
    assert at.tolist() == [1, 2, 3, 4, 5, 6, 9]
    assert targets.tolist() == [3, 4, 5, 6, 8, 9, 13]


def alone(model, temperature):
    """Log-probs and entropies of each row by itself, from full logits."""
    logprobs, entropies = [], []
    for row, p in zip(ROWS, PROMPTS, strict=True):
        logp = torch.log_softmax(model(torch.tensor([row])).logits[0] / temperature, dim=-1)[p - 1 : -1]
        logprobs.append(logp.gather(1, torch.tensor(row[p:])[:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model, logprobs, entropy):
    model.zero_grad()
    weights = torch.linspace(-1, 1, len(logprobs))
    (weights * logprobs + 0.1 * weights * entropy).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("how", [layout.padded, layout.varlen])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_log_probs_entropies_and_gradients_equal_those_of_each_row_alone(kind, how, recompute):
    model = make(kind)
    want, want_entropy = alone(model, 0.7)
    want_grads = gradients(model, want, want_entropy)
    if how is layout.varlen:
        attention.use(model, gpu=False)
    if recompute:
        policy.no_dropout(model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    got, entropy = policy.token_logprobs(model, *arranged(how), temperature=0.7, chunk=2)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-5, rtol=1e-5)
    grads = gradients(model, got, entropy)
    for name, value in want_grads.items():
        assert float((grads[name] - value).abs().max()) < 1e-5 * max(1.0, float(value.abs().max())), name


def test_no_mask_is_made_for_packed_rows(monkeypatch):
    model, seen = make(), []
    attention.use(model, gpu=False)
    whole = attention.attend
    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, lambda *a, **k: seen.append((a[4], k["max_length_q"])) or whole(*a, **k))
    try:
        policy.token_logprobs(model, *arranged(layout.varlen))
    finally:
        AttentionInterface.register(attention.NAME, whole)
    assert seen == [(None, 5), (None, 5)]


def test_rows_padded_on_the_right_are_right_under_the_packed_attention_too():
    model = make()
    want, _ = policy.token_logprobs(model, *arranged(layout.padded))
    attention.use(model, gpu=False)
    got, _ = policy.token_logprobs(model, *arranged(layout.padded))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_models_that_cannot_run_without_padding_are_told_apart():
    assert attention.obstacle(make()) is None
    assert attention.obstacle(make("llama")) is None
    windowed = make(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert "sliding" in attention.obstacle(windowed)
    capped = make("llama")
    capped.config.attn_logit_softcapping = 30.0
    assert attention.obstacle(capped) == "its config has attn_logit_softcapping"
    from transformers import BloomConfig, BloomForCausalLM

    bloom = BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=8, n_layer=1, n_head=2))
    assert "does not let its attention be replaced" in attention.obstacle(bloom)
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match="packing to 'padded'"):
        attention.attend(torch.nn.Identity(), q, q, q, sliding_window=2)


def test_a_model_that_rescales_its_logits_is_run_whole(model):
    row = arranged(layout.padded, [[1, 2, 3]], [1])
    want, _ = policy.token_logprobs(model, *row)
    model.config.logit_scale = 0.5  # this class ignores it: only the path through the model's own logits is taken
    try:
        got, _ = policy.token_logprobs(model, *row)
    finally:
        del model.config.logit_scale
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
