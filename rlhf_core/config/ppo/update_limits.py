"""Limits on PPO's updates. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf_core.records import Config, InDigestIfSet


class UpdateLimits(Config):
    """How far an iteration of PPO may move the policy."""

    stop_kl: Annotated[float | None, InDigestIfSet] = Field(
        None,
        gt=0,
        description=(
            "after an optimiser step whose policy/kl_old, in nats per token, is above this, the actor takes"
            " no further step in this iteration (early stopping, Dossa et al. 2021); default: it takes all"
        ),
    )
