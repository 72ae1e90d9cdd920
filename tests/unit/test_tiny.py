"""The bundled tiny model is what the quickstart's story needs, and its script makes such a model."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from rlkit import models

ROOT = Path(__file__).parents[2]
TINY = ROOT / "rlkit" / "assets" / "tiny"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import make_tiny_model

    yield make_tiny_model
    for name in ("make_tiny_model", "make_data"):
        sys.modules.pop(name)


@pytest.fixture(scope="module")
def tokenizer():
    return models.load_tokenizer(TINY)


def prompt(tokenizer, question):
    return tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)


def test_it_is_small_and_complete():
    assert sum(f.stat().st_size for f in TINY.iterdir()) < 5_000_000
    found = models.size(models.resolve("tiny").path)
    assert (found.layers, found.hidden, found.vocab, found.kv_heads, found.head_dim, found.tied) == (4, 128, 260, 2, 32, True)
    # embeddings; per layer q, k, v with biases, o, the three MLP matrices, two norms; the last norm
    layer = 128 * 129 + 2 * 64 * 129 + 128 * 128 + 3 * 128 * 384 + 2 * 128
    assert found.params == 260 * 128 + 4 * layer + 128


def test_the_tokenizer_keeps_any_text(tokenizer):
    text = "What is 345 + 678?\n\t\\boxed{1023} <think> é ∑ 日本"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())  # a token a byte
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 260
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


def test_the_chat_template(tokenizer):
    text = prompt(tokenizer, "What is 345 + 678?")
    assert text == "<|user|>What is 345 + 678?<|assistant|>"
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 2 + len("What is 345 + 678?")


def test_it_answers_at_once_and_mostly_wrong(tokenizer):
    """Greedy, held-out: at most half right with about 5 tokens an answer, which is what RL starts from."""
    rows = [json.loads(line) for line in (ROOT / "eval" / "data" / "arithmetic" / "test.jsonl").read_text().splitlines()]
    model = models.load_causal_lm(TINY, "float32").eval()
    ids = torch.tensor([tokenizer.encode(prompt(tokenizer, r["question"]), add_special_tokens=False) for r in rows])
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=36, do_sample=False)[:, ids.shape[1] :]
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    right = sum((re.findall(r"\d+", text) or [""])[-1] == row["answer"] for text, row in zip(texts, rows, strict=True))
    assert 0.3 <= right / len(rows) <= 0.5
    assert 4 <= (out != tokenizer.pad_token_id).sum(1).float().mean() <= 6


def test_the_two_authors(script):
    assert script.worked(345, 678) == "5+8=13\n4+7+1=12\n3+6+1=10\n1023"
    assert script.worked(111, 222) == "1+2=3\n1+2+0=3\n1+2+0=3\n333"
    assert script.careless(345, 678) == "913"  # 13 -> 3, 11 -> 1, 9
    assert script.careless(111, 222) == "333"
    assert script.careless(950, 950) == "1800"  # the last column keeps both digits


def test_training_data_leaves_out_the_test_split(script, monkeypatch):
    """With numbers drawn from the test split alone, only pairs outside it come through."""
    made = script.make_tokenizer()
    pairs = script.held_out()
    assert len(pairs) >= 256
    assert all((b, a) in pairs for a, b in pairs)
    stream = iter([n for pair in sorted(pairs)[:50] for n in pair] + [100, 100])
    monkeypatch.setattr(script, "pick", lambda rng, low, high: next(stream))
    import random

    ids, labels = next(script.batches(made, 1, 10, random.Random(0)))
    assert made.decode(ids[0][labels[0] == -100], skip_special_tokens=True) == "What is 100 + 100?"
    answer = made.decode(labels[0][labels[0] != -100], skip_special_tokens=False)
    assert answer.endswith("200<|end|>")  # no carries, so both authors say so


def test_the_script_writes_a_model_that_loads(script, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["make_tiny_model.py", "--out", str(tmp_path), "--steps", "2", "--batch", "4", "--threads", "1"])
    threads = torch.get_num_threads()
    try:
        script.main()
    finally:
        torch.set_num_threads(threads)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        mine, shipped = (folder / file for folder in (tmp_path, TINY))
        if file.endswith(".jinja"):
            assert mine.read_text() == shipped.read_text()
        else:
            a, b = (json.loads(f.read_text()) for f in (mine, shipped))
            differing = {"transformers_version", "is_local", "local_files_only"}
            assert {k: v for k, v in a.items() if k not in differing} == {k: v for k, v in b.items() if k not in differing}, file
    assert models.size(tmp_path) == models.size(TINY)
    assert len(models.load_tokenizer(tmp_path)) == 260
