"""Weight sync into real engines: the log-probs follow, the proof fires when one number is off, nothing is served half-written."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

import numpy as np
import pytest
import ray

from rlkit import actors, weights
from rlkit.config import EngineSpec
from rlkit.context import Owner
from rlkit.errors import ActorDiedError, DeadlineError, SyncError
from rlkit.sampler import Sampler
from tests.killing import killed_while_sampling
from tests.tiny_models import make_model

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers cannot import this file
PROMPTS = [f"{i} + {i * 7 % 11} =" for i in range(6)]


class Holder:
    """A transformers model in an actor of its own, as the learner's rank 0 holds one."""

    def __init__(self, path, dtype="float32"):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        self.version = 0
        self.kept = None

    def step(self):
        """Move every parameter, as an update does."""
        import torch

        torch.manual_seed(self.version)
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(torch.randn_like(p) * 0.05)
        self.version += 1

    def publish(self, dtype):
        self.kept = weights.publish(self.model.named_parameters(), version=self.version, dtype=dtype, bucket_bytes=100_000)
        return self.kept

    def logprobs(self, prompt, response):
        import torch

        with torch.no_grad():
            logits = self.model(torch.tensor([[*prompt, *response]])).logits[0].float()
        return torch.log_softmax(logits[len(prompt) - 1 : -1], -1).numpy()[np.arange(len(response)), response]


