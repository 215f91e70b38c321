"""Computes the KL from a student to a teacher over cells formed by the teacher's k most probable tokens.

Each of these tokens is its own cell, and all other tokens together form one more cell. With p and q the
masses that student and teacher give to the k + 1 cells, the KL of the cells is `sum p log(p / q)`. By the
data processing inequality it is at most the KL of the whole distributions; the two are equal if k is the size
of the vocabulary, or if the ratio p / q is the same for all tokens of the last cell. Its gradient with
respect to the student's logit of a token with probability p_j in cell c is `p_j (log(p_c / q_c) - KL)`. The
mass outside the k tokens is therefore also pulled towards the teacher's mass, and a student equal to the
teacher has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_core.objectives.collate import sent


@dataclass(frozen=True)  # DeepSpeed takes tuples apart
class TopTokens:
    """The k most probable tokens of N distributions. ids: int64, (N, k), distinct within each row. logprobs:
    fp32, (N, k + 1), the log-probs of the ids, followed by the log-prob of all other tokens together (-inf if
    there are none)."""

    ids: Tensor
    logprobs: Tensor

    def part(self, rows: slice) -> TopTokens:
        return TopTokens(self.ids[rows], self.logprobs[rows])

    def at(self, rows: Tensor) -> TopTokens:
        """Returns the tokens of the `rows` (M,), which are indices in host memory."""
        there = sent(rows, self.ids.device)
        return TopTokens(self.ids[there], self.logprobs[there])


def chunks_of(teacher: TopTokens | None, rows: int, size: int) -> list[TopTokens | None]:
    """Returns the teacher's tokens for each chunk of `size` rows; without a teacher, None for each chunk.
    There is always at least one chunk."""
    starts = range(0, max(1, rows), size)
    return [None if teacher is None else teacher.part(slice(start, start + size)) for start in starts]


def top_tokens(logits: Tensor, sums: Tensor, scale: float, count: int, read: Callable[..., Any]) -> TopTokens:
    """Returns the `count` most probable tokens of logits (N, V), or all V if there are fewer. `sums`, `read`:
    as in `cell_logprobs`."""
    ids = logits.topk(min(count, logits.shape[1]), -1).indices
    return TopTokens(ids, cell_logprobs(logits, ids, sums, scale, read))


def cell_logprobs(
    logits: Tensor, ids: Tensor, sums: Tensor, scale: float, read: Callable[..., Any]
) -> Tensor:
    """Returns log-probs (N, k + 1) fp32, as in `TopTokens`, of logits (N, V) times `scale`. `sums` (N, 2):
    each row's maximum and its log-sum-exp relative to the maximum. `read`: computes such sums from logits.

    The mass of the other tokens is summed directly, because 1 minus the mass of the k tokens would lose its
    digits. For this the logits of the k tokens are set to -inf temporarily, which avoids a copy. The result
    has no gradient.
    """
    own = logits.gather(-1, ids)
    likely = _at_least_fp32(own) * scale - sums[:, :1] - sums[:, 1:]
    if ids.shape[1] == logits.shape[1] or not len(logits):
        return _with_rest(likely, torch.full_like(sums[:, :1], float("-inf")))
    logits.scatter_(-1, ids, float("-inf"))
    _, rest, _ = read(logits, ids[:, 0].contiguous(), scale, False)
    logits.scatter_(-1, ids, own)
    return _with_rest(likely, (rest[:, :1] - sums[:, :1]) + (rest[:, 1:] - sums[:, 1:]))


def differentiable_cells(logits: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Works like `cell_logprobs`, but with a gradient, for logits that are not read by a kernel."""
    scaled = _at_least_fp32(logits) * scale
    total = scaled.logsumexp(-1, keepdim=True)
    likely = scaled.gather(-1, ids) - total
    if ids.shape[1] == logits.shape[1]:
        return _with_rest(likely, torch.full_like(total, float("-inf")))
    return _with_rest(likely, scaled.scatter(-1, ids, float("-inf")).logsumexp(-1, keepdim=True) - total)


def _with_rest(likely: Tensor, rest: Tensor) -> Tensor:
    return torch.cat([likely, rest], -1)


def log_ratios(own: Tensor, teacher: Tensor) -> Tensor:
    """Returns `log(p / q)` of each cell (N, k + 1), 0 for a cell without tokens."""
    return torch.where(own == float("-inf"), 0, own - teacher)


def cells_kl(own: Tensor, teacher: Tensor) -> Tensor:
    """Returns the KL (N,), nats, from the log-probs of the student's cells and the teacher's, (N, k + 1)."""
    return (own.exp() * log_ratios(own, teacher)).sum(-1)


class CellGradients(NamedTuple):
    """The gradients of N losses with respect to the target's log-prob `for_logprob`, the entropy
    `for_entropy` (None: not in the loss) and the KL `for_kl`, all (N,); the cells of student and teacher, (N,
    k + 1); and the targets' log-probs and the entropies (N,)."""

    for_logprob: Tensor
    for_entropy: Tensor | None
    for_kl: Tensor
    own: Tensor
    teacher: TopTokens
    logprobs: Tensor
    entropies: Tensor

    def part(self, rows: slice) -> CellGradients:
        return CellGradients(
            self.for_logprob[rows],
            None if self.for_entropy is None else self.for_entropy[rows],
            self.for_kl[rows],
            self.own[rows],
            self.teacher.part(rows),
            self.logprobs[rows],
            self.entropies[rows],
        )

    def of_rest(self) -> Tensor:
        """Returns the gradient, (N,), with respect to a log-prob that gives the same gradients as the loss
        for the logits of all tokens except targets and ids: both are a number times the token's
        probability."""
        ratios = log_ratios(self.own, self.teacher.logprobs)
        kl = (self.own.exp() * ratios).sum(-1)
        return self.for_logprob - self.for_kl * (ratios[:, -1] - kl)

    def write(self, grads: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Writes the gradients of the logits of targets and ids into `grads` (N, V), and returns it.

        They are computed in fp32 and rounded once. Adding a correction to the gradient written for `of_rest`
        would keep its rounding error, which for an improbable target is larger than the gradient itself.
        """
        ids = self.teacher.ids
        ratios = log_ratios(self.own, self.teacher.logprobs)
        kl = (self.own.exp() * ratios).sum(-1, keepdim=True)
        of_target = self._at(self.logprobs[:, None], torch.ones_like(kl), ratios[:, -1:] - kl)
        grads.scatter_(-1, targets[:, None], (of_target * scale).to(grads.dtype))
        is_target = (ids == targets[:, None]).to(kl.dtype)
        of_ids = self._at(self.own[:, :-1], is_target, ratios[:, :-1] - kl)
        return grads.scatter_(-1, ids, (of_ids * scale).to(grads.dtype))

    def _at(self, logp: Tensor, is_target: Tensor, above_kl: Tensor) -> Tensor:
        """Returns the gradients of scaled logits (N, m) of tokens with log-probs `logp`."""
        p = logp.exp()
        found = self.for_logprob[:, None] * (is_target - p) + self.for_kl[:, None] * p * above_kl
        if self.for_entropy is not None:
            found = found - self.for_entropy[:, None] * p * (logp + self.entropies[:, None])
        return found


def _at_least_fp32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
