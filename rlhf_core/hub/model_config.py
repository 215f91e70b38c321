"""Reads a model's size from its config.json and weight headers, and describes experts, recurrent layers and
quantisation. Torch-free."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_core.hub.image_encoder import ImageEncoder, encoder_of_config, is_encoder_weight
from rlhf_core.hub.model_files import tensors_of, weight_files

BF16 = 2  # bytes
# config keys for the number of experts, by model family
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")

TIED = ("gemma", "cohere")  # families whose embeddings and head are tied by default


# `model_type` of the language models that the tests train and export (tests/support/families.py). Other
# models are tried out before a run.
TESTED = {
    *(
        "deepseek_v3",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granite",
        "granitemoehybrid",
    ),
    *(
        "lfm2",
        "llama",
        "ministral3",
        "mistral",
        "mixtral",
        "nemotron_h",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_5_moe_text",
    ),
    *("qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3"),
}


class Size(NamedTuple):
    """The size of a decoder: number of parameters, shape, and bytes per token.

    `active`: parameters used for one token, fewer than `parameters` if the model has experts. `head`:
    parameters of the output layer, included in `parameters`; 0 if tied. `kept`: bytes of activations that
    training keeps per layer and token, in bf16, with FlashAttention and fused norms and activations.
    `passing`: bytes that a pass without gradients holds at once per layer and token. `kv`: bytes of keys and
    values per token, over all layers. `encoder`: the image encoder, not counted in the other numbers; None if
    the model has none, or there is nothing to encode (see `forecast/image_data.py`).
    """

    parameters: float
    active: float
    head: float
    layers: int
    hidden: int
    vocabulary: int
    kept: float
    passing: float
    kv: float
    encoder: ImageEncoder | None = None


def size_of(folder: str) -> Size:
    """Returns the size of the model in a folder. Raises ValueError when its config.json is missing or lacks
    the needed numbers."""
    file = Path(folder) / "config.json"
    try:
        config = json.loads(file.read_text())
        size = size_of_config(dict(text_config(config)))
        stored = _stored(Path(folder))
        found = size._replace(
            parameters=min(size.parameters, stored.language), active=min(size.active, stored.language)
        )
        if config.get("model_type") not in PICTURE_FAMILIES or stored.encoder == 0:
            return found
        encoder = encoder_of_config(config, size.hidden)
        if encoder is not None and math.isfinite(stored.encoder):
            encoder = encoder._replace(parameters=stored.encoder)
        return found._replace(encoder=encoder)
    except (OSError, json.JSONDecodeError):
        what = "has no readable config.json" if Path(folder).is_dir() else "is no folder"
        raise ValueError(
            f"{folder} {what}: name a local model folder, or a model of the Hub as owner/name"
        ) from None
    except KeyError as missing:
        raise ValueError(
            f"{file} has no {missing}: `alignflow plan` knows decoder models with the usual names only"
        ) from None
    except (
        TypeError,
        AttributeError,
        ZeroDivisionError,
        OverflowError,
    ):  # lists, nulls or zeros instead of sizes
        raise ValueError(
            f"{file} has no sizes as numbers: `alignflow plan` knows decoder models of equal layers only"
        ) from None


class _Stored(NamedTuple):
    """Numbers of parameters in weight files: of the image encoder, and of everything else."""

    language: float
    encoder: float


def _stored(folder: Path) -> _Stored:
    """Counts the parameters in a folder's safetensors files; infinity if there are no files, one cannot be
    read, or weights are packed into integers. Families whose feed-forward has no gate have fewer parameters
    than their config.json suggests."""
    unknown = _Stored(math.inf, math.inf)
    language = encoder = 0
    try:
        for file in weight_files(folder):
            tensors = tensors_of(file)
            if any(tensor["dtype"] in ("U8", "I8", "I32") for tensor in tensors.values()):
                return unknown
            for name, tensor in tensors.items():
                count = math.prod(tensor["shape"])
                if is_encoder_weight(name):
                    encoder += count
                else:
                    language += count
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return unknown
    return _Stored(language, encoder) if language else unknown


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the part of a config.json that describes the language model: `text_config` if present,
    otherwise the whole config, with the `model_type` of the language model."""
    part = config.get("text_config")
    if isinstance(part, Mapping):
        return part
    return {**config, "model_type": f"{config['model_type']}_text"} if _is_flat(config) else config


