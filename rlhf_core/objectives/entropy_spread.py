"""Percentiles of the policy's entropy over the tokens of an optimiser step, from counts that ranks can add.

The counts are of bins whose edges grow by 3.3 %, so a percentile is off by at most 1.7 % of its value. The
host does not wait for the GPU before all counts are added.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

PERCENTILES = (10, 50, 90)
LEAST, MOST = 1e-6, 16.0  # nats; the entropy of 260,000 equal probabilities is 12.5
EDGES = torch.from_numpy(np.geomspace(LEAST, MOST, 511, dtype=np.float32))
# what a token in a bin counts as: the geometric mean of its edges; below LEAST 0, from MOST on MOST
CENTRES = np.concatenate([[0.0], np.sqrt(EDGES[:-1].numpy() * EDGES[1:].numpy()), [MOST]])


@cache
def edges_on(device: torch.device) -> Tensor:
    """Returns the edges on a device, copied once: the host waits for a copy."""
    return EDGES.to(device)


def entropy_counts(entropy: Tensor, mask: Tensor) -> Tensor:
    """Returns how many tokens under the mask are in each bin, (512,) fp32. `entropy`, `mask`: (B, T)."""
    bins = torch.bucketize(entropy.detach().flatten(), edges_on(entropy.device), right=True)
    counts = torch.zeros(len(CENTRES), device=entropy.device)
    return counts.index_add(0, bins, mask.flatten().to(counts.dtype))


def entropy_percentiles(counts: Tensor) -> dict[str, float]:
    """Returns the percentiles of the entropy (nats a token): for each the smallest bin up to which that share
    of the tokens lies. `counts` (512,): of all micro-batches and ranks, at least one token."""
    upto = counts.double().cpu().numpy().cumsum()
    places = [int(np.searchsorted(upto, upto[-1] * at / 100)) for at in PERCENTILES]
    return {
        f"policy/entropy_p{at}": float(CENTRES[place]) for at, place in zip(PERCENTILES, places, strict=True)
    }
