"""Reads answers from vLLM's outputs and checks that their log-probs and experts belong to their tokens."""

from __future__ import annotations

from typing import Any

from rlhf_core.rollout.engine_contract import SampledAnswer, answer_of


def answer_in(request: Any) -> SampledAnswer:
    """Returns the answer from vLLM's output. Raises RuntimeError when its log-probs or experts do not match
    its tokens."""
    output = request.outputs[0]
    tokens = list(output.token_ids)
    experts = output.routed_experts
    logprobs = [] if output.logprobs is None else sampled_logprobs(output.logprobs, tokens)
    if experts is not None and (
        len(experts) != len(request.prompt_token_ids) + len(tokens) - 1 or not experts.any()
    ):
        raise RuntimeError("vLLM returned no routed experts for these tokens: set routing_replay to false")
    return answer_of(tokens, logprobs, output.finish_reason == "stop", experts)


def sampled_logprobs(logprobs: Any, tokens: list[int]) -> list[float]:
    """Returns the log-prob of each token of an answer from vLLM's FlatLogprobs, which lists the sampled token
    first.

    Raises RuntimeError when the log-probs belong to other tokens.
    """
    ids = [logprobs.token_ids[start] for start in logprobs.start_indices]
    if ids != tokens:
        raise RuntimeError(
            "vLLM returned log-probs of other tokens than those it sampled: install the version that the"
            " requirements name"
        )
    return [logprobs.logprobs[start] for start in logprobs.start_indices]