class Learner:
    """The two methods of a learner's handle that a sync needs."""

    def __init__(self, ray, path):
        self.holder = ray.remote(Holder).options(num_cpus=0).remote(path)
        self.get = ray.get

    def publish_weights(self, dtype):
        return self.get(self.holder.publish.remote(dtype))

    def step(self):
        self.get(self.holder.step.remote())

    def gap(self, rollouts):
        """Mean absolute difference of the sampler's log-probs to those of the learner's model now, in nats."""
        found = []
        for ref in rollouts.shards:
            shard = self.get(ref)
            for i, s in enumerate(shard.samples()):
                want = self.get(self.holder.logprobs.remote(shard.prompt_tokens[i // shard.group_size].tolist(), s.tokens.tolist()))
                found.append(np.abs(want - s.logprobs))
        return float(np.concatenate(found).mean())


CASES = {  # engine, tied, dtype of the engine, largest gap to the fp32 learner in nats
    "vllm": ("vllm", True, "float32", 1e-4),
    "vllm-untied-bf16": ("vllm", False, "bfloat16", 0.3),
    "hf": ("hf", True, "float32", 1e-4),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, ray_local, tmp_path_factory):
    """A sampler, a learner of the same model in fp32, and the gap between their log-probs that rounding may make."""
    engine, tied, dtype, tolerance = CASES[request.param]
    path = str(make_model(tmp_path_factory.mktemp("models") / "m", tied=tied))
    owner = Owner(f"sync-{os.getpid()}-{request.param}")
    sampler = Sampler.start(path, EngineSpec(engine=engine, max_model_len=128, dtype=dtype), owner)
    learner = Learner(ray_local, path)
    yield sampler, learner, tolerance
    ray_local.kill(learner.holder)
    actors.end(actors.started_with(owner.namespace, ""))


def test_after_a_sync_sampler_and_learner_agree_and_without_it_they_do_not(pair):
    sampler, learner, tolerance = pair
    assert learner.gap(sampler.generate(PROMPTS, n=2, max_tokens=16, seed=0)) < tolerance
    learner.step()
    stale = sampler.generate(PROMPTS, n=2, max_tokens=16, seed=0)
    assert stale.policy_version == 0
    assert learner.gap(stale) > 0.4
    stats = sampler.sync(learner)
    assert (stats.version, stats.checksum_ok, stats.engines, stats.transport) == (1, True, 1, "object_store")
    assert stats.checked >= len(learner.publish_weights(sampler.info[0]["dtype"]).names) >= 26  # embedding, 12 a layer, norm
    assert set(stats.parts) == {"publish", "load", "verify"}
    fresh = sampler.generate(PROMPTS, n=2, max_tokens=16, seed=0)
    assert fresh.policy_version == sampler.version == 1
    assert learner.gap(fresh) < tolerance
    sampler.sync(learner)  # again changes nothing
    again = sampler.generate(PROMPTS, n=2, max_tokens=16, seed=0)
    assert [s.tokens.tolist() for s in again.samples()] == [s.tokens.tolist() for s in fresh.samples()]


class Tampering:
    """A learner whose manifest arrives with one number changed on the way."""

    def __init__(self, learner, name):
        self.learner, self.name = learner, name

    def publish_weights(self, dtype):
        manifest = self.learner.publish_weights(dtype)
        refs = []
        for ref in manifest.buckets:
            bucket = ray.get(ref)
            if self.name in bucket.names:
                data = bucket.data.copy()
                width = {"float32": 4, "bfloat16": 2}[dtype]
                at = width * sum(int(np.prod(s)) for s in bucket.shapes[: bucket.names.index(self.name)])
                data[at] ^= 1  # the last bit of the tensor's first number
                bucket = dataclasses.replace(bucket, data=data)
            refs.append(ray.put(bucket))
        self.kept = refs
        return dataclasses.replace(manifest, buckets=tuple(refs))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.norm.weight",
    ],
)
def test_one_changed_bit_is_found_and_nothing_is_generated_until_it_is_right(pair, name):
    sampler, learner, tolerance = pair
    with pytest.raises(SyncError, match=name.replace(".", r"\.")):
        sampler.sync(Tampering(learner, name))
    assert sampler.version is None
    with pytest.raises(SyncError, match=r"run sampler\.sync\(learner\)"):
        sampler.generate(PROMPTS, max_tokens=4)
    sampler.sync(learner)
    assert learner.gap(sampler.generate(PROMPTS, max_tokens=8, seed=0)) < tolerance


def tamper_norm(model):
    import torch

    with torch.no_grad():
        model.model.norm.weight[3] += 0.125


def test_a_weight_that_changes_inside_the_engine_is_found(pair):
    """The proof reads the engine, not what was sent to it."""
    sampler, learner, _ = pair
    manifest = learner.publish_weights(sampler.info[0]["dtype"])
    (engine,) = sampler.engines
    ray.get(engine.load_weights.remote(manifest))
    ray.get(engine.verify.remote(manifest))
    ray.get(engine.apply.remote(tamper_norm))
    with pytest.raises(SyncError, match=r"model\.norm\.weight"):
        actors.wait([engine.verify.remote(manifest)], what="a check", timeout_s=30, setting="-")
    sampler.sync(learner)


class Partial:
    """A learner that leaves one tensor out."""

    def __init__(self, learner):
        self.learner = learner

    def publish_weights(self, dtype):
        manifest = self.learner.publish_weights(dtype)
        items = [(n, t) for n, t in weights.tensors(manifest) if n != "model.layers.1.input_layernorm.weight"]
        self.kept = weights.publish(items, version=9, dtype=dtype, put=ray.put)
        return self.kept


def test_a_tensor_that_was_not_sent_is_found(pair):
    sampler, learner, _ = pair
    with pytest.raises(SyncError, match=r"was not sent.*model\.layers\.1\.input_layernorm\.weight"):
        sampler.sync(Partial(learner))
    assert sampler.version is None
    sampler.sync(learner)


class Lost:
    """A learner whose bucket never arrives."""

    def __init__(self, learner, ray):
        self.learner, self.ray = learner, ray

    def publish_weights(self, dtype):
        import time

        sleeper = self.ray.remote(num_cpus=0)(lambda: time.sleep(4))
        return dataclasses.replace(self.learner.publish_weights(dtype), buckets=(sleeper.remote(),))


def test_weights_that_do_not_arrive_run_into_the_deadline_that_names_them(pair, ray_local):
    sampler, learner, tolerance = pair
    hasty = Sampler(sampler.engines, sampler.info, EngineSpec(sync_timeout_s=1.0), sampler._owner)
    with pytest.raises(DeadlineError, match=r"1 s for 1 engine\(s\) to take policy version \d+ .* raise EngineSpec\.sync_timeout_s"):
        hasty.sync(Lost(learner, ray_local))
    with pytest.raises(SyncError, match=r"run sampler\.sync\(learner\)"):
        hasty.generate(PROMPTS, max_tokens=4)
    sampler.sync(learner)
    assert learner.gap(sampler.generate(PROMPTS, max_tokens=8, seed=0)) < tolerance


def test_the_learner_sends_in_the_engines_dtype(pair):
    """A bf16 engine behind an fp32 learner: cast once, at the learner, and compared in bf16."""
    sampler, learner, _ = pair
    here, other = ("float32", "bfloat16") if sampler.info[0]["dtype"] == "float32" else ("bfloat16", "float32")
    numbers = sum(int(np.prod(s)) for s in learner.publish_weights(here).shapes.values())
    assert sampler.sync(learner).bytes == numbers * {"float32": 4, "bfloat16": 2}[here]
    with pytest.raises(SyncError, match=f"computes in {here}, the learner sent {other}"):
        actors.wait([sampler.engines[0].load_weights.remote(learner.publish_weights(other))], what="-", timeout_s=30, setting="-")
    assert sampler.sync(learner).version == learner.get(sampler.engines[0].version.remote())


def tamper_second_worker(model):
    import torch
    from vllm.distributed import get_tensor_model_parallel_rank

    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[0] += float(get_tensor_model_parallel_rank())


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_whole_again_over_tensor_parallel_workers(ray_local, owner, tmp_path, tied):
    """Two workers hold half of each matrix, and a copy each of the one key-value head and of the norms."""
    path = str(make_model(tmp_path / "m", tied=tied))
    sampler = Sampler.start(path, EngineSpec(max_model_len=128, tensor_parallel_size=2, cpus_per_engine=2), owner)
    learner = Learner(ray_local, path)
    learner.step()
    assert sampler.sync(learner).checked >= 26
    assert learner.gap(sampler.generate(PROMPTS, n=2, max_tokens=16, seed=0)) < 1e-4
    with pytest.raises(SyncError, match=r"mlp\.up_proj"):
        sampler.sync(Tampering(learner, "model.layers.1.mlp.up_proj.weight"))
    sampler.sync(learner)
    manifest = learner.publish_weights("float32")
    ray.get(sampler.engines[0].apply.remote(tamper_second_worker))
    with pytest.raises(SyncError, match=r"layers\.0\.input_layernorm"):
        actors.wait([sampler.engines[0].verify.remote(manifest)], what="a check", timeout_s=60, setting="-")
    ray_local.kill(learner.holder)


@pytest.fixture(params=["vllm", "hf"])
def alone(request, ray_local, owner, tmp_path):
    """One engine with the weights of the learner's version 1."""
    path = str(make_model(tmp_path / "m"))
    sampler, learner = Sampler.start(path, EngineSpec(engine=request.param, max_model_len=128), owner), Learner(ray_local, path)
    learner.step()
    sampler.sync(learner)
    yield sampler, learner
    sampler.close()
    ray_local.kill(learner.holder)


@pytest.mark.parametrize("alone", ["vllm"], indirect=True)
def test_the_only_engine_is_replaced_in_mid_rollout_with_the_weights_that_it_had(alone):
    sampler, _ = alone
    ask = {"prompts": PROMPTS, "n": 4, "max_tokens": 100, "min_tokens": 100, "seed": 3, "progress": False}
    whole, pid = sampler.generate(**ask), sampler.info[0]["pid"]
    with killed_while_sampling(sampler.engines[0], pid):
        rollouts = sampler.generate(**ask)
    assert [s.tokens.tolist() for s in rollouts.samples()] == [s.tokens.tolist() for s in whole.samples()]
    assert (rollouts.policy_version, sampler.version) == (1, 1)
    assert sampler.info[0]["pid"] != pid


@pytest.mark.parametrize("alone", ["hf"], indirect=True)
def test_a_replacement_gets_no_weights_of_another_version_than_the_rollout_s_until_a_sync(alone):
    sampler, learner = alone
    learner.step()
    os.kill(sampler.info[0]["pid"], signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=r"of policy version 1: the learner is no longer at policy version 1.*sampler\.sync"):
        sampler.generate(PROMPTS, max_tokens=4)
    assert sampler.sync(learner).version == sampler.version == 2
    os.kill(sampler.info[0]["pid"], signal.SIGKILL)  # and one that is found dead by the sync
    stats = sampler.sync(learner)
    assert (stats.version, stats.engines, sampler.version) == (2, 1, 2)
    assert learner.gap(sampler.generate(PROMPTS, max_tokens=8, seed=0)) < 1e-4
