"""Prompts from the packages reasoning-gym and verifiers, as data sources. Torch-free; imports neither."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from rlhf_core.records import RECIPE_ONLY, Config, NotInDigest, Positive, check, in_key_order

GENERATED = "reasoning_gym"  # a generated source has this in place of a path, and a row this column
VERIFIERS = "verifiers"  # the same of an environment's tasks
TAKEN = ("seed", "size")  # options of every task, which the source sets


class ReasoningGymPrompts(Config):
    """Tasks of reasoning-gym (Stojanovski et al. 2025), whose questions become prompts.
    `reward: reasoning_gym` scores the answers to them."""

    tasks: Annotated[dict[str, dict[str, Any]], AfterValidator(in_key_order)] = Field(
        description=(
            "name of a task: its options and `weight`, its share of the prompts relative to the others'"
            " (default 1); or a list of names"
        ),
        min_length=1,
    )
    size: Positive = Field(1000, description="prompts to generate, over all tasks")
    seed: int = Field(0, ge=0, description="determines the questions: a different seed gives different ones")
    instruction: str = Field(
        "Write the final answer between <answer> and </answer>.",
        description="text after each question, such as the form of the answer; empty: none",
    )
    system: str | None = Field(None, description="system message of each prompt")

    @field_validator("tasks", mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        names = [given] if isinstance(given, str) else given
        if isinstance(names, list | tuple):
            wrong = [name for name in names if not isinstance(name, str)]
            if wrong:
                raise ValueError(
                    f"a list has names of tasks, not {wrong[0]!r}: options need a mapping, NAME: {{...}}"
                )
            if len(set(names)) < len(names):
                raise ValueError("a task is named twice: give it a larger weight instead")
            return {name: {} for name in names}
        if isinstance(names, dict):
            return {name: {} if options is None else options for name, options in names.items()}
        return given

    @check
    def _check_options(self) -> Iterator[str]:
        for name, options in self.tasks.items():
            weight = options.get("weight", 1)
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not 0 < weight < math.inf:
                yield f"the weight of the task {name} must be a number above 0, not {weight!r}"
            for option in TAKEN:
                if option in options:
                    yield f"{option} is that of the whole source: set it beside tasks, not in the task {name}"
            try:
                json.dumps(options, allow_nan=False)
            except (TypeError, ValueError) as error:
                yield f"the options of the task {name} must be what JSON can hold ({error})"

    @property
    def shares(self) -> dict[str, float]:
        """The share of each task in the prompts."""
        weights = {name: float(options.get("weight", 1)) for name, options in self.tasks.items()}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """The options of each task's data set."""
        return {
            name: {option: value for option, value in options.items() if option != "weight"}
            for name, options in self.tasks.items()
        }


class VerifiersPrompts(Config):
    """Tasks of an environment of the package verifiers, whose prompts become prompts.
    `environment: {verifiers: NAME}` plays them."""

    environment: str = Field(description="name of the installed environment", min_length=1)
    options: dict[str, Any] = Field(
        {}, description="arguments of load_environment; from verifiers 0.2 on, its env block"
    )
    python: Annotated[str | None, NotInDigest] = Field(
        None,
        description="interpreter that has the environment installed; default: the one that runs alignflow",
        json_schema_extra=RECIPE_ONLY,
        min_length=1,
    )
    dataset: Literal["train", "eval"] = Field(
        "train", description="data set, with verifiers before 0.2; later ones choose by options"
    )
    size: Positive | None = Field(None, description="at most this many tasks; default: all")

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"options must be what JSON can hold ({error}): write dates as texts") from error
        return options
