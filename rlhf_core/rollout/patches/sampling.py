"""Samples tokens on a GPU with one read of the logits; vLLM's sampler reads or writes them about ten times.

On an H100 those take 1.0 ms of a decoding step of 256 answers (1.5B parameters, 151,936 tokens), a seventh of it. For batches in which
all answers are sampled from the whole distribution with the engine's own random numbers; others go through vLLM's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_core.rollout.patches.engine import applies

OF_SECOND_RUNNER, SECOND_RUNNER_OF = "vllm.v1.worker.gpu.sample.sampler", ("0.24.",)
NEVER = -1e30  # a logit; finite, so that a block of them in `kernels.draw` has a maximum
OWN_PROCESSORS = "vllm.v1.sample.logits_processor."  # module of those that do nothing unless a request asks for it


def read_logits_once(model_runner: Any) -> None:
    """Makes the sampler of vLLM's `model_runner` draw with `kernels.draw` where it can.

    Leaves it unchanged without a GPU and with logits processors of a user; of vLLM's second model runner (which takes none in 0.24) that
    of other releases than 0.24.
    """
    if not (applies() and torch.cuda.is_available()):
        return
    sampler = model_runner.sampler
    processors = getattr(getattr(model_runner, "input_batch", None), "logitsprocs", None)
    if type(sampler).__module__ == OF_SECOND_RUNNER:
        if applies(SECOND_RUNNER_OF):
            _draw_in_second_runner(sampler)
    elif hasattr(sampler, "topk_topp_sampler") and processors is not None:
        if all(type(one).__module__.startswith(OWN_PROCESSORS) for one in processors.all):
            _draw_in_first_runner(sampler)


def leave_out_padding(model: Any, known: int) -> None:
    """Makes a model of vLLM give every token from number `known` on a logit that has no probability, in samples and in log-probs.

    A method of all of vLLM's models, which both of its model runners call, computes the logits; on some ranks it returns None.
    """
    as_before = model.compute_logits

    def compute_logits(*states: Any, **named: Any) -> Any:
        logits = as_before(*states, **named)
        if logits is not None:
            logits[..., known:] = max(NEVER, torch.finfo(logits.dtype).min)
        return logits

    model.compute_logits = compute_logits


def _draw_in_first_runner(sampler: Any) -> None:
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    from rlhf_core.models.kernels.draw import draw

    as_before = sampler.forward

    def forward(logits: Tensor, sampling_metadata: Any, *others: Any, **named: Any) -> Any:
        if others or named or not samples_all(sampling_metadata):
            return as_before(logits, sampling_metadata, *others, **named)
        tokens, logprobs = draw(logits, sampling_metadata.temperature)
        wanted = sampling_metadata.max_num_logprobs is not None
        found = LogprobsTensors(tokens[:, None], logprobs[:, None], torch.zeros_like(tokens, dtype=torch.int64)) if wanted else None
        return SamplerOutput(sampled_token_ids=tokens[:, None], logprobs_tensors=found)

    sampler.forward = forward


def _draw_in_second_runner(sampler: Any) -> None:
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    from rlhf_core.models.kernels.draw import draw

    as_before = type(sampler)

    def call(self: Any, logits: Tensor, batch: Any) -> Any:
        if not draws_all(self, len(logits), batch.idx_mapping_np):
            return as_before.__call__(self, logits, batch)
        states = self.sampling_states
        tokens, logprobs = draw(logits, states.temperature.gpu[batch.idx_mapping])
        ids, found = tokens[:, None].long(), None
        if states.max_num_logprobs(batch.idx_mapping_np) == 0:
            found = LogprobsTensors(ids, logprobs[:, None], torch.zeros_like(ids[:, 0]))
        # A prompt that is read in parts gets no token before its last part.
        places = batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, self.req_states.prefill_len.gpu
        sampled, rejected = get_num_sampled_and_rejected(batch.seq_lens.new_ones(len(logits)), *places)
        return SamplerOutput(sampled_token_ids=ids, logprobs_tensors=found, num_nans=None, num_sampled=sampled, num_rejected=rejected)

    sampler.__class__ = type("Drawing", (as_before,), {"__call__": call})


def draws_all(sampler: Any, count: int, rows: np.ndarray) -> bool:
    """Returns what `samples_all` says, of a sampler of vLLM's second model runner that is to sample `count` tokens for requests `rows`."""
    states = sampler.sampling_states
    changed = (
        *(sampler.compute_nans, sampler.logprobs_mode != "processed_logprobs", count != len(rows)),
        *(states.any_greedy(rows), states.any_explicit_seed(rows), states.max_num_logprobs(rows) > 0),
        *(sampler.penalties_state.use_penalty[rows].any(), sampler.logit_bias_state.use_logit_bias[rows].any()),
        *(sampler.bad_words_state.num_bad_words.np[rows].any(), sampler.logprob_token_ids_state.max_num_token_ids(rows)),
        *((states.top_k.np[rows] != states.vocab_size).any(), (states.top_p.np[rows] != 1).any(), states.min_p.np[rows].any()),
    )
    return not any(changed)


def samples_all(asked: Any) -> bool:
    """Returns whether a batch (vLLM's SamplingMetadata) samples every answer from the whole distribution, with the engine's own random
    numbers, and wants the log-prob of no other token."""
    changed = (
        *(asked.generators, asked.bad_words_token_ids, asked.logprob_token_ids, asked.max_num_logprobs),
        *(not asked.all_random, not asked.no_penalties),
    )
    cut = (asked.top_p, asked.top_k, asked.allowed_token_ids_mask)
    thinking = asked.thinking_budget_state_holder
    return not any(changed) and all(one is None for one in cut) and not (thinking is not None and thinking.has_tracked_requests())


@contextmanager
def whole_distributions(sampler: Any) -> Iterator[None]:
    """Within the block `sampler` ignores top-k and top-p, which vLLM's largest batch asks for: their kernel takes ten seconds to compile at
    every start, and few runs use it. For these it is compiled at its first use."""
    if not hasattr(sampler, "topk_topp_sampler"):
        yield
        return
    as_before = sampler.forward

    def forward(logits: Tensor, sampling_metadata: Any, *others: Any, **named: Any) -> Any:
        return as_before(logits, replace(sampling_metadata, top_k=None, top_p=None), *others, **named)

    sampler.forward = forward
    try:
        yield
    finally:
        del sampler.forward
