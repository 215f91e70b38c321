"""By what pass rate prompts are drawn, in place of passes over all of them."""

from __future__ import annotations

from pydantic import Field

from rlhf_core.records import Config, Share


class Curriculum(Config):
    """Prompts are drawn by their pass rate: the share of right answers, as measured in the run. Each has the
    expected learnability p (1 - p) as its weight (Foster et al. 2025)."""

    right: float | None = Field(
        None,
        description=(
            "an answer of at least this reward, the weighted sum of all sources, is right; default, for"
            " verifiers alone: the highest that they give"
        ),
    )
    target: float = Field(
        0.5,
        gt=0,
        lt=1,
        description=(
            "the pass rate of most weight; 0.5 is that of most learnability, below it prefers harder ones"
        ),
    )
    pass_rate_key: str | None = Field(
        None,
        min_length=1,
        description=(
            "column with a pass rate that is known before the run, 0 to 1 or null: counts as one group of"
            " answers"
        ),
    )
    discount: Share = Field(
        0.5,
        description=(
            "share of its earlier counts that a prompt keeps when it is answered again, as the policy"
            " changes; 1: all answers count alike"
        ),
    )
    solved_every: int = Field(
        4,
        ge=0,
        description=(
            "a solved prompt, whose last answers were all right, comes back after this many times the number"
            " of prompts at the earliest; 0: as any other"
        ),
    )
