"""Configures the publication of a model, with its card."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlhf_core.config.gates import Gated, Key
from rlhf_core.records import RECIPE_ONLY, No, NotInDigest, check


class Publication(Gated):
    """Publishes a model with its card and scores, or a data set, to a folder and, if `repo_id` is set, to the
    Hub."""

    stage: Literal["publication"] = "publication"
    model: str | None = Field(None, description="model to publish")
    dataset: str | None = Field(
        None,
        description=(
            "use instead of model: a preferences stage, to publish its pairs or answers, or an evaluation, to"
            " publish its judgments and answers"
        ),
    )
    evaluation: str | None = Field(None, description="evaluation whose scores the model card shows")
    folder: str | None = Field(
        None, description="folder to publish to; default: published/ in the run directory", min_length=1
    )
    repo_id: str | None = Field(None, description="Hub repository, owner/name; the token comes from HF_TOKEN")
    branch: str = Field("main", description="branch of the repository, created if it does not exist")
    round_branch: str | None = Field(
        None,
        description=(
            "for a loop: also publish every round, to a branch of this name with {} replaced by the round's"
            " number (round-{})"
        ),
    )
    champion: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "make the published model the recipe's champion until a gate on it fails"
            " (docs/how-to/champion.md)"
        ),
    )
    base_repo: str | None = Field(
        None, description="for an adapter whose base is a local folder: Hub repository that holds this base"
    )
    private: bool = Field(
        True,
        description="make a new repository private, and refuse an existing public one",
        json_schema_extra=RECIPE_ONLY,
    )
    gated: Annotated[Literal["base", "auto", "manual", "no"], No] = Field(
        "base",
        description=(
            "who grants readers access: the Hub (auto) or you (manual); no: access is open; base: as for the"
            " base model"
        ),
        json_schema_extra=RECIPE_ONLY,
    )
    dry_run: bool = Field(
        False,
        description="only show what would be sent and where; needs no token",
        json_schema_extra=RECIPE_ONLY,
    )
    license: str | None = Field(
        None,
        description="licence on the model card; default: the one that the base model and the data require",
    )
    licenses: dict[str, str] = Field(
        {}, description="licences by Hub id or file, for base models and data sets whose cards name none"
    )

    @field_validator("repo_id")
    @classmethod
    def _is_a_repository(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", value):
            raise ValueError(f"{value!r} is not a Hub repository: write it as owner/name")
        return value

    @field_validator("branch", "round_branch")
    @classmethod
    def _is_a_branch(cls, value: str | None) -> str | None:
        """Returns the name. Raises ValueError if it needs escaping in a URL or looks like a commit."""
        if value is not None and not re.fullmatch(
            r"(?![0-9a-f]{40}$)[A-Za-z0-9](\.?[\w-])*", value.replace("{}", "1")
        ):
            raise ValueError(
                f"{value!r} is not a branch name: use letters, digits, - and _, with single dots between them"
            )
        return value

    @check
    def _check_champion(self) -> Iterator[str]:
        if self.champion and self.model is None:
            yield "champion applies only to a model: leave it out for a data set"
        if self.champion and self.branch == "champion":
            yield "the branch champion always points to the champion's commit: publish to another branch"
        if self.champion and self.folder is not None:
            yield (
                "folder holds only the last model, but a rollback needs earlier ones: leave out folder or"
                " champion"
            )

    @check
    def _check_round_branch(self) -> Iterator[str]:
        if self.round_branch is None:
            return
        if self.round_branch.count("{}") != 1 or self.model is None:
            yield (
                "round_branch applies to the model of a loop and must contain {} once, for the round's"
                " number: write round-{}"
            )
        if self.repo_id is None or self.folder is not None:
            yield "round_branch publishes several models to branches: set repo_id, and leave folder out"
        if re.fullmatch(re.escape(self.round_branch).replace(r"\{\}", "[0-9]+"), self.branch):
            yield f"branch {self.branch} is also the branch of a round: choose another one"

    @check
    def _check_model_or_dataset(self) -> Iterator[str]:
        if (self.model is None) == (self.dataset is None):
            yield (
                "a publication has either a model or a dataset: set one of them, and publish the other in a"
                " separate stage"
            )
        if self.dataset and (self.evaluation or self.base_repo):
            yield "evaluation and base_repo apply only to models: leave them out when you publish a dataset"

    @property
    def published_model(self) -> str | None:
        return self.model

    def tokenizer_model(self, start: str) -> str | None:
        return self.dataset or self.model

    @property
    def needed_keys(self) -> Sequence[Key]:
        return (
            [Key(f"the repository {self.repo_id}", "HF_TOKEN")] if self.repo_id and not self.dry_run else []
        )
