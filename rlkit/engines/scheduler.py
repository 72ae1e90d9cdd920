"""vLLM's scheduler without its per-sequence Python work in the decode steps of a rollout.

A small model decodes a thousand sequences in a few milliseconds of GPU time, while vLLM's scheduler works on each sequence
in Python in each step. A rollout needs little of that: all its requests are alike, none joins a batch that is full, and nobody reads
a response before it is finished. So while every running sequence decodes, `RolloutScheduler` makes the step from arrays with one entry a
sequence, and takes the sampled tokens into arrays as well; vLLM's own `schedule` runs for everything else (prompts, preemption, a
cache that is full), with the requests brought up to date before it and read again after it.

`begin` switches this on for one call, `take` gives a finished response. Outside of a call, with stop strings (whose check needs the text
of every step), and with features that rollouts do not use, everything is vLLM's own.

The classes depend on vLLM's internals: with 0.30 the tests run them, with 0.26 they ran on a GPU. A test drives them and vLLM's own
schedulers with the same sampled tokens (`tests/integration/test_rollout_scheduler.py`); ``EngineSpec.scheduler`` "vllm" goes without them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

ADMIT_SHARE = 16  # waiting requests join once a sixteenth of the batch is free: each joining costs a step of vLLM's own scheduler
AHEAD = 64  # tokens for which a sequence gets blocks at once while most of the cache is free


class RolloutScheduler(Scheduler):
    """Synchronous scheduling: a step is scheduled once the tokens of the one before are known."""

    bulk = False  # whether a call of `begin` is running

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ahead = isinstance(self, AsyncScheduler)  # schedules a step while the one before is running
        self.able = (
            len(self.kv_cache_config.kv_cache_groups) == 1
            and not (self.lora_config or self.connector or self.ec_connector or self.use_pp)
            and not (self.is_encoder_decoder or self.num_spec_tokens or self.defer_block_free or self.log_stats)
            and not (self.needs_kv_cache_zeroing or self.need_mamba_block_aligned_split or self.enable_return_routed_experts)
            and self.policy == SchedulingPolicy.FCFS
        )
        self._row: dict[str, int] = {}
        self._request: list[Request] = []

    # ---- a call

    def begin(self, samples: int, width: int, stops: Iterable[int], logprobs: bool) -> None:
        """The requests added from now on are those of one call: ``samples`` of them, at most ``width`` tokens each.

        ``stops`` are the tokens that end a response.
        """
        assert self.able
        assert not self.requests
        self._row, self._request = {}, []
        self._stops = np.fromiter(stops, np.int32)
        shape = (samples, width)
        self._tokens = np.empty(shape, np.int32)
        self._logprobs = np.empty(shape, np.float32) if logprobs else None
        zeros = np.zeros((8, samples), np.int64)
        self._prompt, self._limit, self._count, self._computed, self._pending, self._flying, self._slots, self._written = zeros
        # tokens of the prompt; the most that the response may have, and has; computed or being computed; sampled tokens and tokens of any
        # kind in steps that run; slots of the allocated blocks; response tokens that the Request knows of
        self._alive = np.zeros(samples, bool)
        self._order = np.zeros(0, np.int64)  # rows of self.running
        self._ids: list[str] = []
        self._displaced: set[int] = set()  # rows of preempted requests
        self.bulk = True

    def end(self) -> None:
        """The call is over; requests that are left must have been aborted."""
        self.bulk = False
        self._row, self._request = {}, []

    def take(self, request_id: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens (T,) int32 and log-probs (T,) float32 of a response."""
        row = self._row[request_id]
        n = int(self._count[row])
        return self._tokens[row, :n].copy(), None if self._logprobs is None else self._logprobs[row, :n].copy()

    def sampled(self) -> int:
        """Tokens sampled in this call; may be read from another thread."""
        return int(self._count.sum()) if self.bulk else 0

    # ---- vLLM's interface

    def add_request(self, request: Request) -> None:
        if self.bulk:
            row = self._row[request.request_id] = len(self._request)
            self._request.append(request)
            self._prompt[row] = request.num_prompt_tokens
            self._limit[row] = min(request.max_tokens, self.max_model_len - request.num_prompt_tokens)
            self._alive[row] = True
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if not self.bulk:
            return super().schedule(*args, **kwargs)
        step = self._decode_step()
        if step is None:
            self._write_back()
            step = super().schedule(*args, **kwargs)
            self._read_again()
        return step

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        if not self.bulk:
            return super().update_from_output(scheduler_output, model_runner_output)
        done = self._take_tokens(scheduler_output, model_runner_output)
        if not done:
            return {}
        outs = [self._finish(row, status) for row, status in done]
        keep = self._alive[self._order]
        self.running = [r for r, kept in zip(self.running, keep, strict=True) if kept]
        self._ids = [i for i, kept in zip(self._ids, keep, strict=True) if kept]
        self._order = self._order[keep]
        return {0: EngineCoreOutputs(outputs=outs)}

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        if not self.bulk:
            return super().finish_requests(request_ids, finished_status)
        self._write_back()
        finished = super().finish_requests(request_ids, finished_status)
        for request in self._request:
            if request.is_finished():
                self._alive[self._row[request.request_id]] = False
        self._read_again()
        return finished

    # ---- steps from arrays

    def _decode_step(self) -> SchedulerOutput | None:
        """The next step when all running sequences decode one token; None when vLLM's own scheduler has to decide."""
        order = self._order
        computed, count, pending = self._computed[order], self._count[order], self._pending[order]
        if not len(order) or self._pause_state != PauseState.UNPAUSED or self._wants_to_admit():
            return None
        if (computed != self._prompt[order] + count + pending - 1).any():  # a prompt is not yet done
            return None
        more = count + pending < self._limit[order]
        if not more.all():
            order, computed, count, pending = order[more], computed[more], count[more], pending[more]
        if not 0 < len(order) <= self.max_num_scheduled_tokens:
            return None
        full = np.flatnonzero(computed >= self._slots[order])
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        if len(full) > free:
            return None  # something must be preempted
        ahead = AHEAD if free * self.block_size > 4 * AHEAD * len(order) else 1
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        new_blocks: list[Any] = [None] * len(order)
        for at in full:
            row = int(order[at])
            request = self._request[row]
            request.num_computed_tokens, request.num_in_flight_tokens = int(computed[at]), int(self._flying[row])
            left = int(self._limit[row] - count[at] - pending[at])
            blocks = self.kv_cache_manager.allocate_slots(request, min(ahead, left))
            assert blocks is not None
            new_blocks[at] = blocks.get_block_ids(allow_none=True)
            self._slots[row] = self._slots_of(request)
        ids = self._ids if more.all() else [self._ids[i] for i in np.flatnonzero(more)]
        step = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=new_blocks,
                num_computed_tokens=computed.tolist(),
                num_output_tokens=(count + pending).tolist(),
            ),
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            preempted_req_ids=self.reset_preempted_req_ids,
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )
        step.rlkit_rows = order  # type: ignore[attr-defined]
        self._computed[order] += 1
        self._flying[order] += 1
        if self._ahead:
            self._pending[order] += 1
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.clear()
            self.prev_step_scheduled_req_ids.update(ids)
        return step

    def _take_tokens(self, step: SchedulerOutput, output: Any) -> list[tuple[int, RequestStatus]]:
        """Keep the sampled tokens of a step; returns the rows that are finished by them, and how."""
        ids = output.req_ids
        rows = getattr(step, "rlkit_rows", None)
        if rows is None or ids != step.scheduled_cached_reqs.req_ids:
            rows = np.fromiter((self._row.get(i, -1) for i in ids), np.int64, len(ids))
        known = (rows >= 0) & self._alive[rows] if len(ids) else np.zeros(0, bool)
        scheduled = np.fromiter(map(step.num_scheduled_tokens.__getitem__, ids), np.int64, len(ids))
        self._flying[rows[known]] -= scheduled[known]
        tokens = np.full(len(ids), -1, np.int64)
        if output.sampled_token_ids:
            tokens[:] = [t[0] if t else -1 for t in output.sampled_token_ids]
        got = known & (tokens >= 0)
        for row in self._displaced.intersection(rows.tolist()):
            at = rows.tolist().index(row)
            self._settle(row, int(scheduled[at]), bool(got[at]))
        if not got.any():
            return []
        rows, tokens = rows[got], tokens[got]
        count = self._count[rows]
        self._tokens[rows, count] = tokens
        if self._logprobs is not None:
            self._logprobs[rows, count] = output.logprobs.logprobs[np.flatnonzero(got), 0]
        self._count[rows] = count + 1
        self._pending[rows] = np.maximum(self._pending[rows] - 1, 0)
        stopped = np.isin(tokens, self._stops)
        ended = stopped | (count + 1 >= self._limit[rows])
        return [
            (int(row), RequestStatus.FINISHED_STOPPED if by_token else RequestStatus.FINISHED_LENGTH_CAPPED)
            for row, by_token in zip(rows[ended], stopped[ended], strict=True)
        ]

    def _finish(self, row: int, status: RequestStatus) -> EngineCoreOutput:
        request = self._request[row]
        if row in self._displaced:
            self._displaced.discard(row)
            self.waiting.remove_requests([request])
        request.status = status
        self._alive[row] = False
        self._free_request(request)
        return EngineCoreOutput(request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason())

    def _wants_to_admit(self) -> bool:
        if not (self.waiting or self.skipped_waiting):
            return False
        free = self.max_num_running_reqs - len(self.running)
        return free >= max(1, self.max_num_running_reqs // ADMIT_SHARE)

    # ---- between the arrays and vLLM's Request objects

    def _write_back(self) -> None:
        """Tell the requests what the arrays know."""
        for row in self._order.tolist():
            request = self._request[row]
            request.num_computed_tokens = int(self._computed[row])
            request.num_in_flight_tokens = int(self._flying[row])
            request.num_output_placeholders = int(self._pending[row])
            self._append(row)
        for row in self._displaced:
            self._append(row)

    def _append(self, row: int) -> None:
        start, end = int(self._written[row]), int(self._count[row])
        if start < end:
            self._request[row].append_output_token_ids(self._tokens[row, start:end].tolist())
            self._written[row] = end

    def _read_again(self) -> None:
        """Fill the arrays from what vLLM's scheduler has decided."""
        before = set(self._order.tolist())
        self._ids = [r.request_id for r in self.running]
        self._order = np.fromiter((self._row[i] for i in self._ids), np.int64, len(self._ids))
        for row, request in zip(self._order.tolist(), self.running, strict=True):
            self._computed[row] = request.num_computed_tokens
            self._flying[row] = request.num_in_flight_tokens
            self._pending[row] = request.num_output_placeholders
            self._slots[row] = self._slots_of(request)
        now = set(self._order.tolist())
        self._displaced = {row for row in (self._displaced | before) - now if self._alive[row]}

    def _slots_of(self, request: Request) -> int:
        manager = self.kv_cache_manager.coordinator.single_type_managers[0]
        return len(manager.req_to_blocks[request.request_id]) * int(manager.block_size)

    def _settle(self, row: int, scheduled: int, sampled: bool) -> None:
        """The step of a request that was preempted while it ran is done: a token that it sampled is kept, and computed again later."""
        request = self._request[row]
        request.num_in_flight_tokens -= scheduled
        if sampled and request.num_output_placeholders:
            request.num_output_placeholders -= 1
        if getattr(request, "num_stale_output_tokens", 0):  # vLLM 0.30 holds the request back until none is left
            request.num_stale_output_tokens -= scheduled


class AsyncRolloutScheduler(RolloutScheduler, AsyncScheduler):
    """Asynchronous scheduling: a step is scheduled while the one before is running, its sampled tokens still unknown."""
