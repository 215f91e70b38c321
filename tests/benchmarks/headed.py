"""A language model's folder as that of a reward model: its files, linked, and beside them a head of zeros."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def headed(model: Path, out: Path) -> Path:
    """Makes `out`, where the reward of every answer is 0."""
    out.mkdir(parents=True)
    names: dict[str, str] = {}
    for file in model.iterdir():
        if file.name.endswith(".safetensors.index.json"):
            continue
        link = f"part-{file.name}" if file.suffix == ".safetensors" else file.name  # the index tells which files there are
        (out / link).symlink_to(file.resolve())
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as weights:
                names |= dict.fromkeys(weights.keys(), link)
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    save_file({"score.weight": torch.zeros(1, hidden, dtype=torch.bfloat16)}, out / "head.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names | {"score.weight": "head.safetensors"}})
    )
    return out
