"""rlkit's schedulers against vLLM's own: the same requests and the same sampled tokens must give the same responses.

No model runs: a stand-in for the worker samples a token from the request's prompt and place alone, as a real one does with seeds, and
keeps the block table that a real worker would keep, so that a block that was never announced, or belongs to two requests, is found.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rlkit.engines.scheduler import AsyncRolloutScheduler, RolloutScheduler
from rlkit.models import resolve

BLOCK, EOS, STOP = 16, 7, 9


def make(cls, blocks: int, seqs: int, budget: int = 256, chunked: bool = True):
    model = ModelConfig(model=str(resolve("tiny").path), dtype="float32", max_model_len=128, seed=0)
    scheduling = SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_model_len=128,
        enable_chunked_prefill=chunked,
        is_encoder_decoder=False,
        async_scheduling=issubclass(cls, AsyncScheduler),
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    config = VllmConfig(model_config=model, cache_config=cache, scheduler_config=scheduling, device_config=DeviceConfig("cpu"))
    config.scheduler_config.async_scheduling = issubclass(cls, AsyncScheduler)
    cache.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return cls(config, kv, StructuredOutputManager(config), block_size=BLOCK, log_stats=False)


def token(prompt: tuple[int, ...], place: int) -> int:
    return int(np.random.default_rng([*prompt, place]).integers(5, 60))


class Worker:
    """Samples, and keeps for each request its prompt, its sampled tokens and its blocks."""

    def __init__(self, prompts: dict[str, tuple[int, ...]]) -> None:
        self.prompts, self.blocks, self.sampled = prompts, {}, {}

    def run(self, step) -> ModelRunnerOutput:
        for gone in step.finished_req_ids | (step.preempted_req_ids or set()):
            self.blocks.pop(gone, None)
        new = {r.req_id: (list(r.block_ids[0]), r.num_computed_tokens) for r in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            more = [] if cached.new_block_ids[i] is None else list(cached.new_block_ids[i][0])
            start = more if name in cached.resumed_req_ids or name not in self.blocks else self.blocks[name] + more
            new[name] = (start, cached.num_computed_tokens[i])
        names, ids, logprobs = list(step.num_scheduled_tokens), [], []
        for name in names:
            self.blocks[name], computed = new[name]
            after = computed + step.num_scheduled_tokens[name]
            assert len(self.blocks[name]) * BLOCK >= after, f"{name} writes to {after} slots and has {len(self.blocks[name])} blocks"
            assert len(set(self.blocks[name])) == len(self.blocks[name])
            known = len(self.prompts[name]) + len(self.sampled.setdefault(name, []))
            assert after <= known, f"{name} computes token {after} of {known}"
            if after == known:  # else a prompt is not yet whole
                made = token(self.prompts[name], after)
                self.sampled[name].append(made)
                ids.append([made])
            else:
                ids.append([])
            logprobs.append([-float(after) / 100])
        written = [b for name in names for b in self.blocks[name][len(self.prompts[name]) // BLOCK :]]
        assert len(set(written)) == len(written), "two requests write to one block"
        array = np.array(logprobs, np.float32).reshape(-1, 1)
        lists = LogprobsLists(np.zeros_like(array, dtype=np.int32), array, np.zeros(len(names), np.int32))
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={n: i for i, n in enumerate(names)},
            sampled_token_ids=ids,
            logprobs=lists,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def requests(count: int, seed: int) -> list[Request]:
    init_none_hash(sha256)
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        prompt = [int(x) for x in rng.integers(100, 200, rng.integers(3, 60))] if i % 4 == 0 else out[-1].prompt_token_ids  # groups of four
        prompt = [*prompt[:-1], 300 + i]
        params = SamplingParams(max_tokens=int(rng.integers(1, 60)), min_tokens=0, logprobs=0, stop_token_ids=[STOP])
        params.update_from_generation_config({}, EOS)
        out.append(
            Request(
                request_id=f"r{i}",
                prompt_token_ids=prompt,
                sampling_params=params,
                pooling_params=None,
                block_hasher=get_request_block_hasher(BLOCK, sha256),
            )
        )
    return out


def drive(scheduler, made: list[Request], abort_after: int | None = None):
    """(tokens, log-probs, finish reason) by request; steps run one behind when the scheduler is asynchronous."""
    worker = Worker({r.request_id: tuple(r.prompt_token_ids) for r in made})
    ours = isinstance(scheduler, RolloutScheduler)
    if ours:
        scheduler.begin(len(made), max(r.max_tokens for r in made), {EOS, STOP}, True)
    for r in made:
        scheduler.add_request(r)
    depth = 2 if isinstance(scheduler, AsyncScheduler) else 1
    queue: deque = deque()
    got: dict[str, list] = {r.request_id: [[], [], None] for r in made}
    steps = 0
    while scheduler.has_requests() or queue:
        steps += 1
        assert steps < 5000
        if steps == abort_after:
            scheduler.finish_requests([r.request_id for r in made[::3]], RequestStatus.FINISHED_ABORTED)
        if scheduler.has_requests():
            step = scheduler.schedule()
            queue.append((step, worker.run(step)))
            if len(queue) < depth and step.num_scheduled_tokens:
                continue
        step, output = queue.popleft()
        for outs in scheduler.update_from_output(step, output).values():
            for out in outs.outputs:
                entry = got[out.request_id]
                entry[0] += out.new_token_ids
                if out.new_logprobs is not None:
                    entry[1] += out.new_logprobs.logprobs[:, 0].tolist()
                entry[2] = None if out.finish_reason is None else str(out.finish_reason)
    if ours:
        for name, entry in got.items():
            tokens, logprobs = scheduler.take(name)
            entry[0], entry[1] = tokens.tolist(), logprobs.tolist()
        scheduler.end()
    manager = scheduler.kv_cache_manager
    assert manager.block_pool.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 1, "blocks were not given back"
    assert not scheduler.requests
    return got


@pytest.mark.parametrize("blocks", [400, 24], ids=["room", "preempts"])
@pytest.mark.parametrize("seqs", [64, 10], ids=["all-at-once", "in-turns"])
@pytest.mark.parametrize(
    ("ours", "theirs"), [(RolloutScheduler, Scheduler), (AsyncRolloutScheduler, AsyncScheduler)], ids=["sync", "async"]
)
def test_the_same_responses_as_vllms_scheduler(ours, theirs, seqs, blocks):
    mine, plain = make(ours, blocks, seqs), make(theirs, blocks, seqs)
    assert mine.able
    for seed in (0, 1):
        got, expected = drive(mine, requests(40, seed)), drive(plain, requests(40, seed))
        for name, (tokens, logprobs, reason) in expected.items():
            assert got[name][0] == tokens, name
            assert got[name][1] == pytest.approx(logprobs), name
            assert got[name][2] == reason, name


@pytest.mark.parametrize("ours", [RolloutScheduler, AsyncRolloutScheduler])
def test_an_aborted_call_leaves_nothing_and_the_next_one_is_right(ours):
    scheduler = make(ours, 60, 16)
    made = requests(30, 3)
    got = drive(scheduler, made, abort_after=12)
    assert all(got[r.request_id][2] is not None for i, r in enumerate(made) if i % 3)
    again, alone = drive(scheduler, requests(30, 4)), drive(make(ours, 400, 64), requests(30, 4))
    assert {k: v[0] for k, v in again.items()} == {k: v[0] for k, v in alone.items()}


def test_most_steps_do_not_use_vllms_scheduler(monkeypatch):
    scheduler = make(RolloutScheduler, 400, 64)
    slow = []
    plain = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self, *a, **k: (slow.append(1), plain(self, *a, **k))[1])
    drive(scheduler, requests(40, 5))
    assert len(slow) <= 12  # the prompts, and the last, empty step; the responses are up to 60 tokens long
