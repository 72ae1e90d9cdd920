"""The actor that holds a frozen model and says what it thinks of rollouts. Imports Ray, so only the cluster side imports it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import ray

from rlkit import models
from rlkit.errors import RlkitError, RolloutError
from rlkit.types import RolloutShard
from rlkit.zero import packing

if TYPE_CHECKING:
    from rlkit.reference import ReferenceSpec


class Frozen:
    """One copy of the model. Log-probs only: no gradients, no optimizer."""

    def __init__(self, model: str, spec: ReferenceSpec, index: int) -> None:
        self.name, self.spec, self.index = model, spec, index
        self._stopped: set[str] = set()
        self._facts: dict[str, Any] | None = None

    def start(self) -> dict[str, Any]:
        """Load the model; again, do nothing. Returns facts about it."""
        if self._facts is None:
            import torch

            from rlkit.zero import attention
            from rlkit.zero.ds_config import chunk_of

            gpu = self.spec.gpus_per_actor > 0
            if not gpu:
                torch.set_num_threads(self.spec.n_threads)
            self.device = torch.device("cuda" if gpu else "cpu")
            dtype = ("bfloat16" if gpu else "float32") if self.spec.dtype == "auto" else self.spec.dtype
            found = models.resolve(self.name)
            self.model = models.load_causal_lm(found.path, getattr(torch, dtype), self.spec.trust_remote_code).eval().requires_grad_(False)
            if not self.spec.cpu_offload:
                self.model.to(self.device)
            reason = attention.obstacle(self.model) if gpu else "not on a GPU"
            if reason is None:
                attention.use(self.model, gpu)
            self._varlen = reason is None
            self._chunk = chunk_of(self.spec.logits_chunk, self.model.config.get_text_config().vocab_size, gpu)
            self._facts = {
                "resolved": found.name,
                "fingerprint": found.fingerprint,
                "dtype": dtype,
                "device": self.device.type,
                "packing": "varlen" if self._varlen else f"padded because {reason}",
                "parameters": sum(p.numel() for p in self.model.parameters()),
            }
        return self.info()

    @ray.method(concurrency_group="control")
    def info(self) -> dict[str, Any]:
        """The model and settings that it was started with, and its process."""
        return {"model": self.name, "spec": self.spec.as_dict(), "pid": os.getpid(), **(self._facts or {})}

    @ray.method(concurrency_group="control")
    def stop(self, call: str) -> None:
        """Stop the call with this id before its next micro-batch, running or queued."""
        self._stopped.add(call)

    def logprobs(
        self, shard: RolloutShard, keep: np.ndarray, temperature: float, call: str
    ) -> tuple[np.ndarray | None, dict[str, Any] | RlkitError]:
        """((N,) float32 log-probs in nats of the shard's tokens at ``temperature``, small facts).

        Groups whose ``keep`` (p,) is False are NaN.

        An error of ours is returned in the facts' place: Ray prints every raised one that nobody fetches, once a shard.
        """
        import torch

        from rlkit.zero import layout
        from rlkit.zero.policy import token_logprobs

        start = time.monotonic()
        out = np.full(len(shard.tokens), np.nan, dtype=np.float32)
        prompt_lengths = np.array([len(t) for t in shard.prompt_tokens])
        rows = packing.rows_of([len(shard.prompts)], prompt_lengths, shard.lengths, keep)
        rows = rows.take(np.flatnonzero(rows.lengths > 0))
        parts = packing.group(rows.totals, self.spec.micro_batch_tokens, self._varlen)
        arrange = layout.varlen if self._varlen else layout.padded
        offsets = shard.offsets()
        self.model.to(self.device)
        with torch.inference_mode():
            for part in parts:
                if call in self._stopped:
                    return None, RolloutError("The reference's log-probs were interrupted.")
                batch = rows.take(part)
                inputs = arrange(packing.token_rows([shard], batch), batch.prompt_lens)
                found, _ = token_logprobs(self.model, *inputs.to(self.device), temperature, self._chunk)
                values, at = found.float().cpu().numpy(), 0
                for index, length in zip(batch.index, batch.lengths, strict=True):
                    out[offsets[index] : offsets[index] + length] = values[at : at + length]
                    at += length
        return out, {
            "tokens": int(rows.lengths.sum()),
            "micro_batches": len(parts),
            "padding": 0.0 if self._varlen else packing.padding(rows.totals, parts),
            "seconds": time.monotonic() - start,
        }

    def rest(self) -> None:
        """With ``cpu_offload``, move the weights back to host memory."""
        if self.spec.cpu_offload and self.device.type == "cuda":
            import torch

            self.model.to("cpu")
            torch.cuda.empty_cache()
