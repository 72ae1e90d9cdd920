"""What every rollout engine does: take prompts, give shards; take weights, prove that it holds them.

An engine is a Ray actor. `start`, `generate`, `load_weights`, `sleep` and `wake` run one at a time; `info`, `mode`, `progress`,
`version` and `abort` are answered while one of them is running.

Sampling rules, the same in every engine:

- Sample g of a prompt uses the seed ``seed + g`` in its own generator, so what is sampled depends neither on how prompts are spread over
  engines nor on what else is in the batch, up to the rounding of matrix products of other shapes.
- The sampled end-of-sequence token is part of ``tokens`` and has its log-prob: a policy that learns when to stop needs it. With a stop
  string, ``tokens`` are all that was sampled, the text ends before the string.
- A response is cut where prompt and response fill ``max_model_len``; its finish reason is "length", as at ``max_tokens``. A prompt that
  leaves no room for a single token is dropped and reported.
- Log-probs are those of the distribution that was sampled from: ``log_softmax(logits / temperature)``, over the tokens that top-k, top-p
  and min_tokens left. At temperature 0 (greedy) they are ``log_softmax(logits)``.
"""

from __future__ import annotations

import gc
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import ray

from rlkit import memory, oom
from rlkit.config import EngineSpec, SampleSpec, as_plain
from rlkit.errors import RolloutError, SyncError
from rlkit.tokentexts import tokenizer_json
from rlkit.types import Prompt, RolloutShard
from rlkit.weights import WeightManifest, check


@dataclass(frozen=True)
class Completion:
    """One sampled response, before packing."""

    tokens: Sequence[int] | np.ndarray
    logprobs: Sequence[float] | np.ndarray  # nats, one a token; empty when log-probs were not asked for
    finish_reason: str  # "stop" | "length"
    text: str | None = None  # None: decode the tokens


class Stopped(RolloutError):
    """`Engine.abort` was called for the running call; never leaves the engine."""


AWAKE, WEIGHTS, ASLEEP = "awake", "weights", "asleep"  # all of its memory is there, only the weights' (not the cache's), none


