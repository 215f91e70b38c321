"""Configures a curriculum, which draws prompts by their pass rates instead of passing over all of them."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.records import Config, Share


class Curriculum(Config):
    """Draws prompts by their pass rate, the fraction of right answers as measured in the run. Each prompt is
    weighted by its expected learnability p (1 - p) (Foster et al. 2025)."""

    right: float | None = Field(
        None,
        description=(
            "reward, as the weighted sum of all sources, from which an answer counts as right; default, if"
            " all sources are verifiers: the highest that they give"
        ),
    )
    target: float = Field(
        0.5,
        gt=0,
        lt=1,
        description=(
            "pass rate with the largest weight; 0.5 has the highest learnability, lower values prefer harder"
            " prompts"
        ),
    )
    pass_rate_key: str | None = Field(
        None,
        min_length=1,
        description=(
            "column with a pass rate known before the run, 0 to 1 or null; it counts as one group of answers"
        ),
    )
    discount: Share = Field(
        0.5,
        description=(
            "share of its earlier counts that a prompt keeps when it is answered again, because the policy"
            " changes; 1: all answers count equally"
        ),
    )
    solved_every: int = Field(
        4,
        ge=0,
        description=(
            "minimum pause before a solved prompt (all of its last answers right) is drawn again, as a"
            " multiple of the number of prompts; 0: no pause"
        ),
    )
