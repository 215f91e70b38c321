"""The request of a stage, as a run directory holds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlhf_core.config import StageConfig
from rlhf_core.runs.run_dir import StageRequest


def stage_request(
    config: StageConfig,
    inputs: Mapping[str, str] | Path | str = MappingProxyType({}),
    *,
    name: str = "",
    digest: str = "0",
    seed: int = 0,
    **more: Any,
) -> StageRequest:
    """`inputs`: places by name, or that of the model `base`. `name`: default: the stage's kind."""
    if not isinstance(inputs, Mapping):
        inputs = {"base": str(inputs)}
    return StageRequest(
        name=name or config.stage, digest=digest, config=config, inputs=dict(inputs), seed=seed, **more
    )
