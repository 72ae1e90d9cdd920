"""Real engines as Ray actors on the CPU: vLLM against a plain transformers loop, and what happens when they are stopped or killed."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import ray

from rlkit import actors, progress
from rlkit.config import EngineSpec
from rlkit.context import Owner
from rlkit.errors import ConfigError, ModelError, RolloutError, SpecChangedError
from rlkit.sampler import Sampler
from rlkit.types import Prompt
from tests.killing import killed_while_sampling
from tests.tiny_models import make_model

PROMPTS = [f"{i} + {i * 7 % 11}" + " =" * (i % 3) for i in range(9)]
SPEC = EngineSpec(max_model_len=128, cpus_per_engine=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_model(tmp_path_factory.mktemp("models") / "tied"))


@pytest.fixture(scope="module")
def keeper(ray_local):
    """One owner for the module, so that its two engines are started once."""
    made = Owner(f"engines-{os.getpid()}")
    yield made
    actors.end(actors.started_with(made.namespace, ""))


@pytest.fixture(scope="module")
def vllm(keeper, model):
    return Sampler.start(model, SPEC.but(engines=2), keeper)


@pytest.fixture(scope="module")
def hf(ray_local, model):
    made = Owner(f"hf-{os.getpid()}")
    yield Sampler.start(model, EngineSpec(engine="hf", max_model_len=128), made)
    actors.end(actors.started_with(made.namespace, ""))


def flat(rollouts):
    return [(s.prompt.id, s.index, s.tokens.tolist(), s.text, s.finish_reason) for s in rollouts.samples()]


@pytest.mark.parametrize(
    "sampling",
    [
        {"n": 2, "temperature": 0.0, "max_tokens": 24},
        {"n": 4, "temperature": 0.7, "max_tokens": 24, "seed": 3},
        {"n": 2, "top_k": 20, "top_p": 0.8, "max_tokens": 24, "seed": 4},
        {"n": 4, "temperature": 1.3, "stop": ("a", "7k", "+"), "min_tokens": 4, "max_tokens": 24, "seed": 5},
    ],
    ids=["greedy", "temperature", "filters", "stop"],
)
def test_vllm_and_transformers_sample_the_same_tokens(vllm, hf, sampling):
    """Same seeds, same draws: in fp32 the two engines agree token by token, and their log-probs to 1e-4."""
    ours, reference = vllm.generate(PROMPTS, **sampling), hf.generate(PROMPTS, **sampling)
    assert flat(ours) == flat(reference)
    assert ours.shape == (len(PROMPTS), sampling["n"])
    assert np.array_equal(ours.lengths, reference.lengths)
    for a, b in zip(ours.samples(), reference.samples(), strict=True):
        assert np.abs(a.logprobs - b.logprobs).max() < 1e-4


def test_log_probs_are_those_of_the_tempered_distribution(vllm, model):
    """Against log_softmax(logits / T) of one plain forward pass over prompt and response."""
    import torch
    from transformers import AutoModelForCausalLM

    rollouts = vllm.generate(PROMPTS, n=8, temperature=1.3, max_tokens=60, seed=1)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    worst, ended = 0.0, 0
    for ref in rollouts.shards:
        shard = ray.get(ref)
        offsets = shard.offsets()
        for i, sample in enumerate(shard.samples()):
            prompt = shard.prompt_tokens[i // 8]
            assert np.array_equal(sample.tokens, shard.tokens[offsets[i] : offsets[i + 1]])
            with torch.no_grad():
                logits = plain(torch.tensor(np.concatenate([prompt, sample.tokens])[None].astype(np.int64))).logits[0].double()
            want = torch.log_softmax(logits[len(prompt) - 1 : -1] / 1.3, -1)
            worst = max(worst, np.abs(want.numpy()[np.arange(len(sample.tokens)), sample.tokens] - sample.logprobs).max())
            if sample.finish_reason == "stop":
                assert sample.tokens[-1] == 1  # the end-of-sequence token was sampled, so it is in the tokens
                ended += 1
            assert sample.finish_reason == "stop" or len(sample.tokens) == 60
    assert worst < 1e-4
    assert ended > 0


def test_the_same_call_gives_the_same_bits_whatever_ran_before(vllm):
    first = vllm.generate(PROMPTS, n=4, max_tokens=16, seed=9)
    vllm.generate(PROMPTS[3:], n=2, max_tokens=5, seed=10)
    again = vllm.generate(PROMPTS, n=4, max_tokens=16, seed=9)
    assert flat(first) == flat(again)
    for a, b in zip(first.samples(), again.samples(), strict=True):
        assert np.array_equal(a.logprobs, b.logprobs)
    other = vllm.generate(PROMPTS, n=4, max_tokens=16, seed=11)
    assert flat(first) != flat(other)
    assert len({tuple(s.tokens) for s in first.samples()}) > 30  # samples of a group differ


def test_seeds_come_from_the_owner_when_none_is_given(vllm, keeper):
    keeper.step = 5
    keeper._calls = iter(range(100))
    first = vllm.generate(PROMPTS[:3], n=2, max_tokens=8)
    second = vllm.generate(PROMPTS[:3], n=2, max_tokens=8)
    keeper._calls = iter(range(100))
    replayed = vllm.generate(PROMPTS[:3], n=2, max_tokens=8)
    keeper.step = None
    assert first.step == 5
    assert first.run == keeper.name
    assert flat(first) == flat(replayed) != flat(second)


def test_what_does_not_fit_is_dropped_or_cut_and_said(vllm):
    long, longer = "x" * 150, "y" * 300
    with pytest.warns(UserWarning, match="2 of 5 prompts were dropped"):
        rollouts = vllm.generate([PROMPTS[0], long, "z" * 60, longer, PROMPTS[1]], n=2, max_tokens=200, min_tokens=200)
    assert [name for name, _ in rollouts.dropped] == ["text-1", "text-3"]
    assert rollouts.prompt_ids == ("text-0", "text-2", "text-4")
    assert rollouts.shape == (3, 2)
    assert sum(rollouts.shard_sizes) == 3
    assert (rollouts.lengths == 128 - rollouts.prompt_lengths[:, None]).all()  # min_tokens: none ended early
    assert rollouts.truncated.all()
    with pytest.raises(RolloutError, match="None of the 2 prompts leaves room for a response: the shortest has"):
        vllm.generate([long, longer], max_tokens=4)


def test_bad_calls_are_refused_before_anything_runs(vllm):
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        vllm.generate(PROMPTS, max_tokens=0)
    with pytest.raises(ConfigError, match="temperature is -1"):
        vllm.generate(PROMPTS, temperature=-1.0)
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        vllm.generate(PROMPTS, temprature=1.0)
    with pytest.raises(ConfigError, match=r"refused the sampling settings: temperature must be in \[0, 2\]"):
        vllm.generate(PROMPTS, temperature=2.5)
    with pytest.raises(ConfigError, match=r"temperature is 0.001, and vLLM would sample at 0.01"):
        vllm.generate(PROMPTS, temperature=0.001)
    with pytest.raises(RolloutError, match="no prompts"):
        vllm.generate([])
    nothing = Prompt("blank", ({"role": "user", "content": ""},), template="plain")
    with pytest.raises(RolloutError, match="'blank' is empty"):
        vllm.generate([*PROMPTS, nothing])


def test_log_probs_can_be_left_out(vllm):
    with_them, without = (
        vllm.generate(PROMPTS[:2], n=2, seed=1, max_tokens=8),
        vllm.generate(PROMPTS[:2], n=2, seed=1, max_tokens=8, logprobs=False),
    )
    assert flat(with_them) == flat(without)
    assert all((s.logprobs == 0).all() and len(s.logprobs) == len(s.tokens) for s in without.samples())


def test_an_interrupted_cell_leaves_idle_engines(vllm, capsys, monkeypatch):
    """Ctrl-C in a rollout of a minute: the cell ends at once, and so do the engines' calls."""
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.3)
    monkeypatch.setattr(progress, "LOG_S", 0.3)
    timer = threading.Timer(2.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        vllm.generate(PROMPTS * 30, n=32, max_tokens=100, min_tokens=100)
    assert time.monotonic() - begun < 10
    said = capsys.readouterr().err
    assert "tokens/s" in said
    assert "stopped after" in said
    begun = time.monotonic()
    rollouts = vllm.generate(PROMPTS[:2], n=1, max_tokens=4)
    assert time.monotonic() - begun < 10
    assert rollouts.shape == (2, 1)


def test_running_the_cell_again_finds_the_engines_and_other_settings_are_refused(vllm, keeper, model):
    again = Sampler.start(model, SPEC.but(engines=2, rollout_timeout_s=10.0), keeper)
    assert [i["pid"] for i in again.info] == [i["pid"] for i in vllm.info]
    with pytest.raises(SpecChangedError, match="max_model_len is 128, asked for 64"):
        Sampler.start(model, SPEC.but(engines=2, max_model_len=64), keeper)


def test_the_prompts_of_a_killed_engine_are_sampled_by_the_other_and_a_new_one_joins(vllm, capfd):
    """Last of the module's two engines: one is killed."""
    ask = {"prompts": PROMPTS * 2, "n": 4, "max_tokens": 100, "min_tokens": 100, "seed": 11}
    whole = vllm.generate(**ask, progress=False)
    before = [i["pid"] for i in vllm.info]
    with killed_while_sampling(vllm.engines[1], before[1]):
        rollouts = vllm.generate(**ask)
    assert flat(rollouts) == flat(whole)
    assert rollouts.shard_sizes == (9, 9)  # both by engine-0, one after the other
    assert [i["pid"] for i in vllm.info] == before[:1]
    assert "engine-1 died: its 9 prompts are sampled again by 1 other; its replacement is starting" in capfd.readouterr().out
    deadline = time.monotonic() + 120
    while len(vllm.engines) < 2:
        assert time.monotonic() < deadline
        vllm.generate(PROMPTS[:1], max_tokens=1, progress=False)
        time.sleep(0.5)
    assert vllm.info[0]["pid"] == before[0]
    assert vllm.info[1]["pid"] not in before
    assert "engine-1 was replaced" in capfd.readouterr().out
    assert flat(vllm.generate(**ask, progress=False)) == flat(whole)


def test_one_engine_samples_what_two_sample(vllm, keeper, owner, model):
    two = Sampler.start(model, SPEC.but(engines=2), keeper).generate(PROMPTS, n=2, max_tokens=16, seed=2)
    one = Sampler.start(model, SPEC, owner).generate(PROMPTS, n=2, max_tokens=16, seed=2)
    assert flat(one) == flat(two)
    assert (len(one.shards), len(two.shards)) == (1, 2)


@pytest.mark.slow
def test_vllms_own_scheduler_samples_the_same(vllm, owner, model):
    """Also in turns of eight: the schedulers differ in speed only."""
    asked = {"n": 3, "max_tokens": 24, "seed": 11, "progress": False}
    plain = Sampler.start(model, SPEC.but(scheduler="vllm", max_num_seqs=8), owner).generate(PROMPTS, **asked)
    ours = vllm.generate(PROMPTS, **asked)
    assert flat(ours) == flat(plain)
    for a, b in zip(ours.samples(), plain.samples(), strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)


def test_a_setting_that_vllm_does_not_know_is_refused_with_its_own_error(owner, model):
    with pytest.raises(ConfigError, match="no engine argument 'max_num_seq', did you mean 'max_num_seqs'"):
        Sampler.start(model, SPEC.but(vllm={"max_num_seq": 4}), owner)
    assert actors.names(owner.namespace) == []


def test_a_model_that_is_not_there_is_refused_with_its_own_error(owner, tmp_path):
    with pytest.raises(ModelError):
        Sampler.start(str(tmp_path / "nothing"), EngineSpec(engine="hf"), owner)
    assert actors.names(owner.namespace) == []
