"""Describes what DeepSpeed ZeRO shards at each stage, and how much memory its optimiser takes. Torch-free.

Stage 1 shards the optimiser's state, stage 2 also gradients, stage 3 also weights (Rajbhandari et al. 2020,
section 3.1).
"""

from __future__ import annotations

from rlhf_core.config.training.sharding import OptimiserBytes, Sharding, Training
from rlhf_core.system.gpu_allocator import ROUNDED, pinned_bytes

SUBGROUP = 1e9  # parameters whose fp32 gradients ZeRO-3 holds in one block of pinned memory


def _on_gpu(how: Training, count: float, largest: float) -> OptimiserBytes:
    stage = how.sharding.stage
    per_rank = count / how.ranks
    kept = 4 * per_rank  # memory that the allocator holds back
    sums = 0.0
    # fp32 sums of this rank's share, and under ZeRO-1 of everything before, in fp32 buckets; otherwise bf16
    # buckets
    buckets = 2e9
    if how.sums_in_fp32:
        sums = 4 * per_rank
    if how.sums_in_fp32 and stage == 1:
        sums = sums + 4 * count
        buckets = 4e9
    # in addition: the largest weight's gradient, space for its copy, and its fp64 form for the norm
    if how.offload and stage < 3:
        return OptimiserBytes(2 * largest, buckets + (2 + 8) * largest + sums)
    if how.offload:
        return OptimiserBytes(0.0, 1e9)
    if stage == 3:  # its gradients have their own space from the start
        return OptimiserBytes((12 + (4 if how.sums_in_fp32 else 2)) * per_rank + kept, 4 * per_rank)
    if how.sums_in_fp32:  # the step uses the sums directly
        return OptimiserBytes(12 * per_rank + kept, buckets + sums)
    gradients = 2 * count if stage == 1 else 2 * per_rank
    return OptimiserBytes(12 * per_rank + kept, gradients + 4 * per_rank)


def _on_host(how: Training, share: float, largest: float) -> float:
    """Returns the bytes that DeepSpeed's Adam takes on the host for `share` parameters. Unpinned memory holds
    two fp32 moments and, under ZeRO-3, fp32 weights. Pinned memory holds fp32 gradients; the gradients summed
    over passes, in bf16 or, under ZeRO-3, also in fp32; and, under ZeRO-1 and 2, fp32 weights, their bf16
    form, and the largest weight."""
    if how.sharding.stage == 3:
        added = (4 if how.sums_in_fp32 else 2) * share
        return 12 * share + pinned_bytes(added) + share / SUBGROUP * pinned_bytes(4 * SUBGROUP)
    flat = 2 * pinned_bytes(4 * share) + pinned_bytes(2 * share)
    added = 0.0 if how.sums_in_fp32 else ROUNDED * 2 * share  # fp32 sums are on the GPU
    return 8 * share + flat + added + pinned_bytes(2 * largest)


ZERO_1 = Sharding(
    stage=1,
    backend="zero",
    weights=False,
    gradients=False,
    state=True,
    launch=0.0068,
    on_gpu=_on_gpu,
    on_host=_on_host,
)
ZERO_2 = ZERO_1._replace(stage=2, gradients=True)
ZERO_3 = ZERO_2._replace(stage=3, weights=True, launch=0.0092)
