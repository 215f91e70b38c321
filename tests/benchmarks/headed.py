"""A language model's folder as that of a reward model: its files, linked, and beside them a random head."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def headed(model: Path, out: Path) -> Path:
    """Makes `out`, whose rewards mean nothing."""
    out.mkdir(parents=True)
    names: dict[str, str] = {}
    for file in model.iterdir():
        if file.name.endswith(".safetensors.index.json"):
            continue
        # the index tells which files there are
        link = f"part-{file.name}" if file.suffix == ".safetensors" else file.name
        (out / link).symlink_to(file.resolve())
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as weights:
                names |= dict.fromkeys(weights.keys(), link)
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    head = torch.randn(1, hidden, generator=torch.Generator().manual_seed(0)) / hidden
    save_file({"score.weight": head.to(torch.bfloat16)}, out / "head.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names | {"score.weight": "head.safetensors"}})
    )
    return out
