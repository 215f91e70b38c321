"""The chat models that judge answers for a reward: behind an endpoint, or on the stage's own engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from rlhf_core.config.engines import only_in_ppo
from rlhf_core.config.process_groups import OnEngine
from rlhf_core.config.rewarding.remote_models import Remote
from rlhf_core.records import Config, InDigestIfSet, NotInDigest, Positive, check


class ReplyLimit(Config):
    """How long a judge's reply may be."""

    max_tokens: Positive = Field(
        4096, description="longest reply, including the judge's reasons and hidden thoughts"
    )


class RatingModel(Remote, ReplyLimit):
    """The chat model that rates, behind an endpoint. Its name affects the rewards; its address does not, so a
    server may move."""

    kind: Annotated[Literal["openai"], InDigestIfSet] = Field(
        "openai", description="behind an endpoint, the default; for the other kinds see EngineJudge"
    )
    base_url: Annotated[str, NotInDigest] = Field(
        "https://api.openai.com/v1", description="the endpoint, which may move: no result depends on it"
    )


class EngineJudge(OnEngine, ReplyLimit):
    """A chat model that judges on engines that the stage starts."""

    kind: Literal["vllm", "transformers"] = Field(
        "vllm", description="kind of its engine; transformers for models that vLLM cannot sample"
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
                f"max_tokens={self.max_tokens} leaves none of max_model_len={self.max_model_len} for a"
                " request: lower it"
            )
        yield from only_in_ppo(self.engine)


class OwnJudge(NamedTuple):
    """A judge on the stage's own engines: its place in the config, its title in metrics, and its model."""

    place: str
    title: str
    model: EngineJudge

    @property
    def group(self) -> str:
        """The name of its engines' worker group."""
        return f"judge:{self.title}"


JudgingModel = Annotated[RatingModel | EngineJudge, Field(discriminator="kind")]
OF_ENDPOINT = RatingModel.model_fields.keys() - EngineJudge.model_fields.keys()
OF_ENGINE = EngineJudge.model_fields.keys() - RatingModel.model_fields.keys()


def with_kind(judge: Any) -> Any:
    """Returns a judge's fields with the kind filled in, by default that of an endpoint. Raises ValueError
    when a field belongs to the other kind of judge."""
    if not isinstance(judge, dict):
        return judge
    kind = judge.get("kind", "openai")
    for field in judge:
        if kind == "openai" and field in OF_ENGINE:
            raise ValueError(
                f"{field} is for a judge on the stage's own engines, but this one is behind an endpoint:"
                f" set kind to vllm, or leave {field} out"
            )
        if kind != "openai" and field in OF_ENDPOINT:
            raise ValueError(
                f"kind {kind} runs the judge in this stage, but {field} is for one behind an endpoint: leave"
                " one of them out"
            )
    return judge | {"kind": kind}
