"""The vLLM engine: vLLM in the actor's own process, driven one step at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rlkit import oom, transfer, weights
from rlkit.config import SampleSpec
from rlkit.engines import bulk
from rlkit.engines.base import Completion, Engine
from rlkit.engines.settings import WORKER, engine_args, gpu_args, kv_cache_bytes
from rlkit.errors import ConfigError, RolloutError, SyncError
from rlkit.memory import Meter
from rlkit.weights import WeightManifest

CPU_BATCHED_TOKENS = 4096  # tokens of one step
SHARE_CHECKED = 0.05  # of a GPU that must be free at start, when the cache's size is given


class VllmEngine(Engine):
    kind: ClassVar[str] = "vllm"

    def _load(self, path: str) -> dict[str, Any]:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB only, and it would win over the engine argument
        import vllm
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        from rlkit.engines.scheduler import AsyncRolloutScheduler, RolloutScheduler

        ours: dict[str, Any] = {
            "model": path,
            "dtype": self.dtype,
            "logprobs_mode": "processed_logprobs",
            "worker_extension_cls": WORKER,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if self.device == "cpu":
            ours |= self._cpu_args(path)
        else:
            ours |= gpu_args(self.spec)
            if self.spec.kv_cache_gib is not None:
                ours["kv_cache_memory_bytes"] = int(self.spec.kv_cache_gib * 2**30)
                if self.spec.gpu_memory_utilization is None:
                    ours["gpu_memory_utilization"] = SHARE_CHECKED  # else vLLM asks for 0.9 of the card to be free
            if self.spec.sleep_level:
                ours["enable_sleep_mode"] = True
        if self.spec.tensor_parallel_size > 1 and "distributed_executor_backend" not in self.spec.vllm:
            ours["distributed_executor_backend"] = "mp"  # workers as children of this process; vLLM would ask Ray for actors of its own
        args = engine_args(self.spec, [f.name for f in dataclasses.fields(EngineArgs)], **ours)
        try:
            config = EngineArgs(**args).create_engine_config(UsageContext.LLM_CLASS)
            if self.spec.scheduler == "rollout":
                ahead = config.scheduler_config.async_scheduling
                config.scheduler_config.scheduler_cls = AsyncRolloutScheduler if ahead else RolloutScheduler
            self._llm = LLMEngine.from_vllm_config(config, usage_context=UsageContext.LLM_CLASS, disable_log_stats=True)
        except ValueError as error:
            full = oom.at_start(error, f"engine-{self.index}", self.spec)
            if full is not None:
                raise full from error
            raise ConfigError(f"vLLM {vllm.__version__} refused the model or its settings: {error}") from error
        self.max_model_len = int(self._llm.model_config.max_model_len)
        self._finished = (0, 0)
        self._total = 0
        self._llm.collective_rpc("rlkit_remember")
        if self.device == "cuda" and self.spec.tensor_parallel_size > 1:
            self.meter = _Workers(self._llm)
        gpus = self._llm.collective_rpc("rlkit_gpu") if self.device == "cuda" else []
        return {"vllm": vllm.__version__, "gpus": gpus}

    def _cpu_args(self, path: str) -> dict[str, Any]:
        import transformers

        from rlkit import models

        size = models.size(path)
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=self.spec.trust_remote_code)
        context = self.spec.max_model_len or int(config.get_text_config().max_position_embeddings)
        width = 4 if self.dtype == "float32" else 2
        token_bytes = 2 * size.layers * size.kv_heads * size.head_dim * width
        extra: dict[str, Any] = {"kv_cache_memory_bytes": kv_cache_bytes(self.spec, token_bytes, context)}
        if self.spec.enforce_eager is None:
            extra["enforce_eager"] = True  # compiling takes longer than it saves on a laptop's models
        if self.spec.enable_chunked_prefill:
            raise ConfigError("EngineSpec.enable_chunked_prefill is True; on the CPU vLLM cannot cut a prompt whose samples have seeds.")
        extra["enable_chunked_prefill"] = False  # vLLM 0.30 then stops at "CPU Generator does not use offset"
        extra["max_num_batched_tokens"] = max(context, self.spec.max_num_batched_tokens or CPU_BATCHED_TOKENS)
        return extra

    def _sample(self, prompts: list[list[int]], sampling: SampleSpec, seeds: list[int]) -> list[list[Completion]]:
        # A prefix cached by an earlier call would change the shapes of this one's matrix products, and so its last bits: what a call
        # returns must not depend on what ran before it, or a run that was killed could not be repeated exactly.
        if not self._llm.reset_prefix_cache():
            raise RolloutError(f"engine-{self.index} still has cached prompts in use by an earlier call.")
        greedy = sampling.temperature == 0
        copies = 1 if greedy else sampling.n  # greedy samples of a group are the same
        self._finished, self._total = (0, 0), len(prompts) * copies
        params = self._all_params(prompts, sampling, seeds, copies)
        if bulk.able(self._llm) and not sampling.stop:
            groups = bulk.sample(self._llm, prompts, params, self._on_step)
        else:  # a stop string is found in the text, step by step
            groups = self._sample_by_step(prompts, params)
        return [group * (sampling.n if greedy else 1) for group in groups]

    def _on_step(self, finished: int) -> None:
        self._finished = (finished, 0)
        self._stop_if_aborted()

    def _sample_by_step(self, prompts: list[list[int]], params: list[Any]) -> list[list[Completion]]:
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            self._llm.add_request(str(i), {"prompt_token_ids": prompt}, param)
        groups: dict[int, list[Completion]] = {}
        try:
            while self._llm.has_unfinished_requests():
                self._stop_if_aborted()
                for out in self._llm.step():
                    if out.finished:
                        done = sorted(out.outputs, key=lambda c: c.index)
                        groups[int(out.request_id)] = [_completion(c) for c in done]
                        self._finished = (self._finished[0] + len(done), self._finished[1] + sum(len(c.token_ids) for c in done))
        except BaseException:
            self._llm.abort_request([str(i) for i in range(len(prompts)) if i not in groups])
            while self._llm.has_unfinished_requests():
                self._llm.step()
            raise
        return [groups[i] for i in range(len(prompts))]

    def _all_params(self, prompts: list[list[int]], sampling: SampleSpec, seeds: list[int], n: int) -> list[Any]:
        """vLLM's settings for each prompt.

        Raises:
            ConfigError: vLLM does not sample so, or would sample at another temperature in silence.
        """
        import vllm

        try:
            made = [self._params(prompt, sampling, seed, n) for prompt, seed in zip(prompts, seeds, strict=True)]
        except Exception as error:  # vLLM's own class for it is another in each version
            raise ConfigError(f"vLLM {vllm.__version__} refused the sampling settings: {error}") from error
        if made[0].temperature != sampling.temperature:
            raise ConfigError(
                f"SampleSpec.temperature is {sampling.temperature:g}, and vLLM would sample at {made[0].temperature:g}. Take that, or 0 "
                "for greedy responses."
            )
        return made

    def _params(self, prompt: list[int], sampling: SampleSpec, seed: int, n: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self._room(prompt, sampling)
        return SamplingParams(
            n=n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=room,
            min_tokens=min(sampling.min_tokens, room),
            stop=list(sampling.stop),
            seed=seed,
            logprobs=0 if sampling.logprobs else None,  # 0: the sampled token's only
            flat_logprobs=True,
            detokenize=bool(sampling.stop),  # else once, at the end, for all samples together
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _count(self) -> tuple[int, int]:
        if bulk.able(self._llm) and bulk.scheduler_of(self._llm).bulk:
            return self._finished[0], bulk.scheduler_of(self._llm).sampled()
        states = list(self._llm.output_processor.request_states.values())
        live = sum(s.detokenizer.num_output_tokens() for s in states if s.detokenizer is not None)
        return self._total - len(states), self._finished[1] + live

    def _take_weights(self, manifest: WeightManifest) -> None:
        if manifest.transport != transfer.OBJECT_STORE:
            self._llm.collective_rpc("rlkit_receive", args=(manifest.transport, list(manifest.buckets)))
        elif self.spec.tensor_parallel_size == 1:
            # Read bucket by bucket as vLLM asks for them.
            self._llm.collective_rpc("rlkit_load", args=(weights.tensors(manifest),))
        else:
            items = [(name, tensor.clone()) for name, tensor in weights.tensors(manifest)]
            self._llm.collective_rpc("rlkit_load", args=(items,))
        if not self._llm.reset_prefix_cache():
            raise SyncError(f"engine-{self.index} could not drop its cached prompts, which belong to the old weights.")

    def link(self, host: str, port: int, first: int, members: int) -> None:
        """Join the NCCL group of rank 0 and the engines, as its members from ``first`` on."""
        self._llm.collective_rpc("rlkit_link", args=(host, port, first, members))

    def _held(self, manifest: WeightManifest) -> list[tuple[str, str, int]]:
        shapes: Mapping[str, tuple[int, ...]] = dict(manifest.shapes)
        workers = self._llm.collective_rpc("rlkit_held", args=(shapes, manifest.dtype))
        # What is split over workers is gathered, the same in all their reports; what each has a copy of shows when copies differ.
        return list(dict.fromkeys(tuple(entry) for report in workers for entry in report))

    def _sleep(self, level: int) -> None:
        if not self._llm.reset_prefix_cache():
            raise RolloutError(f"engine-{self.index} cannot sleep: cached prompts are in use by an earlier call.")
        if self.device == "cuda":  # on the CPU vLLM has no sleep mode, and there is no card to give back
            self._llm.sleep(level)

    def _wake(self, weights: bool) -> None:
        if self.device == "cuda":
            self._llm.wake_up(["weights" if weights else "kv_cache"])

    def _weight_bytes(self) -> int:
        return int(sum(self._llm.collective_rpc("rlkit_weight_bytes")))

    def apply(self, fn: Callable[[Any], Any]) -> Any:
        import cloudpickle

        found = self._llm.collective_rpc("rlkit_apply", args=(cloudpickle.dumps(fn),))
        return found[0] if len(found) == 1 else found


class _Workers(Meter):
    """The meter of an engine whose GPUs belong to processes of their own: the worker that holds most."""

    def __init__(self, llm: Any) -> None:
        super().__init__("cuda")
        self._llm = llm

    def begin(self) -> None:
        self._llm.collective_rpc("rlkit_meter", args=(True,))

    def end(self) -> dict[str, float]:
        found: list[dict[str, float]] = self._llm.collective_rpc("rlkit_meter", args=(False,))
        return {key: max(one[key] for one in found) for key in found[0]}


def _completion(out: Any) -> Completion:
    """vLLM's CompletionOutput; its tokens include the sampled end-of-sequence token."""
    logprobs = [] if out.logprobs is None else list(out.logprobs.logprobs)
    text = out.text if isinstance(out.stop_reason, str) else None
    return Completion(list(out.token_ids), logprobs, "length" if out.finish_reason == "length" else "stop", text)