class Engine(ABC):
    """The protocol and what is common to its engines; `_load`, `_sample`, `_take_weights` and `_count` are theirs."""

    kind: ClassVar[str]

    def __init__(self, model: str, spec: EngineSpec, index: int, version: int | None = 0) -> None:
        """Keeps its arguments; the model is loaded by `start`, so that a refusal arrives with its own type."""
        self.model, self.spec, self.index = model, spec, index
        self._version: int | None = version
        self._started = False
        self._facts: dict[str, Any] = {}
        self._call: str | None = None
        self._aborted: set[str] = set()
        self._begun = 0.0
        self._mode = AWAKE
        self._dropped = False  # the weights went with a sleep of level 2
        self.tokenizer: Any = None
        self.max_model_len = 0
        self.dtype = "float32"
        self.device = "cpu"

    # --- one at a time ---------------------------------------------------------------------------------------------------------

    def start(self) -> dict[str, Any]:
        """Load the model, once; returns `info`.

        Raises:
            ModelError: the model cannot be found or is incomplete.
            ConfigError: a setting that the engine does not know or refuses.
        """
        if not self._started:
            from rlkit import models

            begun = time.monotonic()
            found = models.resolve(self.model)
            self.device = "cuda" if self.spec.gpus_per_engine > 0 else "cpu"
            auto = "bfloat16" if self.device == "cuda" else "float32"
            self.dtype = auto if self.spec.dtype == "auto" else self.spec.dtype
            self.tokenizer = models.load_tokenizer(found.path, trust_remote_code=self.spec.trust_remote_code)
            self.meter = memory.Meter(self.device if self.spec.tensor_parallel_size == 1 else "cpu")
            with oom.explained("start", f"engine-{self.index}", sampler=self.spec):
                facts = self._load(str(found.path))
            gc.collect()
            gc.freeze()  # the model's objects live as long as the process: keep them out of every later collection
            self._facts = {"name": found.name, "fingerprint": found.fingerprint, "start_seconds": time.monotonic() - begun, **facts}
            self._started = True
        return self.info()

    def tokenizer_json(self) -> bytes:
        """The tokenizer, for whoever reads the samples later; see `rlkit.tokentexts`."""
        return tokenizer_json(self.tokenizer)

    def generate(
        self, call: str, prompts: list[Prompt], sampling: SampleSpec, seeds: list[int]
    ) -> tuple[RolloutShard | None, dict[str, Any]]:
        """Sample ``sampling.n`` responses for each prompt; ``seeds`` has one a prompt.

        Returns:
            The shard, and a summary: ``lengths`` (p, G) int32, ``truncated`` (p, G) bool, ``prompt_lengths`` (p,) int32, ``dropped``
            ((prompt id, tokens) ...), ``version``, ``seconds``. Dropped prompts are in neither. After `abort`, None and nothing.

        Raises:
            SyncError: a weight sync was begun and not finished.
            RolloutError: asleep; a prompt without a token; log-probs that are not numbers.
        """
        if self._version is None:
            raise SyncError(f"engine-{self.index} holds no complete set of weights: run sampler.sync(learner) first.")
        if self._mode != AWAKE:
            raise RolloutError(f"engine-{self.index} is asleep: call sampler.wake() first.")
        version, self._begun, self._call = self._version, time.monotonic(), call
        self.meter.begin()
        try:
            tokens = self._tokenize(prompts)
            keep = [i for i, t in enumerate(tokens) if len(t) < self.max_model_len]
            dropped = tuple((prompts[i].id, len(t)) for i, t in enumerate(tokens) if len(t) >= self.max_model_len)
            with oom.explained("rollout", f"engine-{self.index}", sampler=self.spec):
                groups = self._sample([tokens[i] for i in keep], sampling, [seeds[i] for i in keep]) if keep else []
        except Stopped:
            return None, {}  # nobody is waiting: an error would only be printed in the notebook later
        finally:
            self._call = None
            self._aborted.discard(call)
        shard = self._pack([prompts[i] for i in keep], [tokens[i] for i in keep], groups, sampling)
        summary = {
            "lengths": shard.lengths,
            "truncated": np.array([r == "length" for r in shard.finish_reasons], bool).reshape(shard.lengths.shape),
            "prompt_lengths": np.array([len(t) for t in shard.prompt_tokens], np.int32),
            "dropped": dropped,
            "version": version,
            "seconds": time.monotonic() - self._begun,
            "memory": self.meter.end(),
        }
        return shard, summary

    def load_weights(self, manifest: WeightManifest) -> dict[str, Any]:
        """Replace all weights and prove that the engine now computes with those of the manifest.

        Until it has returned, the engine's version is None and `generate` refuses.

        Returns:
            ``version``, ``checked`` (tensors compared), ``load`` and ``verify`` in seconds, ``memory``.

        Raises:
            SyncError: names, shapes or checksums differ; the message names the tensors.
        """
        if manifest.dtype != self.dtype:
            raise SyncError(f"engine-{self.index} computes in {self.dtype}, the learner sent {manifest.dtype}.")
        if self._mode == ASLEEP:
            raise SyncError(f"engine-{self.index} is asleep and has no memory for weights: call sampler.wake() first.")
        self._version = None
        begun = time.monotonic()
        self.meter.begin()
        with oom.explained("sync", f"engine-{self.index}", sampler=self.spec):
            self._take_weights(manifest)
            loaded = time.monotonic()
            checked = self.verify(manifest)
        self._version, self._dropped = manifest.version, False
        times = {"load": loaded - begun, "verify": time.monotonic() - loaded}
        return {"version": manifest.version, "checked": checked, **times, "memory": self.meter.end()}

    def verify(self, manifest: WeightManifest) -> int:
        """Read back what the engine computes with and compare it with the manifest; returns how many tensors were compared.

        Raises:
            SyncError: names, shapes or values differ.
        """
        version, self._version = self._version, None
        held = self._held(manifest)
        check(held, manifest, f"engine-{self.index}")
        self._version = version
        return len(held)

    def sleep(self, level: int) -> dict[str, Any]:
        """Give the GPU's memory back: level 1 keeps the weights in host memory, 2 drops them. Again, nothing. Returns `mode`.

        Raises:
            ResourceError: level 1, and the host has no room.
        """
        if level == 0 or self._mode == ASLEEP:
            return self.mode()
        if self._mode == WEIGHTS:  # vLLM falls asleep from fully awake only
            self.wake()
        if level == 1:
            memory.check_host(self._weight_bytes(), f"engine-{self.index}'s weights (sleep level 1)", "Set EngineSpec.sleep_level to 2.")
        else:
            self._version, self._dropped = None, True
        self._sleep(level)
        self._mode = ASLEEP
        return self.mode()

    def wake(self, cache: bool = True) -> dict[str, Any]:
        """Take the GPU's memory again: that of the weights, and with ``cache`` that of the key-value cache too. Returns `mode`."""
        with oom.explained("turn", f"engine-{self.index}", sampler=self.spec, after="It must be started again: run.sampler(restart=True)."):
            if self._mode == ASLEEP:
                self._wake(weights=True)
                self._mode = WEIGHTS
            if cache and self._mode == WEIGHTS:
                self._wake(weights=False)
                self._mode = AWAKE
        return self.mode()

    @abstractmethod
    def apply(self, fn: Callable[[Any], Any]) -> Any:
        """``fn(model)`` in the engine's process, for looking inside it; with several vLLM workers, a list of what each returned."""

    # --- answered while busy ---------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    def info(self) -> dict[str, Any]:
        """What the engine is, for reprs and for `Sampler.start` to compare with."""
        return {
            "index": self.index,
            "engine": self.kind,
            "model": self.model,
            "spec": as_plain(self.spec),
            "started": self._started,
            "version": self._version,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "device": self.device,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "mode": self._mode,
            **self._facts,
        }

    @ray.method(concurrency_group="control")
    def mode(self) -> dict[str, Any]:
        """``mode``: "awake", "weights" (their memory only) or "asleep"; ``version``; ``dropped``: whether sleep took the weights."""
        return {"mode": self._mode, "version": self._version, "dropped": self._dropped}

    @ray.method(concurrency_group="control")
    def version(self) -> int | None:
        """The policy version of the weights; None while a sync is half done."""
        return self._version

    @ray.method(concurrency_group="control")
    def progress(self) -> dict[str, Any]:
        """Of the running call: ``samples`` done, ``tokens`` sampled, ``seconds`` since it began; ``call`` is None when idle."""
        call = self._call
        samples, tokens = self._count() if call is not None else (0, 0)
        return {"call": call, "samples": samples, "tokens": tokens, "seconds": time.monotonic() - self._begun if call else 0.0}

    @ray.method(concurrency_group="control")
    def abort(self, call: str | None = None) -> None:
        """End a call at its next token, or before it begins; ``None`` ends the one that is running."""
        call = call or self._call
        if call is not None:
            self._aborted.add(call)

    # --- shared by the engines -------------------------------------------------------------------------------------------------

    def _stop_if_aborted(self) -> None:
        if self._call in self._aborted:
            raise Stopped

    def _tokenize(self, prompts: list[Prompt]) -> list[list[int]]:
        from rlkit import templates

        found = [templates.encode(p, self.tokenizer) for p in prompts]
        empty = [p.id for p, tokens in zip(prompts, found, strict=True) if not tokens]
        if empty:
            raise RolloutError(f"Prompt {empty[0]!r} is empty: there is no token to continue from. Leave it out or give it a text.")
        return found

    def _pack(self, prompts: list[Prompt], tokens: list[list[int]], groups: list[list[Completion]], sampling: SampleSpec) -> RolloutShard:
        flat = [c for group in groups for c in group]
        lengths = np.array([len(c.tokens) for c in flat], np.int32).reshape(len(prompts), sampling.n)
        ids = _joined([c.tokens for c in flat], np.int32)
        logprobs = _joined([c.logprobs for c in flat], np.float32) if sampling.logprobs else np.zeros(len(ids), np.float32)
        if len(logprobs) != len(ids) or not np.isfinite(logprobs).all():
            raise RolloutError(
                f"engine-{self.index} returned {len(logprobs)} log-probs for {len(ids)} tokens, "
                f"{int((~np.isfinite(logprobs)).sum())} of them not finite: the weights may have diverged."
            )
        need = [i for i, c in enumerate(flat) if c.text is None]
        decoded = dict(zip(need, self._decode([flat[i].tokens for i in need]), strict=True))
        texts = tuple(decoded[i] if c.text is None else c.text for i, c in enumerate(flat))
        prompt_tokens = tuple(np.array(t, np.int32) for t in tokens)
        return RolloutShard(tuple(prompts), prompt_tokens, ids, lengths, logprobs, texts, tuple(c.finish_reason for c in flat))

    def _decode(self, tokens: list[Sequence[int] | np.ndarray]) -> list[str]:
        if not tokens:
            return []
        return self.tokenizer.batch_decode(
            [np.asarray(t).tolist() for t in tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _room(self, prompt: Sequence[int], sampling: SampleSpec) -> int:
        """How many tokens the response to ``prompt`` may have."""
        return min(sampling.max_tokens, self.max_model_len - len(prompt))

    # --- for each engine to define ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _load(self, path: str) -> dict[str, Any]:
        """Load the model and set ``max_model_len``; returns facts for `info`."""

    @abstractmethod
    def _sample(self, prompts: list[list[int]], sampling: SampleSpec, seeds: list[int]) -> list[list[Completion]]:
        """Per prompt, ``sampling.n`` completions; calls `_stop_if_aborted` at every token."""

    @abstractmethod
    def _count(self) -> tuple[int, int]:
        """(samples done, tokens sampled) of the running call; called from another thread."""

    @abstractmethod
    def _take_weights(self, manifest: WeightManifest) -> None:
        """Load the weights that the manifest leads to, and drop cached prompts."""

    @abstractmethod
    def _held(self, manifest: WeightManifest) -> list[tuple[str, str, int]]:
        """(Hugging Face name, where it was found, fingerprint) of every weight that the engine computes with, read back from it."""

    @abstractmethod
    def _sleep(self, level: int) -> None:
        """Give the GPU's memory back; called when awake."""

    @abstractmethod
    def _wake(self, weights: bool) -> None:
        """Take the memory of the weights, or else of the cache, again."""

    @abstractmethod
    def _weight_bytes(self) -> int:
        """Bytes of the weights on all of the engine's GPUs."""


def _joined(parts: Sequence[Any], kind: Any) -> np.ndarray:
    return np.concatenate([np.asarray(p, kind) for p in parts]) if parts else np.zeros(0, kind)