def _is_flat(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json has the numbers of its language model at the same level as the numbers of
    its image encoder."""
    return config.get("model_type") in FLAT and isinstance(config.get("vision_config"), Mapping)


def experts_of_config(config: Mapping[str, Any]) -> int:
    """Returns the number of experts per layer from a config.json; 0 if the model has none."""
    return next((int(config[name]) for name in EXPERTS if config.get(name)), 0)


def size_of_config(config: dict[str, Any]) -> Size:
    """Returns the size of a Llama-like decoder with gated feed-forward, grouped-query attention and possibly
    experts.

    Raises KeyError for a missing number, and TypeError or similar for values that are not numbers.
    """
    hidden = config["hidden_size"]
    layers = config["num_hidden_layers"]
    vocabulary = config["vocab_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    queries = heads * width
    keys = (config.get("num_key_value_heads") or heads) * width
    experts = experts_of_config(config) or 1
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    used = config.get("num_experts_per_tok", 1) if experts > 1 else 1
    block = (
        hidden * (2 * queries + 2 * keys)
        + 3 * hidden * inner * experts
        + (hidden * experts if experts > 1 else 0)
        + 2 * hidden
    )
    embeddings = vocabulary * hidden
    tied = bool(config.get("tie_word_embeddings", str(config.get("model_type")).startswith(TIED)))
    parameters = layers * block + embeddings * (1 if tied else 2) + hidden
    return Size(
        parameters=parameters,
        active=parameters - layers * 3 * hidden * inner * (experts - used),
        head=0 if tied else embeddings,
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        kept=BF16 * (5 * hidden + 2 * queries + 2 * keys + 3 * inner * used),
        passing=BF16 * (4 * hidden + 2 * inner * used),
        kv=BF16 * 2 * layers * keys,
    )


# `layer_types` with a state (convolution, recurrence) that carries over from one document of a row to the
# next.
STATEFUL_LAYERS = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}


# Keys of the text part in the config.json of a model with several parts.
TEXT_PARTS = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "text_encoder",
    "decoder",
    "generator",
)


# Families whose releases have no such part: its keys are beside `vision_config`.
FLAT = ("qwen2_5_vl", "qwen2_vl")
# Families trained with images: `models/multimodal/picture_tower.py` loads their image encoders.
PICTURE_FAMILIES = (
    *("gemma3", "gemma4", "mistral3"),
    *("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl"),
)
# Language models that transformers has only as a part of the whole model (`picture_language_models.py` beside
# it), and the stage kinds that train them; vLLM cannot run them alone.
ONLY_TRAINED = dict.fromkeys(
    ("qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text"), ("sft", "reward_model", "dpo", "kto")
)


def more_than_text(place: str, named: str) -> str:
    """Returns the error message for rejecting the model at `place`, which has the class `named`."""
    return (
        f"{place} is {named}, which reads more than text: name a text model, or a checkpoint of its language"
        " part alone"
    )


def wraps_text_by_config(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json describes a model that contains a language model and also parts for
    images or sound."""
    return _is_flat(config) or any(isinstance(config.get(part), Mapping) for part in TEXT_PARTS)


# Families whose experts vLLM loads only at its start; it drops later weights.
FIXED_EXPERTS = {"gpt_oss"}
# Families whose activations overflow float16, which vLLM therefore refuses for them.
NO_FLOAT16 = {"gemma2", "gemma3", "gemma3_text", "glm4"}


LOADED_WHOLE = ("mxfp4", "fp8")  # formats of quantised weights that training converts to its own dtype


def quantised_by(config: Mapping[str, Any]) -> str | None:
    """Returns the quantisation format of the weights according to a config.json; None if they are not
    quantised."""
    about = config.get("quantization_config") or text_config(config).get("quantization_config")
    return str(about.get("quant_method")) if isinstance(about, Mapping) else None


def cannot_train_quantised(place: str, config: Mapping[str, Any]) -> str | None:
    """Returns why the quantised weights of the model at `place` cannot be trained; None if they can or if the
    weights are not quantised."""
    method = quantised_by(config)
    parts = " of a model with several parts" * wraps_text_by_config(config)
    if method is None or (method in LOADED_WHOLE and not parts):
        return None
    return (
        f"{place} has weights quantised as {method}{parts}, which cannot be trained so: name its checkpoint"
        " in bfloat16"
    )


def keeps_experts(place: str) -> str:
    """Returns the error message saying that vLLM cannot load new weights into the model at `place`."""
    return (
        f"{place}: vLLM takes no new weights for this family's experts, so it cannot sample while they train:"
        " set engine.kind to transformers, or use SFT, DPO or KTO"
    )


def num_experts(config: object) -> int:
    """Returns the number of experts per layer from a transformers config; 0 if the model has none."""
    return experts_of_config({name: getattr(config, name, None) for name in EXPERTS})
