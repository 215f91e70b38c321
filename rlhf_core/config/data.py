"""Configures the data sets of a stage and how their rows become text. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlhf_core.config.generated_data import GENERATED, VERIFIERS, ReasoningGymPrompts, VerifiersPrompts
from rlhf_core.records import Config, InDigestIfSet, Positive, Share, check, in_key_order

# what the rows of a data set hold
Rows = Literal["sft", "preference", "prompt", "answer", "labelled", "scored"]


# arguments that every chat template receives, besides the special tokens (NAME_token)
OWN_ARGUMENTS = frozenset(
    "messages conversation conversations tools documents chat_template add_generation_prompt"
    " continue_final_message return_assistant_tokens_mask tokenize additional_special_tokens"
    " extra_special_tokens raise_exception strftime_now".split()
)


# arguments of a chat template by name
TemplateArgs = Annotated[dict[str, Any], AfterValidator(in_key_order), InDigestIfSet]


def passed_by_alignflow(name: str) -> bool:
    """Returns whether alignflow itself passes this argument to every template."""
    return name in OWN_ARGUMENTS or name.endswith("_token")


def template_mistakes(template: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each mistake: a template other than 'chat' that does not hold exactly one {} for
    the prompt, and each unusable argument of a chat template."""
    if template != "chat" and template.count("{}") != 1:
        yield f"template {template!r} must be 'chat' or hold exactly one {{}} for the prompt"
    if template != "chat" and arguments:
        yield "only chat templates read template_args: leave them out, or set template to 'chat'"
    for name in arguments:
        if passed_by_alignflow(name):
            yield f"template_args: alignflow itself passes {name} to the chat template: leave it out"
        elif not name.isidentifier():
            yield f"template_args: {name!r} is not a name that a chat template can read: correct it"
    try:
        json.dumps(dict(arguments), allow_nan=False)
    except (TypeError, ValueError) as error:
        yield f"template_args must be valid JSON values ({error}): write dates and similar values as strings"


class Source(Config):
    """A data set of a mixture: a local .jsonl/.json/.csv file (also compressed: .gz, .zst), a .parquet file,
    a Hub data set id, or tasks whose prompts are generated."""

    path: str = Field(
        description=(
            "file, inbox (a folder NAME.inbox) or Hub data set id, optionally at a revision"
            " (owner/name@REVISION); omit it with reasoning_gym or verifiers"
        ),
        min_length=1,
    )
    split: str = Field("train", description="split of a Hub data set")
    format: Literal["auto", "columns", "ultrafeedback", "arena", "hh", "sharegpt"] = Field(
        "auto",
        description=(
            "format of the rows (docs/how-to/data.md); auto: detected from the first row; columns: the"
            " columns that the *_key fields name"
        ),
    )
    probability: Share = Field(1.0, description="share of the mixture; the shares of all sources sum to 1")
    messages_key: str = Field("messages", description="column with chat messages (SFT)")
    prompt_key: str = Field("prompt", description="column with the prompt: a string or chat messages")
    response_key: str = Field("response", description="column with the response, for rows without messages")
    chosen_key: str = Field("chosen", description="column with the preferred response (string or messages)")
    rejected_key: str = Field("rejected", description="column with the other response (string or messages)")
    margin_key: str | None = Field(
        None,
        description=(
            "column with the margin of a preference, if the data has one; ultrafeedback: the margin is the"
            " difference between the scores"
        ),
    )
    label_key: str = Field(
        "label", description="column that says whether a response is desirable (KTO): true or false, 1 or 0"
    )
    reward_key: str = Field("reward", description="column with the reward of a response (conditional SFT)")
    reasoning_gym: Annotated[ReasoningGymPrompts | None, InDigestIfSet] = Field(
        None, description="tasks of reasoning-gym whose questions are the prompts"
    )
    verifiers: Annotated[VerifiersPrompts | None, InDigestIfSet] = Field(
        None, description="environment of the verifiers package whose tasks are the prompts"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_tasks(cls, given: Any) -> Any:
        for package in (GENERATED, VERIFIERS) if isinstance(given, dict) else ():
            if given.get(package) is not None:
                given = {"path": package, **given}
        return given

    @check
    def _check_generated(self) -> Iterator[str]:
        for package in (GENERATED, VERIFIERS):
            if getattr(self, package) is not None and self.path != package:
                yield f"{package} replaces path: leave path out"

    @property
    def is_generated(self) -> bool:
        """Whether the rows come from a package, not from a file or the Hub."""
        return self.reasoning_gym is not None or self.verifiers is not None

    @property
    def is_inbox(self) -> bool:
        """Whether the source is an inbox, which holds feedback (rlhf_core/feedback)."""
        return self.path.endswith(".inbox")


class Data(Config):
    """A mixture of sources and how its rows become text."""

    sources: tuple[Source, ...] = Field(
        description="data sets, mixed according to their probabilities", min_length=1
    )
    template: str = Field(
        "chat",
        description=(
            "'chat': the tokenizer's chat template; otherwise a plain template with one {} for the prompt"
        ),
    )
    template_args: TemplateArgs = Field(
        {}, description="arguments of the chat template by name, such as enable_thinking: false"
    )
    max_samples: Positive | None = Field(None, description="maximum number of rows; default: all")

    @field_validator("sources", mode="before")
    @classmethod
    def _one_path_is_a_mixture(cls, value: Any) -> Any:
        if isinstance(value, str | dict):
            value = [value]
        if isinstance(value, (list, tuple)):
            return tuple({"path": v} if isinstance(v, str) else v for v in value)
        return value

    @property
    def tasks(self) -> list[str]:
        """The names of all reasoning-gym tasks of the sources."""
        generated = [source.reasoning_gym for source in self.sources if source.reasoning_gym is not None]
        return list(dict.fromkeys(chain.from_iterable(prompts.tasks for prompts in generated)))

    @property
    def num_parts(self) -> int:
        """The number of data sets; each reasoning-gym task counts as one."""
        return len(self.tasks) + sum(source.reasoning_gym is None for source in self.sources)

    @check
    def _check(self) -> Iterator[str]:
        total = sum(source.probability for source in self.sources)
        if len(self.sources) > 1 and abs(total - 1) > 1e-6:
            yield f"the probabilities of the {len(self.sources)} sources sum to {total:g}: make them sum to 1"
        yield from template_mistakes(self.template, self.template_args)


class Text(NamedTuple):
    """A data set of a stage: its config field, what its rows must hold (None: the stage checks them itself),
    and its token limit. `to_newest`: an inbox is read up to the newest row that a round of any loop has
    taken."""

    field: str
    data: Data
    rows: Rows | None
    limit_field: str
    limit: int
    to_newest: bool = False
