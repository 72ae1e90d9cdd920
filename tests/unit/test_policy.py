"""The chunked log-probs against plain log_softmax and autograd, on a random head and on a random Qwen2."""

import pytest
import torch

from rlkit.zero import policy


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
    for fn in (plain, lambda *a: policy.chunked_logprobs(*a, chunk)):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
        logprobs, entropy = fn(*leaves, targets, temperature)
        (up[0] * logprobs + up[1] * entropy).sum().backward()
        grads.append([logprobs.detach().double(), entropy.detach().double(), *[leaf.grad.double() for leaf in leaves]])
    for want, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_no_tokens_gives_zero_gradients():
    hidden, weight = torch.zeros(0, 5, requires_grad=True), torch.ones(8, 5, requires_grad=True)
    logprobs, _ = policy.chunked_logprobs(hidden, weight, None, torch.zeros(0, dtype=torch.int64))
    logprobs.sum().backward()
    assert logprobs.shape == (0,)
    assert float(weight.grad.abs().sum()) == 0.0


@pytest.fixture(scope="module")
def model():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).eval()


def test_response_tokens_of_padded_rows_equal_each_row_alone(model):
    rows = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13]]
    prompts = [2, 1, 3]
    ids = torch.zeros(3, 6, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    lengths = torch.tensor([len(r) - p for r, p in zip(rows, prompts, strict=True)])
    got, entropy = policy.token_logprobs(model, ids, torch.tensor(prompts), lengths, temperature=0.7, chunk=2)
    want = []
    for row, p in zip(rows, prompts, strict=True):
        logp = torch.log_softmax(model(torch.tensor([row])).logits[0].detach() / 0.7, dim=-1)
        want += [float(logp[t - 1, row[t]]) for t in range(p, len(row))]
    torch.testing.assert_close(got.detach(), torch.tensor(want), atol=1e-5, rtol=1e-5)
    assert entropy.shape == got.shape == (7,)


def test_a_model_that_rescales_its_logits_is_run_whole(model):
    ids, one, two = torch.tensor([[1, 2, 3]]), torch.tensor([1]), torch.tensor([2])
    want, _ = policy.token_logprobs(model, ids, one, two)
    model.config.logit_scale = 0.5  # this class ignores it: only the path through the model's own logits is taken
    try:
        got, _ = policy.token_logprobs(model, ids, one, two)
    finally:
        del model.config.logit_scale
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
