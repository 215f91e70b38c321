"""Samples tokens on a GPU with one read of the logits; vLLM's sampler reads or writes them about ten times.

On an H100 those take 1.0 ms of a decoding step of 256 answers (1.5B parameters, 151,936 tokens), a seventh of it. For batches in which
all answers are sampled from the whole distribution with the engine's own random numbers; others go through vLLM's code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf_core.rollout.patches.engine import applies

OWN_PROCESSORS = "vllm.v1.sample.logits_processor."  # module of those that do nothing unless a request asks for it


def read_logits_once(model_runner: Any) -> None:
    """Makes the sampler of vLLM's `model_runner` draw with `kernels.draw` where it can.

    Leaves it unchanged without a GPU, with logits processors of a user, and in vLLM's second model runner, which has a sampler like ours.
    """
    sampler = model_runner.sampler
    processors = getattr(getattr(model_runner, "input_batch", None), "logitsprocs", None)
    if not (applies() and torch.cuda.is_available() and hasattr(sampler, "topk_topp_sampler") and processors is not None):
        return
    if any(not type(one).__module__.startswith(OWN_PROCESSORS) for one in processors.all):
        return
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
    every start, and few runs use it. For these it is compiled at its first use. Another sampler than vLLM's first is left unchanged."""
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
