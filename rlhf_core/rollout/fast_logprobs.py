"""The sampler's log-probs out of vLLM at little cost: on a fast GPU a step of a small model waits for the Python beside it.

vLLM ranks each sampled token among the whole vocabulary, and appends each token's log-prob, rank and text to lists one at a time. Here
only the sampled token's log-prob is gathered, and the arrays that come back from a step are kept as they are until an answer is whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def keep_arrays() -> None:
    """From now on vLLM's output processor in this process keeps, for each answer, the arrays of its steps."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    def keep(self: Any, lists: Any) -> None:
        kept = vars(self.logprobs)
        kept.setdefault("step_tokens", []).append(lists[0])
        kept.setdefault("step_logprobs", []).append(lists[1])

    if not callable(getattr(LogprobsProcessor, "_update_sample_logprobs", None)):
        raise RuntimeError("this version of vLLM hands out log-probs in another way: install the version that the requirements name")
    LogprobsProcessor._update_sample_logprobs = keep


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
    kept = vars(logprobs)
    if not tokens and "step_tokens" not in kept:
        return []
    if "step_tokens" not in kept or np.concatenate(kept["step_tokens"])[:, 0].tolist() != tokens:
        raise RuntimeError("vLLM's log-probs do not speak of the tokens it sampled: this version returns them in another form")
    found: list[float] = np.concatenate(kept["step_logprobs"])[:, 0].tolist()
    return found
