"""Makes texts of sampled tokens, all at once and only those that a reward source reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from rlhf_core.rewards.contract import Sample
from rlhf_core.stages.ppo.records import Rollout

Decode = Callable[[Sequence[Sequence[int]], bool], list[str]]  # tokens of each text, whether special tokens are left out


def decoder(tokenizer: Any) -> Decode:
    """Returns what decodes many texts, on all cores where the tokenizer can; the texts are those of `tokenizer.decode`."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return lambda rows, skip: [str(tokenizer.decode(list(row), skip_special_tokens=skip)) for row in rows]
    return lambda rows, skip: list(fast.decode_batch([list(row) for row in rows], skip_special_tokens=skip))


def samples(rollouts: Sequence[Rollout], decode: Decode, wanted: Collection[str]) -> list[Sample]:
    """Returns rollouts as reward sources see them. Texts that are not in `wanted` (`responses`, `query`) are empty."""
    nothing = [""] * len(rollouts)
    responses = decode([[] if rollout.messages else rollout.answer for rollout in rollouts], True) if "responses" in wanted else nothing
    queries = decode([rollout.document.tokens for rollout in rollouts], False) if "query" in wanted else nothing
    found = []
    for rollout, response, query in zip(rollouts, responses, queries, strict=True):
        prompt, answer = rollout.prompt.messages, response
        if rollout.messages:
            *before, last = rollout.messages if rollout.messages[-1]["role"] == "assistant" else (*rollout.messages, {"content": ""})
            prompt, answer = tuple(before), last["content"]
        found.append(Sample(prompt, answer, rollout.prompt.row, rollout.finished, query))
    return found
