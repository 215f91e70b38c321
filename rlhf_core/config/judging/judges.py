"""Configures judges of answers, and models that answer behind endpoints."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlhf_core.config.process_groups import Served
from rlhf_core.config.rewarding.remote_models import Remote, RequestLimits
from rlhf_core.records import Config, NotInDigest, Positive, Share


class RuleJudge(Config):
    """A judge that compares answers with the question's known answer: a right answer wins against a wrong
    answer."""

    kind: Literal["rule"] = "rule"
    answer_key: str = Field("answer", description="column of the question rows with the known answer")


class RewardJudge(Config):
    """A reward model as judge: the answer with the higher score wins. A difference of at most `tie` is a
    tie."""

    kind: Literal["reward"] = "reward"
    reward: str = Field("reward_model", description="reward model")
    tie: float = Field(0.0, ge=0, description="largest score difference that counts as a tie")


class ChatJudge(RequestLimits):
    """A chat model as judge, with the prompts of Arena-Hard."""

    max_tokens: Positive = Field(4096, description="maximum length of a verdict, in tokens")
    max_failed: Annotated[Share, NotInDigest] = Field(
        0.02, description="share of failed or unparsed games above which the stage fails"
    )
    interval_width: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "stop judging a model once its 95 % interval is at most this wide (0.1: +- 5 points); default:"
            " judge all questions"
        ),
    )
    sequential_questions: Positive = Field(
        50, description="number of questions, in random order, between two computations of the interval"
    )
    verdict_cache: Annotated[str | None, NotInDigest] = Field(
        None,
        description=(
            "folder of verdicts that evaluations share, so that no game is judged twice; default: in the run"
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
    """Returns the model of the judge at `place` as an entry of `nested_names`; an empty list unless the judge
    is local."""
    match judge:
        case RewardJudge():
            return [(f"{place}.reward", judge.reward, "reward")]
        case VllmJudge():
            return [(f"{place}.model", judge.model, "policy")]
    return []


class Endpoint(Remote):
    """A model behind an OpenAI-compatible endpoint that answers questions."""

    temperature: float | None = Field(
        None, ge=0, description="sampling temperature; default: the evaluation's"
    )
    max_tokens: Positive | None = Field(
        None,
        description=(
            "maximum answer length, in the model's own tokens; default: the evaluation's generate_max_len"
        ),
    )
    system: str | None = Field(None, description="system message for questions that have none")
    more: dict[str, Any] = Field(
        {}, description="additional fields of each request (top_p, seed, reasoning_effort, ...)"
    )
    max_failed: Annotated[Share, NotInDigest] = Field(
        0.0, description="share of questions that may remain unanswered; they count as empty answers"
    )

    @field_validator("more")
    @classmethod
    def _is_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"cannot be sent as JSON ({error}): write dates in quotes, and use only strings, numbers and"
                " lists or mappings of them"
            ) from None
        return value
