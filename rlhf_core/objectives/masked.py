"""Sums and averages over masked tokens and packed documents, and pairs each token with the position that
predicts it.

Per-token tensors have the shape of `tokens`, (B, T); `x[t]` belongs to token t. `mask` is True on the tokens
that count and may have holes. `documents` (B, T) int64 contains the index of each token's document within the
batch, -1 on padding. A document lies in one row without gaps, so the same functions work for padded and
packed batches. Values at other positions have no effect, even inf or nan, because `torch.where` replaces them
instead of multiplying them by zero. Inputs are fp32 (fp64 in tests). Nothing here reduces over ranks: sums
over tokens can be added over ranks, but means cannot.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlhf_core.objectives.collate import sent


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the scalar sum of `x` where `mask` is True. Both have the same shape, which is arbitrary."""
    return torch.where(mask, x, 0).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Returns the scalar mean of `x` where `mask` is True; 0 when the mask is empty."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def whiten(x: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Returns `(x - mean) / sqrt(var + eps)` over the tokens under the mask, with population variance; 0
    elsewhere.

    Pass the whole rollout of all ranks, because the statistics of one rank or micro-batch would differ. Sums
    and squares are in float64, so that the mean of equal numbers is exact and the squares of large or small
    numbers stay finite.
    """
    count = mask.sum().clamp(min=1)
    mean = (torch.where(mask, x, 0).sum(dtype=torch.float64) / count).to(x.dtype)
    centred = torch.where(mask, x - mean, 0)
    variance = centred.double().square().sum() / count
    return centred * torch.rsqrt(variance + eps).to(x.dtype)


def document_sum(x: Tensor, mask: Tensor, documents: Tensor, num_documents: int) -> Tensor:
    """Returns the sum of `x` (B, T) over the masked tokens of each document, (N,); 0 for a document without
    such tokens."""
    counted = mask & (documents >= 0)
    # All other tokens go to an extra entry: selecting tokens by the mask would make the host wait for the
    # GPU.
    into = torch.where(counted, documents, num_documents)
    return x.new_zeros(num_documents + 1).index_add(0, into.flatten(), torch.where(counted, x, 0).flatten())[
        :-1
    ]


def document_mean(x: Tensor, mask: Tensor, documents: Tensor, num_documents: int) -> Tensor:
    """Returns the mean of `x` (B, T) over the masked tokens of each document, (N,); 0 for a document without
    such tokens."""
    counts = document_sum(torch.ones_like(x), mask, documents, num_documents)
    return document_sum(x, mask, documents, num_documents) / counts.clamp(min=1)


def last_token_index(documents: Tensor, num_documents: int) -> Tensor:
    """Returns the index of each document's last token in the flattened batch, (N,) int64.

    Raises ValueError when a document has no token. GPU tensors are not checked, because the host would have
    to wait for the result; `collate` creates no such batch.
    """
    flat = documents.flatten()
    into = torch.where(flat >= 0, flat, num_documents)
    index = torch.full((num_documents + 1,), -1, dtype=torch.int64, device=flat.device)
    index = index.scatter_reduce(0, into, torch.arange(flat.numel(), device=flat.device), reduce="amax")[:-1]
    if not index.is_cuda and (index < 0).any():
        missing = (index < 0).nonzero().flatten().tolist()
        raise ValueError(
            f"documents {missing} of {num_documents} have no token in this batch: drop empty documents before"
            " collating"
        )
    return index


def gather_last(x: Tensor, documents: Tensor, num_documents: int) -> Tensor:
    """Returns the value of `x` (B, T) at the last token of each document, whether or not it is a response
    token, (N,)."""
    return x.flatten()[last_token_index(documents, num_documents)]


def next_token_pairs(positions: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns flat indices (2, N): row 1 holds each token under `mask` (B, T), row 0 the preceding token in
    its document.

    The model's output at the token in row 0 predicts the token in row 1. A document's first token is left
    out. The first token after a shared prompt follows that prompt's last token. The result is computed with
    numpy, in host memory, because PyTorch selects elements with all threads of the process, and for a pass of
    few tokens, starting the threads takes longer than the kernels.
    """
    width = positions.shape[1]
    flat = positions.cpu().numpy().ravel()
    places = np.flatnonzero(flat > 0 if mask is None else mask.cpu().numpy().ravel() & (flat > 0))
    sources = places - 1
    jumps = flat[sources] + 1 != flat[places]
    if jumps.any():
        trunks = np.maximum.accumulate(np.where(flat == 0, np.arange(len(flat)), 0))
        sources = np.where(jumps, trunks[places] + flat[places] - 1, sources)
    assert (sources // width == places // width).all(), "a shared prompt is in another row"
    return torch.from_numpy(np.stack([sources, places]))


def before(values: Tensor, positions: Tensor) -> Tensor:
    """Returns outputs (B, T) shifted by one token within each document: result[t] is the output at the token
    before t, which has not seen t.

    The result, (B, T), is 0 on padding and at the first token of each document.
    """
    sources, places = sent(next_token_pairs(positions), values.device)
    return (
        values.new_zeros(values.numel())
        .index_copy(0, places, values.flatten().index_select(0, sources))
        .view(values.shape)
    )
