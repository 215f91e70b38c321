"""Configures limits on PPO's updates. Torch-free."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlhf_core.records import Config, InDigestIfSet


class UpdateLimits(Config):
    """Limits on how far an iteration of PPO may move the policy."""

    stop_kl: Annotated[float | None, InDigestIfSet] = Field(
        None,
        gt=0,
        description=(
            "skip the rest of the actor's optimiser steps in an iteration after a step whose policy/kl_old,"
            " in nats per token, exceeds this (early stopping, Dossa et al. 2021); default: no limit"
        ),
    )
