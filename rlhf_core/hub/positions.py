"""Reads a model's maximum number of tokens from its config.json, as vLLM computes it. Torch-free."""

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
# RoPE scaling types whose factor is already included in the number of positions.
COUNTED = ("su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Returns the maximum number of tokens, prompt plus answer, that a config.json allows; None if it does
    not specify one."""
    text = text_config(config)
    longest = text.get("model_max_length") or min(
        (text[name] for name in LIMITS if isinstance(text.get(name), int)), default=None
    )
    # gemma3: the number includes the factor
    if not isinstance(longest, int) or "gemma3" in str(text.get("model_type")):
        return longest if isinstance(longest, int) else None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for scaling in (rope, *rope.values()):  # one setting for all layers, or one per layer type
        if (
            isinstance(scaling, Mapping)
            and scaling.get("rope_type", scaling.get("type")) not in COUNTED
            and scaling.get("factor")
        ):
            return int(longest * scaling["factor"])
    return longest


def stored_config(place: str) -> dict[str, Any]:
    """Returns the config.json of a model folder, or of the base model for an adapter; {} for a Hub id, or if
    the file is missing or unreadable."""
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
    """Raises ValueError when the model at `place`, with this config.json, has fewer than `tokens` positions.
    `what` names the settings that need them."""
    positions = positions_of(config)
    if positions is not None and positions < tokens:
        raise ValueError(
            f"{place}: the model has {positions} positions, and {what} = {tokens} needs more: lower"
            f" {what.replace(' + ', ' or ')}, or name a model with more"
        )
