"""Configures chat models that judge answers for a reward: behind an endpoint, or on the stage's own
engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from rlhf_core.config.engines import only_in_ppo
from rlhf_core.config.process_groups import OnEngine
from rlhf_core.config.rewarding.remote_models import Remote
from rlhf_core.records import Config, InDigestIfSet, NotInDigest, Positive, check


class ReplyLimit(Config):
    """Limits the length of a judge's reply."""

    max_tokens: Positive = Field(
        4096, description="maximum tokens of a reply, including the judge's reasons and hidden thoughts"
    )


class RatingModel(Remote, ReplyLimit):
    """A chat model behind an endpoint, as judge. Its name affects the rewards; its address does not, so a
    server may move."""

    kind: Annotated[Literal["openai"], InDigestIfSet] = Field(
        "openai", description="openai (default): behind an endpoint; for the other kinds see EngineJudge"
    )
    base_url: Annotated[str, NotInDigest] = Field(
        "https://api.openai.com/v1", description="address of the endpoint, which does not affect any result"
    )


class EngineJudge(OnEngine, ReplyLimit):
    """A chat model that judges on engines that the stage starts."""

    kind: Literal["vllm", "transformers"] = Field(
        "vllm", description="kind of the judge's engine; transformers: for models that vLLM cannot sample"
    )
    model: str = Field(description="the judge: a stage, a folder or a Hub id of a model with a chat template")

    @model_validator(mode="before")
    @classmethod
    def _kind_of_engine(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        engine = given.get("engine", {})
        if isinstance(engine, dict) and "kind" in given:
            engine = {"kind": given["kind"], **engine}
        return given | {"engine": engine}

    @check
    def _check_engine(self) -> Iterator[str]:
        if self.engine.kind != self.kind:
            yield (
                f"the judge's kind is {self.kind}, but engine.kind is {self.engine.kind}:"
                " leave engine.kind out"
            )
        if self.max_model_len is not None and self.max_tokens >= self.max_model_len:
            yield (
                f"max_tokens={self.max_tokens} leaves no room for a request in"
                f" max_model_len={self.max_model_len}: lower max_tokens"
            )
        yield from only_in_ppo(self.engine)


class OwnJudge(NamedTuple):
    """A judge on the stage's own engines, with its place in the config, title in metrics, and model."""

    place: str
    title: str
    model: EngineJudge

    @property
    def group(self) -> str:
        """The name of the worker group of the judge's engines."""
        return f"judge:{self.title}"


JudgingModel = Annotated[RatingModel | EngineJudge, Field(discriminator="kind")]
OF_ENDPOINT = RatingModel.model_fields.keys() - EngineJudge.model_fields.keys()
OF_ENGINE = EngineJudge.model_fields.keys() - RatingModel.model_fields.keys()


def with_kind(judge: Any) -> Any:
    """Returns a judge's fields with the kind filled in (default: openai). Raises ValueError when a field
    belongs to the other kind of judge."""
    if not isinstance(judge, dict):
        return judge
    kind = judge.get("kind", "openai")
    for field in judge:
        if kind == "openai" and field in OF_ENGINE:
            raise ValueError(
                f"{field} applies only to a judge on the stage's own engines, but this one is behind an"
                f" endpoint: set kind to vllm, or leave {field} out"
            )
        if kind != "openai" and field in OF_ENDPOINT:
            raise ValueError(
                f"kind {kind} runs the judge in this stage, but {field} applies only to a judge behind an"
                " endpoint: leave one of them out"
            )
    return judge | {"kind": kind}
