"""Judges of answers, and models that answer behind endpoints."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlhf_core.config.process_groups import Served
from rlhf_core.config.rewarding.remote_models import Remote, RequestLimits
from rlhf_core.records import Config, NotInDigest, Positive, Share


class RuleJudge(Config):
    """A right answer wins against a wrong one. Each question has a known answer."""

    kind: Literal["rule"] = "rule"
    answer_key: str = Field("answer", description="column of the questions with the known answer")


class RewardJudge(Config):
    """The answer with the higher reward model score wins. A difference below `tie` is a tie."""

    kind: Literal["reward"] = "reward"
    reward: str = Field("reward_model", description="reward model")
    tie: float = Field(0.0, ge=0, description="score difference that still counts as a tie")


class ChatJudge(RequestLimits):
    """A chat model as judge, with the prompts of Arena-Hard."""

    max_tokens: Positive = Field(4096, description="longest verdict")
    max_failed: Annotated[Share, NotInDigest] = Field(
        0.02, description="share of failed or unparsed games above which the report fails"
    )
    interval_width: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "stop judging a model when its 95 % interval is this narrow (0.1: +- 5 points); default: judge"
            " all questions"
        ),
    )
    sequential_questions: Positive = Field(
        50, description="questions between two computations of the interval, in random order"
    )
    verdict_cache: Annotated[str | None, NotInDigest] = Field(
        None,
        description=(
            "folder of verdicts shared by evaluations, so that no game is judged twice; default: in the run"
            " directory"
        ),
    )


class OpenAIJudge(Remote, ChatJudge):
    """A chat model behind an OpenAI-compatible endpoint as judge, with the prompts of Arena-Hard."""

    kind: Literal["openai"] = "openai"


class VllmJudge(ChatJudge, Served):
    """A chat model as judge, on a vLLM server that this stage starts and stops."""

    kind: Literal["vllm"] = "vllm"
    model: str = Field(description="the judge")


Judge = Annotated[RuleJudge | RewardJudge | OpenAIJudge | VllmJudge, Field(discriminator="kind")]


def names_of_judge(place: str, judge: Judge) -> list[tuple[str, str, str]]:
    """Returns the model of the judge at `place` as an entry of `nested_names`; none unless it is local."""
    match judge:
        case RewardJudge():
            return [(f"{place}.reward", judge.reward, "reward")]
        case VllmJudge():
            return [(f"{place}.model", judge.model, "policy")]
    return []


class Endpoint(Remote):
    """A model that answers questions behind an OpenAI-compatible endpoint."""

    temperature: float | None = Field(
        None, ge=0, description="sampling temperature; default: the evaluation's"
    )
    max_tokens: Positive | None = Field(
        None, description="longest answer in its own tokens; default: the evaluation's generate_max_len"
    )
    system: str | None = Field(None, description="system message before each question that has none")
    more: dict[str, Any] = Field(
        {}, description="further fields of each request (top_p, seed, reasoning_effort, ...)"
    )
    max_failed: Annotated[Share, NotInDigest] = Field(
        0.0, description="share of questions that may stay without an answer; these count as empty answers"
    )

    @field_validator("more")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"cannot be sent as JSON ({error}): write dates in quotes, and leave out what is no text or"
                " number"
            ) from None
        return value
