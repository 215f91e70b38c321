"""Where Weights & Biases shows a recipe's stages. In no digest: it changes no result."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.types import Frozen


class Wandb(Frozen):
    """A run in Weights & Biases for each stage that writes metrics; it gets the lines of `metrics.jsonl` (docs/runs.md). The key is that of
    the environment variable WANDB_API_KEY."""

    project: str = Field(description="project of the runs", pattern=r"^[^/\\#?%:]{1,128}$")
    entity: str | None = Field(None, description="user or team of the project; default: the key's own", min_length=1)
    group: str | None = Field(None, description="group of the runs; default: the recipe's name", min_length=1, max_length=128)
