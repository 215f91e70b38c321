"""Configures the comparison of a judge with people, and identifies identical judges in a recipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rlhf_core.config.data import Source, TemplateArgs, template_mistakes
from rlhf_core.config.gates import AskedServer, Gated, chat_servers
from rlhf_core.config.judging.judges import (
    Judge,
    OpenAIJudge,
    RewardJudge,
    VllmJudge,
    names_of_judge,
)
from rlhf_core.config.process_groups import Groups
from rlhf_core.config.rewarding.remote_models import Remote
from rlhf_core.config.training.pass_size import FULL_PASS, ROWS, PassSize, pass_size
from rlhf_core.records import NotInDigest, Positive, check
from rlhf_core.system.files import digest

STOPPING = ("interval_width", "sequential_questions")  # they set when a chat judge stops, not its verdicts
# excludes rule judges, which have the known answers
FallibleJudge = Annotated[RewardJudge | OpenAIJudge | VllmJudge, Field(discriminator="kind")]


class Calibration(Gated):
    """Runs a judge on pairs labelled by people, two games per pair with the answers swapped, and measures
    agreement, kappa and biases."""

    stage: Literal["calibration"] = "calibration"
    judge: FallibleJudge = Field(
        description="the judge, as in an evaluation; it judges all pairs, whatever its interval_width"
    )
    labels: Source = Field(description="file with the labels (.jsonl; docs/how-to/calibration.md)")
    max_labels: Positive | None = Field(
        None, description="maximum number of pairs, the most recently labelled; default: all"
    )
    template: str = Field("chat", description="for a reward judge: 'chat' or a plain template with one {}")
    template_args: TemplateArgs = Field(
        {}, description="for a reward judge: arguments of its chat template by name"
    )
    prompt_max_len: Positive = Field(
        1024,
        description=(
            "for a reward judge: maximum prompt length in tokens; longer prompts lose their beginning"
        ),
    )
    generate_max_len: Positive = Field(
        1024, description="for a reward judge: maximum answer length in tokens; longer answers are cut"
    )
    micro_rollout_batch_size: Annotated[Positive | None, NotInDigest] = Field(
        None,
        description=(
            "for a reward judge: documents per scoring pass; default: as many as have the tokens of"
            f" {ROWS} documents of maximum length, but at most {FULL_PASS} tokens or one document"
        ),
    )
    bootstrap_rounds: Positive = Field(
        1000, description="number of bootstrap resamples of the pairs' uids, for kappas and error gaps"
    )

    @field_validator("labels", mode="before")
    @classmethod
    def _a_path_is_a_source(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @check
    def _check_template(self) -> Iterator[str]:
        yield from template_mistakes(self.template, self.template_args)

    def tokenizer_model(self, start: str) -> str | None:
        return next((name for _, name, _ in self.nested_names), None)

    def lengths(self, start: str) -> Mapping[tuple[str, str], tuple[int, str]]:
        if isinstance(self.judge, VllmJudge) and self.judge.max_model_len:
            return {(".judge", self.judge.model): (self.judge.max_model_len, "max_model_len")}
        if isinstance(self.judge, RewardJudge):
            both = self.prompt_max_len + self.generate_max_len, "prompt_max_len + generate_max_len"
            return {("", self.judge.reward): both}
        return {}

    @property
    def scoring_pass(self) -> PassSize:
        """The size of a pass of a reward judge."""
        return pass_size(self.micro_rollout_batch_size, None, self.prompt_max_len + self.generate_max_len)

    @property
    def nested_names(self) -> Sequence[tuple[str, str, str]]:
        return names_of_judge("judge", self.judge)

    @property
    def turns(self) -> Sequence[Groups]:
        return [{"judge": self.judge.engine} if isinstance(self.judge, VllmJudge) else {}]

    @property
    def servers(self) -> Sequence[AskedServer]:
        if not isinstance(self.judge, Remote):
            return ()
        return chat_servers([(f"the judge {self.judge.model}", self.judge)])


def judge_identity(judge: Judge, inputs: Mapping[str, str], template_args: Mapping[str, Any]) -> str:
    """Returns a digest of everything that affects a judge's verdicts: its fields, the location of its
    checkpoint and, for a reward judge, the stage's `template_args`. In a recipe the location is a folder
    named after its stage's digest, a local folder, or a Hub id at a commit. `inputs` maps names to these
    locations, as in a request."""
    decides = [
        name
        for name, field in type(judge).model_fields.items()
        if NotInDigest not in field.metadata and name not in STOPPING
    ]
    values = judge.model_dump(mode="json", include=set(decides))
    match judge:
        case RewardJudge():
            values["reward"] = _place(judge.reward, inputs)
            if template_args:
                values["template_args"] = template_args
        case VllmJudge():
            values["model"] = _place(judge.model, inputs)
            values["vllm"] = judge.engine.options
    return digest(values)


def _place(name: str, inputs: Mapping[str, str]) -> str:
    """Returns the location of a model. For a stage's output it omits the artifacts folder, which differs
    between machines."""
    place = inputs.get(name, name)
    parts = PurePath(place).parts
    return "/".join(parts[parts.index("stages") + 1 :]) if "stages" in parts else place
