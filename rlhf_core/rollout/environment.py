"""What vLLM reads from the environment; set before its first import."""

from __future__ import annotations

import os


def set_vllm_environment(kv_cache_gib: float) -> None:
    """In-process engine (no second process to lose), no usage report, and a KV cache on CPU that does not take half the memory."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(kv_cache_gib)))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
