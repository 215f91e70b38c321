"""Configures what all reward sources share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.records import Config


class WeighedReward(Config):
    """Fields that all reward sources share."""

    name: str | None = Field(
        None,
        description="name in metrics; default: the name of the model, function or host",
        pattern=r"^[\w.:-]+$",
    )
    weight: float = Field(1.0, description="factor of this source in the sum of rewards")


class StandardisedReward(WeighedReward):
    """Fields that functions, servers, verifiers and judges share."""

    normalize: Literal["none", "running", "group"] = Field(
        "none",
        description=(
            "running: standardise with the mean and std of all rewards so far (in a loop: of the round's"
            " rewards); group: with those of the answers to the same prompt (GDPO)"
        ),
    )
