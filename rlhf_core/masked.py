"""Sums and means over masked tokens and packed documents, and which token speaks of which.

Per-token tensors have the shape of `tokens`, (B, T); `x[t]` speaks of token t. `mask` is True on the tokens that count and
may have holes. `documents` (B, T) int64 holds the index of each token's document within the batch, -1 on padding; a document
lies in one row, without gaps, so a padded batch and a packed one go through the same functions.
What stands at uncounted positions never matters, be it inf or nan: it is selected away, not multiplied by zero.
Inputs are fp32 (fp64 in tests). Left out: reductions over ranks. A sum over tokens adds up over ranks; means are the caller's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_core.data.collate import sent


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of `x` where `mask`; both of any equal shape. Returns a scalar."""
    return torch.where(mask, x, 0).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` where `mask`; 0 when nothing counts. Returns a scalar."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """`(x - mean) / sqrt(var + eps)` over the counted tokens, each weighing the same (population variance); 0 elsewhere.

    `x` and `mask` hold the whole rollout of all ranks: the statistics of one rank or one micro-batch are other statistics.
    """
    mean = masked_mean(x, mask)
    variance = masked_mean((x - mean).square(), mask)
    return torch.where(mask, (x - mean) * torch.rsqrt(variance + eps), 0)


def document_sum(x: Tensor, mask: Tensor, documents: Tensor, num_documents: int) -> Tensor:
    """Sum of `x` (B, T) over the counted tokens of each document. Returns (N,); 0 for a document in which nothing counts."""
    counted = mask & (documents >= 0)
    into = torch.where(counted, documents, num_documents)  # one more, for what does not count: picking tokens waits for a GPU
    return x.new_zeros(num_documents + 1).index_add(0, into.flatten(), torch.where(counted, x, 0).flatten())[:-1]


def document_mean(x: Tensor, mask: Tensor, documents: Tensor, num_documents: int) -> Tensor:
    """Mean of `x` (B, T) over the counted tokens of each document. Returns (N,); 0 for a document in which nothing counts."""
    counts = document_sum(torch.ones_like(x), mask, documents, num_documents)
    return document_sum(x, mask, documents, num_documents) / counts.clamp(min=1)


def last_token_index(documents: Tensor, num_documents: int) -> Tensor:
    """Position of each document's last token in the flattened batch. Returns (N,) int64.

    Raises ValueError when a document has no token: there is no value to read for it. Of tensors on a GPU that is not asked, since the host
    would have to wait for it; `collate` makes no such batch.
    """
    flat = documents.flatten()
    into = torch.where(flat >= 0, flat, num_documents)
    index = torch.full((num_documents + 1,), -1, dtype=torch.int64, device=flat.device)
    index = index.scatter_reduce(0, into, torch.arange(flat.numel(), device=flat.device), reduce="amax")[:-1]
    if not index.is_cuda and (index < 0).any():
        missing = (index < 0).nonzero().flatten().tolist()
        raise ValueError(f"documents {missing} of {num_documents} have no token in this batch: drop empty documents before collating")
    return index


def gather_last(x: Tensor, documents: Tensor, num_documents: int) -> Tensor:
    """Value of `x` (B, T) at the last token of each document, response or not. Returns (N,)."""
    return x.flatten()[last_token_index(documents, num_documents)]


def spoken(positions: Tensor, mask: Tensor | None = None) -> Tensor:
    """Flat indices, (2, N): of the tokens that speak, and of those under `mask` (B, T) that they speak of, the next of their documents.

    Nobody speaks of a document's first token. Of the first that follows a shared prompt that prompt's last token speaks.
    """
    width, flat = positions.shape[1], positions.flatten()
    places = ((flat > 0) if mask is None else mask.flatten() & (flat > 0)).nonzero().squeeze(-1)
    sources = places - 1
    jumps = flat[sources] + 1 != flat[places]
    if jumps.any():
        trunks = torch.where(flat == 0, torch.arange(len(flat), device=flat.device), 0).cummax(0).values
        sources = torch.where(jumps, trunks[places] + flat[places] - 1, sources)
    assert bool((sources // width == places // width).all()), "a document goes on from one of its own row"
    return torch.stack([sources, places])


def before(values: Tensor, positions: Tensor) -> Tensor:
    """Turn outputs `values[t]` (B, T) that have seen token t into what was said before it was seen, (B, T): 0 at first tokens and on pads.

    Nothing crosses from one document to the next.
    """
    sources, places = sent(spoken(positions), values.device)
    return values.new_zeros(values.numel()).index_copy(0, places, values.flatten().index_select(0, sources)).view(values.shape)
