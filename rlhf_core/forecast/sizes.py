"""How large a model is, from its config.json alone. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

BF16 = 2  # bytes
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # what families call their number of experts

TIED = ("gemma", "cohere")  # families that share embeddings and head unless their config.json says otherwise


class Size(NamedTuple):
    """Parameters of a decoder (`head`: of its output layer, in `parameters` too unless tied; `active`: those that a token meets, which are
    fewer with experts), and what depends on its shape.

    `kept`: bytes of activations that training keeps of one layer and token in bf16, with FlashAttention and fused norms and activations.
    `passing`: bytes of one layer and token that a pass without gradients holds at once. `kv`: bytes of keys and values of one token.
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


def size_of(folder: str) -> Size:
    """The size of the model in a folder. Raises ValueError when it has no config.json that tells."""
    file = Path(folder) / "config.json"
    try:
        return size_of_config(json.loads(file.read_text()))
    except (OSError, json.JSONDecodeError):
        raise ValueError(f"{folder} has no readable config.json: name a local model folder, or fetch it with `alignflow pull`") from None
    except KeyError as missing:
        raise ValueError(f"{file} does not say {missing}: `alignflow plan` knows decoder models with the usual names only") from None
    except (TypeError, AttributeError, ZeroDivisionError, OverflowError):  # lists, nulls and zeros in place of sizes
        raise ValueError(f"{file} tells no sizes as numbers: `alignflow plan` knows decoder models of equal layers only") from None


def experts_of_config(config: Mapping[str, Any]) -> int:
    """Experts of each layer; 0 when the model has none."""
    return next((int(config[name]) for name in EXPERTS if config.get(name)), 0)


def size_of_config(config: dict[str, Any]) -> Size:
    """Llama's shape and its relatives': gated feed-forward, grouped queries, possibly experts."""
    hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    queries, keys = heads * width, (config.get("num_key_value_heads") or heads) * width
    experts = experts_of_config(config) or 1
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    used = config.get("num_experts_per_tok", 1) if experts > 1 else 1
    block = hidden * (2 * queries + 2 * keys) + 3 * hidden * inner * experts + (hidden * experts if experts > 1 else 0) + 2 * hidden
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
