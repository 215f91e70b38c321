"""The load-balancing loss of mixture-of-experts models.

Computed per document and averaged over the documents of an optimiser step (the sequence-wise form of DeepSeek-V3, section 2.1.2), so it
is the same for any split into micro-batches, packed or padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def balance_loss(router_logits: Sequence[Tensor], documents: Tensor, top_k: int) -> Tensor:
    """Returns the sum over documents of `E * sum_i f_i P_i`, averaged over layers (Fedus et al. 2021, eq. 4 to 6, on each document alone).

    router_logits: of each layer, (B * T, E). documents: (B, T), -1 on pads. f_i: times expert i was among a token's `top_k`, over the
    document's tokens; P_i: mean probability of expert i. Evenly used experts give `top_k` a document.
    """
    inside = documents.flatten() >= 0
    index = documents.flatten()[inside]
    count = int(index.max()) + 1
    lengths = torch.zeros(count, device=index.device).index_add(0, index, torch.ones_like(index, dtype=torch.float32))[:, None]
    total = torch.zeros((), device=index.device)
    for logits in router_logits:
        probabilities = torch.softmax(logits[inside].float(), -1)
        chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(top_k, -1).indices, 1.0)
        zeros = torch.zeros(count, probabilities.shape[1], device=index.device)
        used, mean = (zeros.index_add(0, index, x) / lengths for x in (chosen, probabilities))
        total = total + probabilities.shape[1] * (used * mean).sum()
    return total / len(router_logits)
