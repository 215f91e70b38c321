"""Builds a small copy of a model's config for trials on the CPU. The copy has the same class and kinds of
layers, but fewer and narrower layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

KINDS = ("layers_block_type", "layer_types")
DROPPED = {"quantization_config", "torch_dtype", "dtype", "_name_or_path", "architectures"}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "decoder_layers")
HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
)
WIDTH = (
    *(
        "hidden_size",
        "n_embd",
        "d_model",
        "dim",
        "embedding_size",
        "block_dim",
        "conv_dim",
        "lru_width",
        "attention_hidden_size",
    ),
    *("word_embed_proj_dim", "input_embedding_size", "output_embedding_size"),
)
WORDS = 256
WIDE = 64
HEADS_LEFT = 4
HEAD_SIZE = 16
# Types whose rotary sections (time, height, width) must add up to half a head.
SECTIONED = ("qwen2_vl_text", "qwen2_5_vl_text")
SECTIONS = [2, 3, 3]
# Sizes that replace larger ones, keyed by the end of the field's name or by a part of it.
ENDS = {
    **{
        "head_dim": HEAD_SIZE,
        "head_size": HEAD_SIZE,
        "d_head": HEAD_SIZE,
        "rotary_dim": HEAD_SIZE,
        "d_state": 16,
        "state_size": 16,
    },
    **{
        "chunk_size": 8,
        "lora_rank": 16,
        "q_rank": 16,
        "time_step_rank": 8,
        "index_topk": 16,
        "sliding_window": 16,
        "per_layer_input": 16,
    },
    **{"max_position_embeddings": 512, "n_positions": 512, "n_ctx": 512, "n_inner": 128, "ffn_dim": 128},
    **{
        "_experts": 4,
        "experts_per_tok": 2,
        "experts_per_token": 2,
        "top_k": 2,
        "moe_topk": 2,
        "moe_k": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    **{
        "value_heads": 4,
        "key_heads": 4,
        "kv_heads": 2,
        "key_value_heads": 2,
        "n_groups": 1,
        "kv_shared_layers": 0,
        "dense_replace": 1,
    },
}
# values that replace null
UNSAID = {
    "head_dim": HEAD_SIZE,
    "num_key_value_heads": HEADS_LEFT,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
}
CONTAINS = {"intermediate": 128, "vocab_size": WORDS, "ffn_hidden": 128}


def small_copies(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Yields small configs of the same class. The first has one layer of each kind, and at least two layers.
    The second keeps the first eight layers, for families that define the kinds by a period. Raises ValueError
    if the config does not specify the number of layers. Also raises any error of the class for sizes that it
    rejects."""
    values = config.to_dict()
    listed = next((len(values[name]) for name in KINDS if isinstance(values.get(name), list)), None)
    layers = next((values[name] for name in LAYERS if isinstance(values.get(name), int)), listed)
    if layers is None:
        raise ValueError(f"{type(config).__name__} has no number of layers")
    given = config.to_diff_dict().keys() - DROPPED
    for kept in (_kept(values, layers), list(range(min(8, layers)))):
        small = _related(
            {key: _small(key, value, layers, kept, values) for key, value in values.items()}, values
        )
        yield type(config).from_dict(
            {key: value for key, value in small.items() if key in given or value != values[key]}
        )


def _kept(values: dict[str, Any], layers: int) -> list[int]:
    """Returns the indexes of the layers to keep: the first of each kind. A layer's kind is its entry in all
    lists that have one entry per layer."""
    lists = [value for value in values.values() if isinstance(value, list) and len(value) == layers]
    kinds = list(zip(*([str(part) for part in value] for value in lists), strict=True))
    first = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())
    return first if len(first) > 1 else list(range(min(2, layers)))


def _related(small: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Adjusts values that depend on each other: rotary embeddings, dimensions of latent attention, and Mamba
    heads."""
    for key in ("rope_scaling", "rope_parameters"):
        if key in small:
            small[key] = _plain_rope(small[key])
            if values.get("model_type") in SECTIONED:
                small[key] = {**small[key], "mrope_section": SECTIONS}
    if small.get("qk_head_dim"):
        small["qk_head_dim"] = small["qk_nope_head_dim"] + small["qk_rope_head_dim"]
    expand = values.get("mamba_expand") or values.get("expand")
    if expand:
        heads = next(
            (
                key
                for key in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
                if values.get(key)
            ),
            None,
        )
        if heads is not None:
            small[heads] = int(expand * WIDE) // HEAD_SIZE
    return small


def _small(key: str, value: Any, layers: int, kept: list[int], values: dict[str, Any]) -> Any:
    if value is None:
        return UNSAID.get(key)
    if isinstance(value, dict) and value and all(str(name).isdigit() for name in value):  # keyed by layer
        return {kept.index(int(name)): part for name, part in value.items() if int(name) in kept}
    if isinstance(value, list):
        if len(value) == layers and not key.endswith("token_id"):
            return [value[i] for i in kept]
        return [1] if key.endswith("token_id") else value
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if key in LAYERS:
        return len(kept)
    if key in HEADS:
        return min(value, HEADS_LEFT)
    if key in WIDTH:
        return min(value, WIDE)
    if key.endswith(("_token_id", "_token_index")):
        return value if value < WORDS else 1
    if key.endswith("key_value_heads") and value in [values.get(name) for name in HEADS]:
        return min(value, HEADS_LEFT)
    sizes = [size for part, size in CONTAINS.items() if part in key] or [
        size for end, size in ENDS.items() if key.endswith(end)
    ]
    return min([value, *sizes])


def _plain_rope(value: Any) -> Any:
    """Returns rotary embedding settings without lists of factors, because the length of such a list depends
    on the head size. Handles settings given per kind of layer."""
    if not isinstance(value, dict):
        return value
    if any(isinstance(part, dict) for part in value.values()):
        return {key: _plain_rope(part) for key, part in value.items()}
    if any(isinstance(part, list) for part in value.values()):
        return {"rope_type": "default", "rope_theta": value.get("rope_theta", 10000.0)}
    return value
