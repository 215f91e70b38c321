"""Makes an engine's ranks on one machine find each other through a file owned by this user."""

from __future__ import annotations

from rlhf_core.cluster.rank_environment import store_address


def apply() -> None:
    """Replaces the address that vLLM 0.24 gives to its ranks, which is a TCP store listening on all
    interfaces."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    for executor in (multiproc_executor, uniproc_executor):
        executor.get_distributed_init_method = lambda *_: store_address()
