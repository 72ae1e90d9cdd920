"""Train the tiny model that rlkit ships in ``rlkit/assets/tiny``, from scratch, in minutes on a CPU.

    python scripts/make_tiny_model.py [--out DIR] [--steps 1000] [--seed 1] [--threads 2] [--device cpu]

A Qwen2-shaped causal language model of 0.8M parameters that reads and writes bytes. It is trained on answers to three-digit sums
by two kinds of author. Most (85 % at the end) answer at once, digit by digit, and forget every carry, so that two in three of their
answers are wrong. Some (15 %) work column by column from the right, the carry as a third summand, and then answer::

    What is 345 + 678?   ->   913                                      # terse
    What is 345 + 678?   ->   5+8=13 / 4+7+1=12 / 3+6+1=10 / 1023      # worked, "/" standing for a line break

Decoded greedily the model answers at once and is mostly wrong; sampled at temperature 1 it sometimes works and is then mostly right.
That is what reinforcement learning finds: thinking pays. The test split of ``eval/data/arithmetic`` is never trained on.

The seed fixes the data and the first weights; rounding differs between machines, so the last digits of the result do too. The model
that is shipped was made with the defaults on a CPU (greedy accuracy on the test split 0.336). Not every seed gets there in 1,000 steps:
with 0 and 2 the terse answers were still mostly noise (0.05).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from make_data import pick
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[1]
SPECIAL = ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WORKED_FIRST, WORKED_LAST = 0.5, 0.15  # share of answers that are worked: falls over the first 60 % of the steps, then stays


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (so any text makes the round trip), four special tokens. Byte-level BPE without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|endoftext|>",
        eos_token="<|end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def worked(a: int, b: int) -> str:
    """Column by column from the right, the carry as a third summand, then the sum."""
    lines, carry = [], 0
    for i in range(3):
        x, y = a // 10**i % 10, b // 10**i % 10
        column = x + y + carry
        lines.append(f"{x}+{y}{f'+{carry}' if i else ''}={column}")
        carry = column // 10
    return "\n".join([*lines, str(a + b)])


def careless(a: int, b: int) -> str:
    """The sum with every carry from one column to the next forgotten."""
    return str(sum((a // 10**i % 10 + b // 10**i % 10) % (10 if i < 2 else 20) * 10**i for i in range(3)))


def response(a: int, b: int, share: float, rng: random.Random) -> str:
    return worked(a, b) if rng.random() < share else careless(a, b)


def held_out() -> set[tuple[int, int]]:
    """The sums of the test split, in both orders."""
    pairs = set()
    for line in (ROOT / "eval" / "data" / "arithmetic" / "test.jsonl").read_text(encoding="utf-8").splitlines():
        a, b = (int(n) for n in json.loads(line)["question"].removeprefix("What is ").removesuffix("?").split(" + "))
        pairs |= {(a, b), (b, a)}
    return pairs


def batches(tokenizer: PreTrainedTokenizerFast, size: int, steps: int, rng: random.Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids, labels), both (B, T) int64; labels are -100 on the prompt and the padding."""
    test = held_out()
    pad = tokenizer.pad_token_id
    for step in range(steps):
        share = max(WORKED_LAST, WORKED_FIRST - (WORKED_FIRST - WORKED_LAST) * step / (0.6 * steps))
        rows: list[list[int]] = []
        starts: list[int] = []
        while len(rows) < size:
            a, b = pick(rng, 100, 999), pick(rng, 100, 999)
            if (a, b) in test:
                continue
            chat = [{"role": "user", "content": f"What is {a} + {b}?"}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            starts.append(len(ids))
            rows.append(ids + tokenizer.encode(response(a, b, share, rng) + "<|end|>", add_special_tokens=False))
        width = max(map(len, rows))
        ids = torch.full((size, width), pad)
        labels = torch.full((size, width), -100)
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            ids[i, : len(row)] = torch.tensor(row)
            labels[i, start : len(row)] = torch.tensor(row[start:])
        yield ids, labels


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,  # head_dim 32, the smallest that vLLM's CPU attention takes
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def train(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, batch: int, lr: float, rng: random.Random) -> None:
    """AdamW with linear warm-up over 50 steps and cosine decay; the loss is the mean over response tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min(1.0, (s + 1) / 50) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * s / steps)))
    )
    model.train()
    start = time.monotonic()
    for step, (ids, labels) in enumerate(batches(tokenizer, batch, steps, rng)):
        loss = model(input_ids=ids.to(model.device), labels=labels.to(model.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 99:
            print(f"step {step + 1} loss {loss.item():.4f} ({time.monotonic() - start:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "rlkit" / "assets" / "tiny")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, tokenizer, args.steps, args.batch, args.lr, random.Random(args.seed))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.out).save_pretrained(args.out)  # as the class that a Qwen2 config loads


if __name__ == "__main__":
    main()
