"""The gap between the weights that answer and those that train: staleness, importance weights, and the routes
of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.loop_kinds import SamplingFields
from rlhf_core.records import NotInDigest, Off, Positive, check


class SamplerGap(SamplingFields):
    """How far engines run ahead of the trainer, and what corrects for it."""

    stream_batch_size: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description=(
            "prompts whose answers are scored together as soon as they are finished, while the engines, on"
            " GPUs of their own, answer others; default: all of the iteration, after the last answer"
        ),
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description=(
            "asynchronous training: iterations between the start of an answer and its training, at most;"
            " engines have GPUs of their own. 1: they answer the next prompts while this iteration trains. 2"
            " or more, and 1 with dynamic_filtering: they answer without pause, weights change between two"
            " tokens, long answers continue across updates; sampler_is corrects for older weights"
        ),
    )
    sampler_is: Annotated[Literal["truncate", "clamp", "mask", "in_ratio", "off"], Off] = Field(
        "truncate",
        description=(
            "importance weights trainer / sampler: capped at sampler_is_cap, kept within sampler_is_clamp, 0"
            " outside of it (mask, IcePop), or none; in_ratio: the sampler's log-probs are the old policy of"
            " the clipped ratio and of the KL, and the actor does not score answers before it trains"
        ),
    )
    sampler_is_level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description=(
            "importance weights of each token, or one of the whole answer for all of its tokens: the product"
            " (sequence), whose spread grows with the answer's length, or the geometric mean (geometric),"
            " which suits sampler_is mask with narrow bounds, such as sampler_is_clamp [0.98, 1.02]"
        ),
    )
    sampler_is_cap: float = Field(2.0, gt=0, description="cap of the truncated importance weight")
    sampler_is_clamp: tuple[float, float] = Field(
        (0.5, 5.0),
        description=(
            "bounds of the clamped or masked importance weight; what is masked is in no mean of the loss"
        ),
    )
    routing_replay: bool = Field(
        True,
        description=(
            "experts on GPUs, without engine.pipeline_parallel_size: tokens go to those that vLLM chose (R3,"
            " Ma et al. 2025)"
        ),
    )

    @property
    def sampler_is_bounds(self) -> tuple[float, float]:
        """The bounds of importance weights."""
        if self.sampler_is in ("clamp", "mask"):
            return self.sampler_is_clamp
        return 0.0, self.sampler_is_cap

    @property
    def weighs_tokens(self) -> bool:
        """Whether the loss has importance weights beside the policy ratio."""
        return self.sampler_is not in ("in_ratio", "off")

    @property
    def replays_routing(self) -> bool:
        """Whether vLLM reports which experts it sent tokens to. With pipeline stages, each knows only those
        of its own layers."""
        return (
            self.routing_replay and self.engine.abilities.routing and self.engine.pipeline_parallel_size == 1
        )

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        if isinstance(given, dict) and "one_step_off_policy" in given:
            raise ValueError(
                "one_step_off_policy is called max_staleness: write max_staleness: 1 for true, or leave it"
                " out for false"
            )
        return given

    @check
    def _check_sampler_is_clamp(self) -> Iterator[str]:
        if not 0 < self.sampler_is_clamp[0] <= 1 <= self.sampler_is_clamp[1]:
            yield (
                f"sampler_is_clamp={list(self.sampler_is_clamp)} must be two numbers around 1, such as"
                " [0.5, 5]"
            )

    @check
    def _check_staleness(self) -> Iterator[str]:
        if self.max_staleness and self.stream_batch_size:
            yield (
                "with max_staleness answers are there before the weights that score them, so there is nothing"
                " to stream: leave out stream_batch_size"
            )
        if self.max_staleness and self.sampler_is == "off":
            yield (
                "max_staleness trains on answers of older weights, which importance weights correct: set"
                " sampler_is to truncate or clamp"
            )
