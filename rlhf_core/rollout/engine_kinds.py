"""Starts an engine of the kind that the recipe names."""

from __future__ import annotations

from typing import Any

from rlhf_core.config.engines import EngineConfig
from rlhf_core.rollout.engine_contract import RolloutEngine


def import_engine(config: EngineConfig) -> None:
    """Imports the libraries that the configured engine needs."""
    if config.kind == "vllm":
        from rlhf_core.rollout.vllm.engine_arguments import library

        library(config.kv_cache_gib)
    else:
        import rlhf_core.rollout.transformers_engine  # noqa: F401


def open_engine(
    model: str,
    config: EngineConfig,
    *,
    seed: int,
    max_model_len: int,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    fp32_head: bool = False,
    **of_vllm: Any,
) -> RolloutEngine:
    """Starts an engine and loads a model from a folder or a Hub id. `max_model_len`: tokens of the longest
    prompt and answer together. `fp32_head`: whether logits are computed in fp32. `of_vllm`: options that only
    vLLM's engine has; see `VllmEngine`. Raises ValueError for a model that this kind of engine cannot run."""
    if config.kind == "transformers":
        from rlhf_core.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(
            model, config, dtype=dtype, trust_remote_code=trust_remote_code, fp32_head=fp32_head
        )
    from rlhf_core.rollout.vllm.vllm_engine import VllmEngine

    return VllmEngine(
        model,
        config,
        seed=seed,
        max_model_len=max_model_len,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        fp32_head=fp32_head,
        **of_vllm,
    )
