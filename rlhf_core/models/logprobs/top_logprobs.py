"""Reads a teacher's most probable tokens from hidden states, without a gradient and in chunks, like
`token_logprobs`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_core.models.logprobs.fp32_head import fp32_product
from rlhf_core.models.logprobs.teacher_kl import top_tokens
from rlhf_core.models.logprobs.token_logprobs import LOGITS_CHUNK, capped, logit_functions, replaced_forward


@torch.no_grad()
def top_logprobs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    count: int,
    cap: float | None = None,
    known: int | None = None,
    fp32: bool = False,
) -> Tensor:
    """Returns fp32 (1 + 2 k + 1, N): the log-probs of the targets, the IDs of the k most probable tokens,
    their log-probs, and the log-prob of all other tokens together. k is `count`, or the number of all tokens
    if that is smaller. IDs are exact in fp32 up to 16,777,216 tokens. The other arguments are as in
    `token_logprobs`.

    Raises ValueError for a head that is not linear.
    """
    if type(head) is not nn.Linear:
        raise ValueError(f"teacher_top_k reads a linear head, and the teacher's is a {type(head).__name__}")
    scale = 1 / temperature if temperature else 1.0
    product = fp32_product if fp32 else F.linear

    def read(hidden: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias[:known]
        parts = []
        for rows, wanted in zip(hidden.split(LOGITS_CHUNK), targets.split(LOGITS_CHUNK), strict=True):
            logits = capped(product(rows, head.weight[:known], bias), cap)
            of_chunk = logit_functions(logits)[1]
            logprobs, sums, _ = of_chunk(logits, wanted, scale, False)
            top = top_tokens(logits, sums, scale, count, of_chunk)
            parts.append(torch.cat([logprobs[:, None], top.ids.to(logprobs.dtype), top.logprobs], -1))
        return torch.cat(parts).t()

    with replaced_forward(head, read):
        found: Tensor = head(hidden)
    return found
