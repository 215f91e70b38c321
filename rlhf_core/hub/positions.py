"""Reads from a model's config.json how many tokens it takes, as vLLM counts them. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.hub.ids import is_remote
from rlhf_core.hub.model_config import text_config
from rlhf_core.hub.model_files import ADAPTER_CONFIG

LIMITS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Types of RoPE scaling whose factor the number of positions has in it already.
COUNTED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Returns the longest prompt and answer together, in tokens, that a config.json allows; None when it does
    not say."""
    text = text_config(config)
    longest = text.get("model_max_length") or min(
        (text[name] for name in LIMITS if isinstance(text.get(name), int)), default=None
    )
    # gemma3: the factor is in the number
    if not isinstance(longest, int) or "gemma3" in str(text.get("model_type")):
        return longest if isinstance(longest, int) else None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for scaling in (rope, *rope.values()):  # one for all layers, or one for each type of layer
        if (
            isinstance(scaling, Mapping)
            and scaling.get("rope_type", scaling.get("type")) not in COUNTED
            and scaling.get("factor")
        ):
            return int(longest * scaling["factor"])
    return longest


def stored_config(place: str) -> dict[str, Any]:
    """Returns the config.json of a model folder, of an adapter its base's; {} for a Hub id, and where there
    is none that can be read."""
    try:
        folder = Path(place)
        if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
            base = json.loads((folder / ADAPTER_CONFIG).read_text())["base_model_name_or_path"]
            return {} if is_remote(base) else stored_config(base)
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def require_positions(
    place: str, config: Mapping[str, Any], tokens: int, what: str = "prompt_max_len + generate_max_len"
) -> None:
    """Raises ValueError when the model at `place`, which has this config.json, has fewer than `tokens`
    positions; `what` asks for them."""
    positions = positions_of(config)
    if positions is not None and positions < tokens:
        raise ValueError(
            f"{place}: the model has {positions} positions, and {what} = {tokens} needs more: lower"
            f" {what.replace(' + ', ' or ')}, or name a model with more"
        )
