"""Configures prompts from the packages reasoning-gym and verifiers as data sources. Torch-free; imports
neither package."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from rlhf_core.records import RECIPE_ONLY, Config, NotInDigest, Positive, check, in_key_order

GENERATED = "reasoning_gym"  # path of a generated source, and a column of its rows
VERIFIERS = "verifiers"  # the same for the tasks of an environment
TAKEN = ("seed", "size")  # task options that the source itself sets


class ReasoningGymPrompts(Config):
    """Tasks of reasoning-gym (Stojanovski et al. 2025), whose questions become prompts. `reward:
    reasoning_gym` scores the answers."""

    tasks: Annotated[dict[str, dict[str, Any]], AfterValidator(in_key_order)] = Field(
        description=(
            "mapping of each task's name to its options, among them `weight`, its share of the prompts"
            " relative to other tasks (default 1); or a list of names"
        ),
        min_length=1,
    )
    size: Positive = Field(1000, description="number of prompts to generate, all tasks together")
    seed: int = Field(
        0, ge=0, description="seed of the questions: a different seed gives different questions"
    )
    instruction: str = Field(
        "Write the final answer between <answer> and </answer>.",
        description="text appended to each question, such as the required answer format; empty: none",
    )
    system: str | None = Field(None, description="system message for each prompt")

    @field_validator("tasks", mode="before")
    @classmethod
    def _names(cls, given: Any) -> Any:
        names = [given] if isinstance(given, str) else given
        if isinstance(names, list | tuple):
            wrong = [name for name in names if not isinstance(name, str)]
            if wrong:
                raise ValueError(
                    f"a list holds names of tasks, not {wrong[0]!r}: give options in a mapping, NAME: {{...}}"
                )
            if len(set(names)) < len(names):
                raise ValueError("a task is listed twice: list it once, with a larger weight")
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
                    yield (
                        f"{option} applies to the whole source: set it next to tasks, not inside the task"
                        f" {name}"
                    )
            try:
                json.dumps(options, allow_nan=False)
            except (TypeError, ValueError) as error:
                yield f"the options of the task {name} must be valid JSON values ({error})"

    @property
    def shares(self) -> dict[str, float]:
        """Each task's share of the prompts."""
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
    """The tasks of an environment of the verifiers package, whose prompts become the prompts of the source.
    `environment: {verifiers: NAME}` runs their episodes."""

    environment: str = Field(description="name of the installed environment", min_length=1)
    options: dict[str, Any] = Field(
        {},
        description="arguments of load_environment; from verifiers 0.2 on: fields of the package's env block",
    )
    python: Annotated[str | None, NotInDigest] = Field(
        None,
        description=(
            "Python interpreter that has the environment installed; default: the one that runs alignflow"
        ),
        json_schema_extra=RECIPE_ONLY,
        min_length=1,
    )
    dataset: Literal["train", "eval"] = Field(
        "train",
        description="data set to use, with verifiers before 0.2; later versions select it through options",
    )
    size: Positive | None = Field(None, description="maximum number of tasks; default: all")

    @field_validator("options")
    @classmethod
    def _plain(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"options must be valid JSON values ({error}): write dates as strings"
            ) from error
        return options
