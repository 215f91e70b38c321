"""Implements sequence parallelism: N ranks compute each pass together (Ulysses; Jacobs et al. 2023, section
3).

Rank i computes the i-th part of the tokens everywhere except in attention. For attention, an all-to-all gives
the rank all tokens for an N-th of the heads, so that kernels, document bounds and shared prompts are the same
as on one rank; another all-to-all returns the rank's own tokens. All ranks know the tokens of the whole pass.
The result for each token is computed by one rank and summed over all of them, so every rank computes the same
loss and differentiates it with respect to its own tokens. The gradients of the N ranks therefore add up to
the gradient of the pass, just as the gradients of different passes add up.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from rlhf_core.cluster.rank_environment import PATIENCE


class SequenceRanks(NamedTuple):
    """The ranks that compute passes together: their number, the index of this rank, and their process group
    (None: this rank is alone)."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def filled(self, rows: Tensor) -> Tensor:
        """Returns `rows` (T, ...), padded with zeros to a multiple of the number of ranks."""
        return (
            rows if self.size == 1 else F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, -len(rows) % self.size))
        )

    def own(self, rows: Tensor) -> Tensor:
        """Returns this rank's part of `rows` (T, ...), padded with zeros at the end; all rows if the rank is
        alone."""
        return self.filled(rows).chunk(self.size)[self.rank]

    def own_pairs(self, pairs: Tensor, count: int) -> Tensor:
        """Returns the `pairs` (2, n) whose source is on this rank, out of a pass of `count` tokens
        (`next_token_pairs`). Sources are then counted from the start of the rank's part; a target may lie in
        another part. Pairs are in host memory, for numpy."""
        if self.size == 1:
            return pairs
        length = -(-count // self.size)
        all_pairs = pairs.numpy()
        here = all_pairs[:, all_pairs[0] // length == self.rank]
        return torch.from_numpy(here - [[self.rank * length], [0]])

    def whole(self, own: Tensor, count: int) -> Tensor:
        """Returns the rows of all ranks (`count`, ...) from this rank's part (t, ...). The gradient is the
        gradient of this rank's rows."""
        if self.size == 1:
            return own
        before = self.rank * len(own)
        after = (self.size - 1 - self.rank) * len(own)
        return self.summed(F.pad(own, (0, 0) * (own.dim() - 1) + (before, after)))[:count]

    def summed(self, values: Tensor) -> Tensor:
        """Returns the sum of values over the ranks. The gradient of this rank's values equals the gradient of
        the sum, which every rank computes."""
        return values if self.size == 1 else cast(Tensor, _Summed.apply(values, self.group))

    def with_all_tokens(self, *states: Tensor) -> list[Tensor]:
        """Exchanges queries, keys and values, each (1, heads, t, D) of this rank's tokens, for (1, heads / N,
        T, D) of all tokens.

        If N does not divide the number of key heads, key heads are first repeated, so that each rank has the
        key heads for its query heads.
        """
        queries = states[0].shape[1]
        rows = []
        sizes = [state.shape[-1] for state in states]
        for state in states:  # to (N, t, heads / N x D)
            heads = self._heads(queries, state.shape[1], state.device)
            state = state if heads is None else state.index_select(1, heads)
            rows.append(state.squeeze(0).unflatten(0, (self.size, -1)).transpose(1, 2).flatten(2))
        # all tokens: the first dimension is the sending rank
        received = _Exchanged.apply(torch.cat(rows, -1), self.group).flatten(0, 1)
        parts = received.split([row.shape[-1] for row in rows], -1)
        return [
            part.unflatten(-1, (-1, size)).transpose(0, 1).unsqueeze(0)
            for part, size in zip(parts, sizes, strict=True)
        ]

    def with_all_heads(self, attended: Tensor) -> Tensor:
        """Exchanges (1, T, heads / N, D) of all tokens for (1, t, heads, D) of this rank's tokens."""
        # (N, t, heads / N, D)
        received = _Exchanged.apply(attended.squeeze(0).unflatten(0, (self.size, -1)), self.group)
        return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def _heads(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Returns the indices of the `keys` heads to send, in the order of the ranks; None if each is sent
        once."""
        if keys % self.size == 0:
            return None
        if self.size % keys == 0:
            return torch.arange(self.size, device=device) * keys // self.size
        return torch.arange(queries, device=device) * keys // queries


ALONE = SequenceRanks()


def sequence_ranks(size: int) -> SequenceRanks:
    """Groups neighbouring ranks by `size`, and returns this rank's group. This is a collective operation of
    all ranks and needs the default process group."""
    group, _ = dist.new_subgroups(size, timeout=PATIENCE)
    return SequenceRanks(size, dist.get_rank() % size, group)


class _Summed(torch.autograd.Function):
    """Sums the ranks' values. Passes gradients on unchanged, since they are equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Exchanged(torch.autograd.Function):
    """Sends `parts[i]` to rank i, and stacks the parts received from the ranks. The backward pass exchanges
    gradients in the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
