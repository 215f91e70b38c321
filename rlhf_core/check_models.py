"""Model folders as `check` sees them: whether they can be loaded, and whether their stage may pack documents into their rows."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_core.config import PPO, SFT, StageConfig, Trainable
from rlhf_core.lineage import is_remote
from rlhf_core.models.kinds import carries_by_config

WEIGHTS = ("*.safetensors", "*.bin")


def model_problem(where: str, place: str) -> dict[str, str]:
    """Why the folder cannot be loaded, by its name; nothing when it can, or is on the Hub."""
    folder = Path(place)
    if is_remote(place):
        return {}  # the tokenizer is fetched from it, and tells
    if not folder.is_dir():
        return {place: f"{where}: there is no model folder {place}; correct the path, or make the model first"}
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return {place: f"{where}: {place} has no config.json, so it is no model folder; give one that transformers can load"}
    if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        return {place: f"{where}: {place} has no weights ({' or '.join(WEIGHTS)}); give a whole model folder"}
    return {}


def packing_problem(where: str, config: StageConfig, place: str | None) -> list[str]:
    """Packed rows for a model whose layers carry from one document into the next, which its first pass would refuse."""
    told = Path(place or "") / "config.json"
    if not (packs := _packs(config)) or not told.is_file():
        return []
    try:
        carrying = carries_by_config(json.loads(told.read_text()))
    except (ValueError, AttributeError):  # what loads the tokenizer says so
        return []
    instead = " and ".join("set packing: false" if field == "packing" else f"leave out {field}" for field in packs)
    return [f"{where}: layers of {place} carry from one document of a row into the next; {instead}"] if carrying else []


def _packs(config: StageConfig) -> list[str]:
    """The fields that put several documents into a row."""
    if not isinstance(config, Trainable | PPO):
        return []
    fields = ("micro_train_tokens", "micro_rollout_tokens", *(["packing"] if isinstance(config, SFT) else []))
    return [field for field in fields if getattr(config, field, None)]
