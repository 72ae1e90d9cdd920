"""A rollout straight on vLLM's engine core: requests from one template, responses taken from `rlkit.engines.scheduler` when finished.

vLLM's front end validates, tracks and detokenises every sequence at every step. Here one request is made by it, and the others are copies
with other prompts, limits and seeds; text is decoded once, for all responses together.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np

from rlkit.engines.base import Completion

_calls = itertools.count()


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an engine whose core runs in this process."""
    return llm.engine_core.engine_core.scheduler


def able(llm: Any) -> bool:
    """Whether the engine has rlkit's scheduler, with nothing that it leaves to vLLM."""
    return bool(getattr(scheduler_of(llm), "able", False))


def sample(llm: Any, prompts: Sequence[list[int]], params: Sequence[Any], on_step: Callable[[int], None]) -> list[list[Completion]]:
    """``params[i].n`` completions of ``prompts[i]``; sample g has the seed of its ``params`` plus g. Tokens only, no text.

    ``on_step`` is called before every step with the number of finished responses; what it raises ends the call, and all requests are gone.
    """
    scheduler, core = scheduler_of(llm), llm.engine_core
    template = llm.input_processor.process_inputs(
        "0", {"prompt_token_ids": list(prompts[0])}, params[0], supported_tasks=llm.get_supported_tasks()
    )
    stops = set(template.sampling_params.stop_token_ids or ())
    if template.sampling_params.eos_token_id is not None:
        stops.add(template.sampling_params.eos_token_id)
    logprobs = template.sampling_params.logprobs is not None
    call, total = next(_calls), sum(p.n for p in params)  # no two calls share a request's name: a step of the last one may still run
    scheduler.begin(total, max(p.max_tokens for p in params), stops, logprobs)
    reasons: dict[str, str] = {}
    collects = gc.isenabled()
    gc.disable()  # thousands of short-lived objects a step, none of them in a cycle
    try:
        for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            for g in range(param.n):
                core.add_request(_request(template, f"{call}.{i}.{g}", prompt, param, g))
        while len(reasons) < total:
            on_step(len(reasons))
            for out in core.get_output().outputs:
                reasons[out.request_id] = str(out.finish_reason)
        return [[_completion(scheduler, f"{call}.{i}.{g}", reasons) for g in range(p.n)] for i, p in enumerate(params)]
    finally:
        try:
            core.abort_requests(list(scheduler.requests))
            while scheduler.has_requests() or core.engine_core.batch_queue:  # the workers forget what has finished, and nothing runs on
                core.get_output()
        finally:
            scheduler.end()
            if collects:
                gc.enable()


def _request(template: Any, request_id: str, prompt: list[int], param: Any, g: int) -> Any:
    made = copy(template)
    made.request_id = made.external_req_id = request_id
    made.prompt_token_ids = prompt
    made.sampling_params = copy(template.sampling_params)  # with the model's stop tokens, which the front end has added
    made.sampling_params.n, made.sampling_params.seed = 1, None if param.seed is None else param.seed + g
    made.sampling_params.max_tokens, made.sampling_params.min_tokens = param.max_tokens, param.min_tokens
    return made


def _completion(scheduler: Any, request_id: str, reasons: dict[str, str]) -> Completion:
    tokens, logprobs = scheduler.take(request_id)
    reason = "length" if reasons[request_id] == "length" else "stop"
    return Completion(tokens, np.zeros(0, np.float32) if logprobs is None else logprobs, reason)
