"""What vLLM reads from the environment; set before its first import."""

from __future__ import annotations

import os

from rlhf_core.machine import num_gpus


def set_vllm_environment(kv_cache_gib: float) -> None:
    """In-process engine (no second process to lose), no usage report, and a KV cache on CPU that does not take half the memory."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.update(quiet(kv_cache_gib))


def server_environment(kv_cache_gib: float) -> dict[str, str]:
    """The environment of a vLLM server, which has processes of its own: this one's without what would bind it to us.

    GPUs are those of this process (CUDA_VISIBLE_DEVICES is passed on); torch.distributed's variables would make it wait for others.
    """
    ours = ("VLLM_ENABLE_V1_MULTIPROCESSING", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    passed_on = {name: value for name, value in os.environ.items() if name not in ours}
    # The engine of a server is a process anyway; on CPU this spares it a worker process of its own, ten seconds of imports.
    lean = {} if num_gpus() else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return passed_on | quiet(kv_cache_gib) | lean | {"VLLM_LOGGING_LEVEL": "INFO", "PYTHONUNBUFFERED": "1"}


def quiet(kv_cache_gib: float) -> dict[str, str]:
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(kv_cache_gib))),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }
