"""Configures sampling without training, and training on kept rollouts without engines, to debug one half at a
time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from rlhf_core.records import Config, InDigestIfSet, NotInDigest, check


class DebuggingFields(Config):
    """Fields that keep an iteration's rollouts, and that run only one half of it."""

    keep_rollouts: Annotated[bool, NotInDigest] = Field(
        False,
        description="keep all answers of each iteration, with their rewards, in kept_rollouts/",
    )
    rollouts_only: Annotated[bool, InDigestIfSet] = Field(
        False, description="sample, score and keep the rollouts, without training or validations"
    )
    train_only: Annotated[str | None, InDigestIfSet] = Field(
        None,
        description=(
            "train on the rollouts in this folder, the kept_rollouts of an earlier run, without engines,"
            " reward sources or validations"
        ),
    )

    @property
    def has_engines(self) -> bool:
        """Whether engines answer prompts."""
        return self.train_only is None

    @property
    def keeps_rollouts(self) -> bool:
        return self.keep_rollouts or self.rollouts_only

    @check
    def _check_halves(self) -> Iterator[str]:
        if self.rollouts_only and self.train_only is not None:
            yield "rollouts_only trains nothing, and train_only samples nothing: leave one of them out"
