"""Completes configs that transformers writes in a different form from the one vLLM reads."""

from __future__ import annotations

import inspect
from typing import Any

from rlhf_core.rollout.vllm.patches.table import is_release

INTERLEAVED = ("qwen3_vl", "qwen3_5")  # have positions on three axes
GEMMA4_TOKENS = 280  # of an image, if the config does not say


def apply() -> None:
    """Makes vLLM apply `completed` to the configs it reads."""
    from vllm.config import model

    read = model.get_config

    def get_completed(*arguments: Any, **options: Any) -> Any:
        config = read(*arguments, **options)
        completed(config.get_text_config())
        if config.model_type == "gemma4" and not hasattr(config.vision_config, "default_output_length"):
            config.vision_config.default_output_length = GEMMA4_TOKENS
        return config

    model.get_config = get_completed


def completed(config: Any) -> None:
    """Adds to a language model's config the fields that vLLM reads but transformers stores elsewhere.

    These are YaRN's attention factor, which vLLM 0.24 computes without `mscale_all_dim`, the
    position-dependent scale of queries (Ministral 3), and whether the three axes of a position take turns in
    the rotary embedding, which transformers' classes always do.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

    if is_release("0.24."):
        with_earlier_names(config)
    rope = getattr(config, "rope_parameters", None) or {}
    if (
        rope.get("rope_type") == "yarn"
        and "mscale_all_dim" not in inspect.signature(YaRNScalingRotaryEmbedding).parameters
    ):
        factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1]
        rope |= {"apply_yarn_scaling": False, "attn_factor": factor}
    if config.model_type.startswith(INTERLEAVED) and "mrope_section" in rope:
        rope["mrope_interleaved"] = True
    beta = rope.get("llama_4_scaling_beta")
    if config.model_type == "ministral3" and beta is not None:
        known = rope["original_max_position_embeddings"]
        config.llama_4_scaling = {"original_max_position_embeddings": known, "beta": beta}


def with_earlier_names(config: Any) -> None:
    """Adds to a config from transformers 5.17 or later the fields that vLLM 0.24 reads, in the earlier format
    for settings that differ between layers."""
    if config.model_type == "gemma4_text":
        full = config.per_layer_config[config.layer_types.index("full_attention")]
        config.allow_global_per_layer_attribute_access = True
        config.global_head_dim = full.head_dim
        config.num_global_key_value_heads = full.num_key_value_heads
    elif config.model_type == "olmo3" and "full_attention" in config.rope_parameters:
        config.rope_parameters = dict(config.rope_parameters["full_attention"])
    elif config.model_type == "granitemoehybrid":
        earlier = {"linear_attention": "mamba", "full_attention": "attention"}
        config.layer_types = [earlier.get(kind, kind) for kind in config.layer_types]
