"""Configures the gap between the weights that sample and the weights that train: staleness, importance
weights, and expert routing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.sampled.rewarded_sampling import SamplingFields
from rlhf_core.records import NotInDigest, Off, Positive, check


class SamplerGap(SamplingFields):
    """Fields for how far engines run ahead of the trainer, and for the corrections."""

    stream_batch_size: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description=(
            "number of prompts whose answers are scored together as soon as they are finished, while the"
            " engines, on their own GPUs, answer other prompts; default: score all answers of the iteration"
            " after the last one is finished"
        ),
    )
    max_staleness: int = Field(
        0,
        ge=0,
        description=(
            "asynchronous training: maximum number of iterations between the start of an answer and its use"
            " in training; engines need their own GPUs. 1: engines answer the next prompts while this"
            " iteration trains. 2 or more, or 1 with dynamic_filtering: engines answer without pausing,"
            " weights change between two tokens, and long answers continue across updates; sampler_is"
            " corrects for older weights"
        ),
    )
    sampler_is: Annotated[Literal["truncate", "clamp", "mask", "in_ratio", "off"], Off] = Field(
        "truncate",
        description=(
            "importance weights trainer / sampler. truncate: capped at sampler_is_cap; clamp: kept within"
            " sampler_is_clamp; mask: 0 outside sampler_is_clamp (IcePop); off: none; in_ratio: the sampler's"
            " log-probs serve as the old policy in the clipped ratio and in the KL, and the actor does not"
            " score answers before it trains"
        ),
    )
    sampler_is_level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description=(
            "token: a separate importance weight for each token; otherwise one weight for all tokens of an"
            " answer. sequence: the product, whose spread grows with the answer's length; geometric: the"
            " geometric mean, which suits sampler_is mask with narrow bounds, such as sampler_is_clamp [0.98,"
            " 1.02]"
        ),
    )
    sampler_is_cap: float = Field(2.0, gt=0, description="cap of the truncated importance weight")
    sampler_is_clamp: tuple[float, float] = Field(
        (0.5, 5.0),
        description=(
            "bounds of the clamped or masked importance weight; masked tokens are excluded from all means in"
            " the loss"
        ),
    )
    routing_replay: bool = Field(
        True,
        description=(
            "mixture-of-experts models on GPUs, without engine.pipeline_parallel_size: send each token to the"
            " experts that vLLM chose (R3, Ma et al. 2025)"
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
        """Whether the loss has importance weights in addition to the policy ratio."""
        return self.sampler_is not in ("in_ratio", "off")

    @property
    def replays_routing(self) -> bool:
        """Whether vLLM reports the experts to which it sent tokens. With pipeline stages it cannot, because
        each stage knows only its own layers."""
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
                "with max_staleness, answers are finished before the weights that score them exist, so"
                " nothing can be streamed: leave out stream_batch_size"
            )
        if self.max_staleness and self.sampler_is == "off":
            yield (
                "max_staleness trains on answers from older weights and needs importance weights as"
                " correction: set sampler_is to truncate or clamp"
            )
