"""The decision tree of an out-of-memory error, and where its numbers come from."""

from __future__ import annotations

import pickle

import pytest
import torch

from rlkit import oom
from rlkit.config import EngineSpec, TrainSpec
from rlkit.errors import ConfigError, OutOfMemoryError, RlkitError

GIB = 2**30
FULL = oom.Facts(asked=2 * GIB, allocated=60 * GIB, reserved=70 * GIB, free=1 * GIB, total=80 * GIB, vocab=32_000)


LOGITS = oom.Facts(asked=2048 * 32_000 * 4, vocab=32_000)  # 2,048 tokens x 32,000 words x 4 bytes: a chunk's logits
WIDE = TrainSpec(gpus_per_rank=1, micro_batch_tokens=65536)
LARGE = oom.Facts(asked=19_456 * 32_000 * 2, vocab=32_000)
OTHER = oom.Facts(asked=2048 * 32_000 * 3, vocab=32_000)
CHUNK = TrainSpec(logits_chunk=2048)
TIGHT = TrainSpec(micro_batch_tokens=600, gradient_checkpointing=True)
LAST = TIGHT.but(offload_optimizer=True, zero_stage=3, ranks=2)
STEP = EngineSpec(kv_cache_gib=4, max_num_batched_tokens=2048)


@pytest.mark.parametrize(
    ("phase", "sampler", "learner", "facts", "first", "also"),
    [
        ("start", EngineSpec(gpu_memory_utilization=0.9), None, FULL, "gpu_memory_utilization (now 0.9)", ["max_model_len"]),
        ("start", EngineSpec(kv_cache_gib=9), None, FULL, "kv_cache_gib (now 9)", []),
        ("start", None, TrainSpec(), FULL, "offload_optimizer", ["zero_stage to 3"]),
        ("rollout", EngineSpec(), None, FULL, "max_num_batched_tokens (now 8192) to 4096", ["gpu_memory_utilization", "max_num_seqs"]),
        ("rollout", EngineSpec(max_num_batched_tokens=600), None, FULL, "gpu_memory_utilization", ["max_num_seqs"]),
        ("rollout", STEP, None, FULL, "max_num_batched_tokens (now 2048) to 1024", ["kv_cache_gib"]),
        ("forward", None, TrainSpec(), FULL, "micro_batch_tokens (now 16384) to 8192", ["gradient_checkpointing", "zero_stage to 3"]),
        ("backward", None, CHUNK, LOGITS, "logits_chunk (now 2048) to 512", ["micro_batch_tokens"]),
        ("backward", None, CHUNK, OTHER, "micro_batch_tokens", []),
        # On a GPU the chunk is as many rows as 1.25 GB of 16-bit logits: 19,456 of them, and not 2,048.
        (
            "backward",
            None,
            TrainSpec(gpus_per_rank=1, micro_batch_tokens=65536),
            LARGE,
            "logits_chunk (now 19456) to 4864",
            ["micro_batch_tokens (now 65536)"],
        ),
        ("backward", None, TrainSpec(gpus_per_rank=1), LOGITS, "micro_batch_tokens", []),
        ("forward", None, TIGHT, FULL, "offload_optimizer", ["zero_stage"]),
        ("forward", None, LAST, FULL, "ranks (now 2)", []),
        ("optimizer", None, TrainSpec(), FULL, "offload_optimizer", ["zero_stage to 3"]),
        ("optimizer", None, TrainSpec(ranks=4, offload_optimizer=True), FULL, "TrainSpec.zero_stage to 3", []),
        ("sync", EngineSpec(), TrainSpec(), FULL, "sleep_level to 2", ["offload_between_turns", "gpu_memory_utilization"]),
        ("turn", EngineSpec(sleep_level=2), TrainSpec(), FULL, "offload_between_turns", []),
    ],
)
def test_the_first_advice_is_the_most_promising(phase, sampler, learner, facts, first, also):
    ways = oom.advise(phase, facts, sampler, learner).split("; or ")
    assert first in ways[0]
    for setting in also:
        assert any(setting in way for way in ways[1:]), setting


def test_others_on_the_card_are_named_when_they_hold_most_of_it():
    crowded = oom.Facts(asked=GIB, reserved=10 * GIB, free=GIB, total=80 * GIB)
    assert crowded.others == 69 * GIB
    assert "other processes hold 69.0 GiB" in oom.advise("forward", crowded, None, TrainSpec())
    assert "other processes" not in oom.advise("forward", FULL, None, TrainSpec())


def test_torchs_error_becomes_ours_with_phase_role_and_numbers():
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.1 GiB of which 1.2 GiB is free."
    assert oom.asked_bytes(text) == 2.5 * GIB
    assert oom.asked_bytes("Tried to allocate 20.00 MiB.") == 20 * 2**20
    assert oom.asked_bytes("out of memory") == 0
    with (
        pytest.raises(OutOfMemoryError, match=r"rank-1 ran out of GPU memory in the forward phase.*micro_batch_tokens.*Undone\.") as caught,
        oom.explained("forward", "rank-1", learner=TrainSpec(), after="Undone."),
    ):
        raise torch.OutOfMemoryError(text)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, RlkitError)
    assert isinstance(again, MemoryError)
    assert str(again) == str(caught.value)
    assert (
        "asked for 2.0 GiB more, had 60.0 GiB allocated at the peak (70.0 GiB reserved); 1.0 GiB of the card's 80.0 GiB are free"
        in oom.message("forward", "rank-0", FULL, None, TrainSpec())
    )
    with pytest.raises(RuntimeError, match="something else"), oom.explained("forward", "rank-0"):
        raise RuntimeError("something else")


@pytest.mark.parametrize(
    "text",
    [
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
        "Free memory on device cuda:0 (10.1/79.2 GiB) on startup is less than desired GPU memory utilization (0.9, 71.3 GiB).",
        "To serve at least one request with the model's max seq len (4096), (2.0 GiB KV cache is needed, which is larger than "
        "the available KV cache memory (1.0 GiB).",
    ],
)
def test_vllms_complaints_about_memory_become_ours(text):
    found = oom.at_start(ValueError(text), "engine-0", EngineSpec())
    assert found is not None
    assert "engine-0 ran out of GPU memory in the start phase" in str(found)
    assert text in str(found)
    assert oom.at_start(ValueError("Unknown quantization"), "engine-0", EngineSpec()) is None


def test_new_settings_are_checked():
    assert (EngineSpec().sleep_level, TrainSpec().offload_between_turns) == (None, None)
    with pytest.raises(ConfigError, match="sleep_level is 3"):
        EngineSpec(sleep_level=3)
    with pytest.raises(ConfigError, match="offload_between_turns is True"):
        TrainSpec(offload_between_turns=True, offload_param=True, zero_stage=3)
