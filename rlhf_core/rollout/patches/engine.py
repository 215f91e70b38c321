"""Changes private parts of vLLM. Everything here is for the releases in MADE_FOR; with another one vLLM is left as it is.

- `find_ranks_in_a_file`: ranks of one machine find each other in a file; vLLM 0.24 opens a port on all interfaces.
- `memory_for_cache`: an engine measures only its own memory; vLLM measures the whole GPU, which other roles use too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlhf_core.cluster.rank_environment import store_address

MADE_FOR = ("0.24.", "0.32.")
BESIDES = 2 * 2**30  # bytes besides PyTorch's: CUDA's own, NCCL's, graphs


def applies(releases: tuple[str, ...] = MADE_FOR) -> bool:
    """Returns whether the installed vLLM is one of these releases."""
    import vllm

    return str(vllm.__version__).startswith(releases)


def find_ranks_in_a_file() -> None:
    """Makes engines of one machine find their ranks in a file of this user, as vLLM does from 0.32 on, and not in a store that listens on
    all interfaces. Call it before the engine starts."""
    if not applies():
        return
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    for executor in (multiproc_executor, uniproc_executor):
        executor.get_distributed_init_method = lambda *_: store_address()


def memory_for_cache(worker: Any, run_largest_batch: Callable[[], object]) -> int:
    """Returns the bytes for the KV cache: of the worker's share of the GPU what its own process has not used.

    vLLM compares the GPU's free memory before and after a largest batch, and stops when more is free afterwards, for example because
    another role has sharded its model meanwhile or moved it to the host. Raises ValueError when nothing is left.
    """
    weights, before = sum(weight.nbytes for weight in worker.model_runner.get_model().parameters()), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    worker.cache_config.kv_cache_memory_bytes = 1  # given a size, vLLM runs its largest batch and measures nothing
    run_largest_batch()
    peak = torch.cuda.max_memory_allocated()
    taken = max(peak, weights + peak - before) + BESIDES  # weights of an engine that can sleep may be outside PyTorch's count
    left = int(worker.requested_memory) - taken
    if left <= 0:
        raise ValueError(
            f"weights, the largest batch and {BESIDES / 2**30:g} GiB for CUDA, NCCL and graphs take {taken / 2**30:.1f} GiB, and "
            f"vllm.gpu_memory_utilization grants {worker.requested_memory / 2**30:.1f}: raise it"
        )
    worker.cache_config.kv_cache_memory_bytes = left
    return left
