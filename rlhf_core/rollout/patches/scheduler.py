"""Schedules steps in which every request decodes one token, with less Python work than vLLM's own scheduler.

With a small model on a fast GPU the host decides how long such a step takes, and vLLM spends about 15 microseconds of it on each request.
Requests that begin, end, are preempted or need more than their next token go through vLLM's own code. For the releases in
`patches.engine.MADE_FOR`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from rlhf_core.system import progress

# Parts of a step's output that vLLM's own code has to read.
BEYOND = ("pooler_output", "prompt_logprobs_dict", "num_nans_in_logits", "kv_connector_output", "ec_connector_output", "routed_experts")


class Kept(NamedTuple):
    """Holds the tokens of a request, and where their log-probs are, that vLLM's output processor has not got. A token of `ends`, or one
    that makes prompt and answer `limit` long, ends the answer."""

    tokens: list[int]
    logprobs: list[Any]
    ends: frozenset[int | None]
    limit: int
    wanted: bool  # log-probs


def plain(scheduler: Any) -> bool:
    """Returns whether a scheduler has to look after tokens and their KV blocks alone: no drafts, adapters, states or transfers."""
    others = (scheduler.connector, scheduler.ec_connector, getattr(scheduler, "aux_output_connector", None), scheduler.lora_config)
    special = (
        *(scheduler.use_pp, scheduler.is_encoder_decoder, scheduler.num_spec_tokens, scheduler.num_lookahead_tokens),
        *(scheduler.has_mamba_layers, scheduler.needs_kv_cache_zeroing, scheduler.defer_block_free),
        *(scheduler.enable_kv_cache_events, getattr(scheduler, "enable_return_routed_experts", False), scheduler.log_stats),
        scheduler.finished_req_ids_dict is not None,
        len(scheduler.kv_cache_config.kv_cache_groups) != 1,
    )
    return not any(other is not None for other in others) and not any(special)


class QuickScheduler(Scheduler):
    """vLLM's scheduler, with quick steps."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self.quick_steps = 0
        self._plain = plain(self)
        if self._plain:
            (manager,) = self.kv_cache_manager.coordinator.single_type_managers
            self._block = manager.block_size
            self._ahead = isinstance(self, AsyncScheduler)
            # Names of the release: tokens in flight are counted or not, and so are those of a request that was preempted meanwhile.
            self._counts = "num_in_flight_tokens" in Request.__init__.__code__.co_names
            self._stale = "num_stale_output_tokens" if self._counts else "async_tokens_to_discard"

    def schedule(self: Any, *arguments: Any) -> SchedulerOutput:
        """Returns a step of one token for each running request that has not all of its tokens; else what vLLM schedules."""
        if (requests := self._decoding()) is None:
            return super().schedule(*arguments)
        self.quick_steps += 1
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        ids = [request.request_id for request in requests]
        blocks = [None if r.num_computed_tokens % self._block else self.kv_cache_manager.allocate_slots(r, 1) for r in requests]
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None if new is None else new.get_block_ids(allow_none=True) for new in blocks],
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            num_output_tokens=[len(request._output_token_ids) + request.num_output_placeholders for request in requests],
        )
        output.num_scheduled_tokens = dict.fromkeys(ids, 1)
        output.total_num_scheduled_tokens = len(ids)
        output.finished_req_ids = self.finished_req_ids
        output.free_encoder_mm_hashes = self.encoder_cache_manager.get_freed_mm_hashes()
        if hasattr(output, "num_common_prefix_blocks"):
            output.num_common_prefix_blocks = self.kv_cache_manager.get_num_common_prefix_blocks(ids[0])
        self.prev_step_scheduled_req_ids = set(ids)
        self._update_after_schedule(output)
        output.quick = True
        return output

    def _decoding(self: Any) -> list[Any] | None:
        """Returns the requests of a quick step; None where vLLM's own scheduler has to decide."""
        others = self.get_request_counts()[1] or getattr(self, "reset_preempted_req_ids", None)
        if not self._plain or others or self._pause_state.value or not 0 < len(self.running) <= self.max_num_scheduled_tokens:
            return None
        requests, new_blocks, last, scheduled = [], 0, self.max_model_len - 2, self.prev_step_scheduled_req_ids
        for request in self.running:
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            if ahead and computed + 2 - ahead >= request.num_prompt_tokens + request.max_tokens:
                continue  # its last token is on its way
            if len(request._all_token_ids) + ahead - computed != 1 or request.spec_token_ids or computed >= last:
                return None
            if request.request_id not in scheduled and not self.use_v2_model_runner:
                return None
            new_blocks += computed % self._block == 0
            requests.append(request)
        return requests if requests and new_blocks <= self.kv_cache_manager.block_pool.get_num_free_blocks() else None

    def update_from_output(self: Any, scheduled: SchedulerOutput, output: Any) -> dict[int, Any]:
        """Appends the sampled tokens of a quick step. Returns what vLLM's output processor has to know: the answers that end."""
        others = scheduled.num_scheduled_tokens
        if (
            getattr(scheduled, "quick", False)
            and not output.prompt_logprobs_dict
            and not any(getattr(output, name, None) for name in BEYOND)
        ):
            progress.made()
            rows, sampled, logprobs = output.req_id_to_index, output.sampled_token_ids, output.logprobs
            others = {key: 1 for key in others if not self._append(self.requests.get(key), sampled[rows[key]], logprobs, rows[key])}
            if not others:
                return {}
            scheduled = replace(scheduled, num_scheduled_tokens=others)
        kept = {key: before for key in others if key in self.requests and (before := vars(self.requests[key]).pop("kept", None))}
        found = super().update_from_output(scheduled, output)
        for part in found.values():
            for answer in part.outputs:
                if before := kept.pop(answer.request_id, None):
                    answer.new_token_ids = [*before.tokens, *answer.new_token_ids]
                    answer.new_logprobs = [*before.logprobs, *(answer.new_logprobs or [])] or None
        for key, before in kept.items():  # vLLM had no output of them
            if key in self.requests:
                self.requests[key].kept = before
        return found

    def _append(self: Any, request: Any, tokens: list[int], logprobs: Any, row: int) -> bool:
        """Appends a token that ends nothing to its request, and keeps it. Returns False, with nothing done, where vLLM has to."""
        if request is None or len(tokens) != 1 or request.status != RequestStatus.RUNNING or getattr(request, self._stale):
            return False
        (token,), known = tokens, len(request._all_token_ids) + 1
        kept = request.__dict__.get("kept") or self._begun(request)
        if kept is None or known >= kept.limit or token in kept.ends:
            return False
        request._output_token_ids.append(token)
        request._all_token_ids.append(token)
        if known % self._block == 0:
            request.update_block_hashes()
        if self._ahead:
            request.num_output_placeholders -= 1
            computed = request.num_computed_tokens - request.num_output_placeholders
            if computed % self._block == 0:
                self.kv_cache_manager.cache_blocks(request, computed)
        if self._counts:
            request.num_in_flight_tokens -= 1
        kept.tokens.append(token)
        if kept.wanted and logprobs:
            kept.logprobs.extend(logprobs.slice_request(row, 1))
        return True

    def _begun(self: Any, request: Any) -> Kept | None:
        """Returns what is kept of a request from now on; None where every token is of interest, as to stop texts."""
        params = request.sampling_params
        if params is None or params.stop or params.min_tokens or params.repetition_detection or request.structured_output_request:
            return None
        limit = min(self.max_model_len, request.num_prompt_tokens + request.max_tokens)
        ends = frozenset({params.eos_token_id, *(params.stop_token_ids or ())})
        request.kept = Kept([], [], ends, limit, params.num_logprobs is not None)
        return request.kept


class QuickAsyncScheduler(QuickScheduler, AsyncScheduler):
    """vLLM's scheduler of a step ahead of the GPU, with quick steps."""


def scheduler_for(vllm_config: VllmConfig, **named: Any) -> Scheduler:
    """Makes the scheduler of an engine. vLLM calls it by its name (option `scheduler_cls`)."""
    kind = QuickAsyncScheduler if vllm_config.scheduler_config.async_scheduling else QuickScheduler
    return kind(vllm_config=vllm_config, **named)
