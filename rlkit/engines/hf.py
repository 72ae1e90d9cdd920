"""The transformers engine: a plain sampling loop with a key-value cache, for models that vLLM does not know and as the reference in tests.

Prompts of equal length are sampled together, so nothing is padded; the prompt of a group is computed once and its cache repeated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from rlkit import weights
from rlkit.checksum import checksum_each
from rlkit.config import SampleSpec
from rlkit.engines.base import Completion, Engine
from rlkit.engines.sampling import pick
from rlkit.errors import ConfigError
from rlkit.weights import WeightManifest

ROWS = 256  # sequences of one forward pass


class HfEngine(Engine):
    kind: ClassVar[str] = "hf"

    def _load(self, path: str) -> dict[str, Any]:
        import torch
        import transformers

        from rlkit import models
        from rlkit.shelf import Shelf

        if self.spec.vllm:
            raise ConfigError(f"EngineSpec.vllm is set ({', '.join(self.spec.vllm)}) but the engine is 'hf'.")
        self._model = models.load_causal_lm(path, self.dtype, trust_remote_code=self.spec.trust_remote_code).to(self.device).eval()
        context = int(self._model.config.get_text_config().max_position_embeddings)
        self.max_model_len = min(context, self.spec.max_model_len or context)
        self._eos = torch.tensor(sorted(end_tokens(self._model, self.tokenizer)), device=self.device)
        # transformers 5.24 renamed the argument, and some models have not followed.
        known = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"
        self._rows = self.spec.max_num_seqs or ROWS
        self._shelf = Shelf(torch.device(self.device))
        self._done = (0, 0)
        return {"transformers": transformers.__version__}

    def _sample(self, prompts: list[list[int]], sampling: SampleSpec, seeds: list[int]) -> list[list[Completion]]:
        import torch

        self._done = (0, 0)
        by_length: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            by_length.setdefault(len(prompt), []).append(i)
        groups: dict[int, list[Completion]] = {}
        at_once = max(1, self._rows // sampling.n)
        with torch.inference_mode():
            for same in by_length.values():
                for start in range(0, len(same), at_once):
                    chunk = same[start : start + at_once]
                    flat = self._sample_equal([prompts[i] for i in chunk], sampling, [seeds[i] for i in chunk])
                    for k, i in enumerate(chunk):
                        groups[i] = flat[k * sampling.n : (k + 1) * sampling.n]
        return [groups[i] for i in range(len(prompts))]

    def _sample_equal(self, prompts: list[list[int]], sampling: SampleSpec, seeds: list[int]) -> list[Completion]:
        """Prompt-major completions of prompts of equal length."""
        import torch

        n, room = sampling.n, self._room(prompts[0], sampling)
        rows = len(prompts) * n
        generators = [torch.Generator(self.device).manual_seed(seed + g) for seed in seeds for g in range(n)]
        out = self._model(input_ids=torch.tensor(prompts, device=self.device), use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        if n > 1:
            cache.batch_repeat_interleave(n)
        logits = out.logits[:, -1].float().repeat_interleave(n, 0)  # (rows, V)
        tokens: list[list[int]] = [[] for _ in range(rows)]
        logprobs: list[list[float]] = [[] for _ in range(rows)]
        finish: list[str | None] = [None] * rows
        texts: list[str | None] = [None] * rows
        samples, total = self._done
        for step in range(room):
            self._stop_if_aborted()
            if step < sampling.min_tokens:
                logits[:, self._eos] = -torch.inf
            picked, logprob = pick(logits, sampling, generators)
            ended = torch.isin(picked, self._eos).tolist()
            for row, (token, lp) in enumerate(zip(picked.tolist(), logprob.tolist(), strict=True)):
                if finish[row] is not None:
                    continue
                tokens[row].append(token)
                logprobs[row].append(lp)
                total += 1
                if ended[row]:
                    finish[row] = "stop"
                elif sampling.stop and step + 1 > sampling.min_tokens:
                    texts[row] = self._before_stop(tokens[row], sampling)
                    finish[row] = "stop" if texts[row] is not None else None
                if finish[row] is None and step + 1 == room:
                    finish[row] = "length"
                samples += finish[row] is not None
            self._done = (samples, total)
            if all(finish):
                break
            logits = self._model(input_ids=picked[:, None], **{self._cache_name: cache}, use_cache=True).logits[:, -1].float()
        scores = logprobs if sampling.logprobs else [[] for _ in range(rows)]
        return [Completion(t, s, f or "length", x) for t, s, f, x in zip(tokens, scores, finish, texts, strict=True)]

    def _before_stop(self, tokens: list[int], sampling: SampleSpec) -> str | None:
        """The text before the stop string that ends first, None without one; one that ends within the first min_tokens does not count."""
        text = self._decode([tokens])[0]
        fixed = len(self._decode([tokens[: sampling.min_tokens]])[0]) if sampling.min_tokens else 0
        starts = [(text.find(s, max(0, fixed - len(s) + 1)), len(s)) for s in sampling.stop]
        ends = [(at + size, at) for at, size in starts if at >= 0]
        return text[: min(ends)[1]] if ends else None

    def _count(self) -> tuple[int, int]:
        return self._done

    def _take_weights(self, manifest: WeightManifest) -> None:
        import torch

        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.tensors(manifest):
                if name in parameters and parameters[name].shape == tensor.shape:
                    parameters[name].copy_(tensor)

    def _held(self, manifest: WeightManifest) -> list[tuple[str, str, int]]:
        return list(checksum_each((name, name, p) for name, p in self._model.named_parameters()))

    def _sleep(self, level: int) -> None:
        parameters = list(self._model.parameters())
        self._shelf.put(self._model.buffers())
        if level == 1:
            self._shelf.put(parameters)
        else:
            self._shelf.drop(parameters)

    def _wake(self, weights: bool) -> None:
        if weights:  # the cache is made anew in every call
            self._shelf.back()

    def _weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._model.parameters())

    def apply(self, fn: Callable[[Any], Any]) -> Any:
        return fn(self._model)


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Ids that end a response: the tokenizer's, and the generation config's, which may be several."""
    listed = model.generation_config.eos_token_id if model.generation_config is not None else None
    found = [listed] if isinstance(listed, int) else list(listed or [])
    return {int(t) for t in [*found, tokenizer.eos_token_id] if t is not None}
