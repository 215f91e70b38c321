"""The sampler's answers out of vLLM at little cost: on a fast GPU a step of a small model waits for the Python beside it.

vLLM ranks each sampled token among the whole vocabulary, cuts each step's arrays for each request, and lets its output processor see every
token of every answer when it is sampled. Here only the sampled token's log-prob is gathered, arrays stay as they come from a step, and
the output processor sees an answer once, when it is whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

OTHER_FORM = "this version of vLLM hands out {} in another way: install the version that the requirements name"


class Rows(NamedTuple):
    """Rows `start` to `end` of a step's arrays: one request's tokens of that step."""

    lists: Any
    start: int
    end: int


def keep_rows() -> None:
    """From now on vLLM cuts no arrays in this process: an answer keeps the `Rows` of its steps."""
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsLists

    def rows(self: Any, request: int, count: int) -> Rows:
        start = request if self.cu_num_generated_tokens is None else self.cu_num_generated_tokens[request]
        return Rows(self, start, start + count)

    def keep(self: Any, found: list[Rows]) -> None:
        vars(self.logprobs).setdefault("rows", []).extend(found)

    for owner, name, function in ((LogprobsLists, "slice_request", rows), (LogprobsProcessor, "_update_sample_logprobs", keep)):
        if not callable(getattr(owner, name, None)):
            raise RuntimeError(OTHER_FORM.format("log-probs"))
        setattr(owner, name, function)


def wait_for_whole_answers(engine: Any) -> None:
    """`engine`, vLLM's, hands its output processor one output for each answer, with all of its tokens, when it has ended.

    For requests without text and stop strings, of which vLLM must see every token at once.
    """
    processor = getattr(engine, "output_processor", None)
    process = getattr(processor, "process_outputs", None)
    if not callable(process):
        raise RuntimeError(OTHER_FORM.format("answers"))
    begun: dict[str, tuple[Any, list[Rows], list[np.ndarray]]] = {}

    def collect(outputs: list[Any], *others: Any, **named: Any) -> Any:
        whole = []
        for output in outputs:
            if (known := begun.get(output.request_id)) is None:
                known = begun[output.request_id] = output, [], []
            else:
                known[0].new_token_ids.extend(output.new_token_ids)
            if output.new_logprobs is not None:
                known[1].append(output.new_logprobs)
            if output.routed_experts is not None:
                known[2].append(output.routed_experts.copy())  # a view would keep its whole step's
            if output.finish_reason is not None:
                first, found, experts = begun.pop(output.request_id)
                first.finish_reason, first.stop_reason = output.finish_reason, output.stop_reason
                first.new_logprobs = found or None
                first.routed_experts = np.concatenate(experts) if experts else None
                whole.append(first)
        return process(whole, *others, **named)

    processor.process_outputs = collect  # type: ignore[union-attr]


def gather_sampled_alone(sampler: Any) -> None:
    """`sampler`, vLLM's, no longer ranks a token where no other than that token was asked for; its rank is then told as 0.

    The sampler of vLLM's second model runner, which it takes for some architectures, has ways of its own and is left alone.
    """
    with_ranks = getattr(sampler, "gather_logprobs", None)
    if with_ranks is None:
        return
    from vllm.v1.outputs import LogprobsTensors

    def gather(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> Any:
        if num_logprobs:
            return with_ranks(logprobs, num_logprobs, token_ids)
        ids = token_ids[:, None]
        return LogprobsTensors(ids.int(), logprobs.gather(-1, ids), torch.zeros_like(token_ids))

    sampler.gather_logprobs = gather


def sampled_logprobs(logprobs: Any, tokens: list[int]) -> list[float]:
    """The log-prob of each token of an answer; vLLM puts the sampled token in the first column.

    Raises RuntimeError when what vLLM returned does not speak of these tokens.
    """
    places = [(lists, row) for lists, start, end in vars(logprobs).get("rows", []) for row in range(start, end)]
    if [lists.logprob_token_ids.item(row, 0) for lists, row in places] != tokens:
        raise RuntimeError("vLLM's log-probs do not speak of the tokens it sampled: this version returns them in another form")
    return [lists.logprobs.item(row, 0) for lists, row in places]
