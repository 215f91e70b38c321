"""Imports vLLM and chooses the arguments of its engine for a model on this machine."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rlhf_core.config.engines import EngineConfig
from rlhf_core.hub.model_config import experts_of_config, text_config, wraps_text_by_config
from rlhf_core.hub.vocabulary import known_rows
from rlhf_core.models.experts import replayed
from rlhf_core.rollout.vllm.environment import (
    CPU_BATCHED_TOKENS,
    adapter_options,
    compilation,
    config_of,
    delta_rule,
    graphs,
    returns_routing,
    set_vllm_environment,
)
from rlhf_core.rollout.vllm.patches.table import apply_patches
from rlhf_core.rollout.vllm.pictured_prompts import picture_options
from rlhf_core.system.gc_pause import freeze_libraries, uncollected


def library(kv_cache_gib: float) -> Any:
    """Imports vLLM and its engine, after setting the environment that vLLM reads when it is first
    imported."""
    set_vllm_environment(kv_cache_gib)
    first = "vllm.entrypoints.llm" not in sys.modules
    with uncollected():
        import vllm
        import vllm.entrypoints.llm  # otherwise `vllm.LLM` would import it later

    apply_patches()
    if first:
        freeze_libraries()
    return vllm


def engine_arguments(
    vllm: Any,
    model: str,
    config: EngineConfig,
    *,
    seed: int,
    max_model_len: int,
    dtype: str,
    trust_remote_code: bool,
    can_sleep: bool,
    routing_replay: bool,
    adapter_rank: int,
    pictures: bool = False,
) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM` for a folder that contains a complete model, excluding
    `config.options`.

    Raises ValueError for a model that this vLLM cannot run, and for adapters on a model with experts.
    """
    on_gpu = torch.cuda.is_available()
    of_model = config_of(model)
    if adapter_rank and experts_of_config(text_config(of_model)):
        raise ValueError(
            "engine.adapters: alone is not for models with experts, whose layers vLLM would change for"
            " them: leave it out"
        )
    routed = routing_replay and replayed(text_config(of_model)) and returns_routing()
    return dict(
        model=model,
        dtype=dtype,
        seed=seed,
        max_model_len=max_model_len,
        enforce_eager=not on_gpu,
        compilation_config=compilation(model),
        enable_return_routed_experts=routed,
        gpu_memory_utilization=config.gpu_memory_utilization,
        trust_remote_code=trust_remote_code,
        enable_prefix_caching=on_gpu
        or not has_state(vllm, model, dtype, max_model_len, trust_remote_code, pictures),
        # Prefilling a prompt in parts makes vLLM rewind its seeded generator, which CPU generators cannot do,
        # so CPUs prefill whole prompts. vLLM caches the states of Mamba layers by prefix only if prompts are
        # prefilled in parts.
        enable_chunked_prefill=on_gpu,
        max_num_batched_tokens=None if on_gpu else max(max_model_len, CPU_BATCHED_TOKENS),
        logprobs_mode="processed_logprobs",
        **(picture_options() if pictures else {"language_model_only": wraps_text_by_config(of_model)}),
        **delta_rule(model),
        **graphs(config.options),
        **({"worker_cls": "rlhf_core.rollout.vllm.gpu_worker.GpuWorker"} if on_gpu else {}),
        worker_extension_cls="rlhf_core.rollout.vllm.weight_receiver.WeightReceiver",
        disable_log_stats="speculative_config" not in config.options,
        use_tqdm_on_load=False,
        enable_sleep_mode=can_sleep,
        tensor_parallel_size=config.tensor_parallel_size,
        **adapter_options(adapter_rank),
        # Child processes of this one, which end with it.
        distributed_executor_backend="mp" if config.tensor_parallel_size > 1 else None,
    )


def has_state(
    vllm: Any,
    model: str,
    dtype: str,
    max_model_len: int,
    trust_remote_code: bool,
    pictures: bool = False,
) -> bool:
    """Returns whether any layers carry a state from token to token (Mamba and related models), according to
    vLLM's model registry.

    Raises ValueError for a model that this vLLM cannot run on a CPU, or not with `pictures`.
    """
    arguments = vllm.EngineArgs(
        model=model, dtype=dtype, max_model_len=max_model_len, trust_remote_code=trust_remote_code
    )
    try:
        config = arguments.create_model_config()
    except ValueError as error:
        said = "".join(str(error).splitlines()[1:2]).partition(" [type=")[0].strip() or str(error)
        raise ValueError(
            f"vLLM {vllm.__version__} cannot run {model} here ({said}): the log above says what it lacks"
        ) from error
    if pictures and config.is_mm_prefix_lm:
        raise ValueError(
            f"{model}: the tokens of an image attend to each other in both directions, which vLLM does not do"
            " on CPUs: set engine.kind to transformers"
        )
    return bool(config.has_inner_state or config.is_hybrid)


def token_rows(source: str, config: dict[str, Any]) -> int | None:
    """Returns `known_rows` of the model at `source` (None: all rows), and logs the number of rows left
    out."""
    rows = int(text_config(config).get("vocab_size") or 0)
    known = known_rows(source, rows)
    if known is not None:
        print(
            f"{source}: {rows - known} of {rows} rows of the vocabulary are no token of its tokenizer, and"
            " are not sampled",
            flush=True,
        )
    return known
