"""Attention inside documents with PyTorch's `scaled_dot_product_attention`, one document after the other: on any device, in any dtype.

It has the signature of the kernels of `choose.py`, and runs where those do not and there is no mask: sequence parallelism in fp32 or
without a GPU.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_each(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: int,
    longest_key: int,
    *,
    scale: float,
    window: int,
) -> Tensor:
    """Computes causal attention of queries (T, heads, D), keys and values (S, kv heads, D) -> (T, heads, D); the queries of a document are
    the last of its keys. `window`: how many tokens before it a token attends to (-1: all)."""
    attended = []
    for (start, end), (first, last) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        query, key, value = (rows.transpose(0, 1).unsqueeze(0) for rows in (q[start:end], k[first:last], v[first:last]))
        places = torch.arange(last - first, device=q.device)
        back = places[len(places) - (end - start) :, None] - places  # how far a key is before a query
        seen = None
        if window >= 0 or end - start != last - first:
            seen = (back >= 0) & ((back <= window) | (window < 0))
        found = F.scaled_dot_product_attention(query, key, value, seen, is_causal=seen is None, scale=scale, enable_gqa=True)
        attended.append(found.squeeze(0).transpose(0, 1))
    return torch.cat(attended)
