"""Configures verifiers: rewards that check an answer against a column of its row. They are functions that
ship with alignflow. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from rlhf_core.config.generated_data import GENERATED
from rlhf_core.config.rewarding.weighed_reward import StandardisedReward
from rlhf_core.records import RECIPE_ONLY, NotInDigest, Positive, Rate

SHIPPED_VERIFIERS = Path(__file__).parents[2] / "environments" / "verifiers"
SPARE_SECONDS = 60.0  # of a request, in addition to the time of its answers


class VerifierReward(StandardisedReward):
    """Fields that all verifiers share. The reward is between 0 and 1; an answer that was truncated at a limit
    gets 0. Each verifier has `column`, the column that it reads; `options`, the arguments of its function;
    and `request_seconds`, the time limit of a request."""

    version: ClassVar[int]  # in the digest: raise it when a change to the verifier changes rewards
    shipped: ClassVar[str]  # the verifier: SHIPPED_VERIFIERS/NAME_verifier.py
    column_field: ClassVar[str]  # names the column that it reads
    batch_size: ClassVar[int]  # answers of one request
    max_attempts: ClassVar[int] = 3

    concurrency: Annotated[Positive, NotInDigest] = Field(
        4, description="answers checked at once, each in its own process"
    )

    @property
    def title(self) -> str:
        return self.name or self.shipped

    @property
    def file(self) -> Path:
        return SHIPPED_VERIFIERS / f"{self.shipped}_verifier.py"

    @property
    def function_name(self) -> str:
        return "verify_answers"


class MathReward(VerifierReward):
    """Reward 1 if the final answer of a response equals the row's answer, else 0. The short form `math` means
    `{verifier: math}`. Needs the package math-verify."""

    version: ClassVar[int] = 2
    shipped: ClassVar[str] = "math"
    column_field: ClassVar[str] = "answer"
    batch_size: ClassVar[int] = 16

    kind: Literal["math"] = "math"
    verifier: Literal["math"] = Field("math", description="compares final answers")
    answer: str = Field(
        "answer", min_length=1, description="column with the right answer; a.b: the key b in column a"
    )
    timeout: Rate = Field(
        5.0, description="time limit of one comparison in CPU seconds; beyond it the answer counts as wrong"
    )

    @property
    def column(self) -> str:
        return self.answer

    @property
    def options(self) -> dict[str, Any]:
        return {"column": self.answer, "seconds": self.timeout}

    @property
    def request_seconds(self) -> float:
        return self.batch_size * 10 * self.timeout + SPARE_SECONDS


class CodeReward(VerifierReward):
    """Reward 1 if the program in a response passes all tests of its row, else 0 (see `partial`). The short
    form `code` means `{verifier: code}`."""

    version: ClassVar[int] = 2
    shipped: ClassVar[str] = "code"
    column_field: ClassVar[str] = "tests"
    batch_size: ClassVar[int] = 4

    kind: Literal["code"] = "code"
    verifier: Literal["code"] = Field("code", description="runs tests")
    tests: str = Field("tests", min_length=1, description="column with the tests; a.b: the key b in column a")
    language: Literal["python"] = Field("python", description="language of the programs")
    timeout: Rate = Field(
        10.0,
        description=(
            "time limit of one test in CPU seconds; all tests of an answer together have ten times this limit"
        ),
    )
    memory_mib: int = Field(512, gt=0, le=1 << 20, description="memory limit of one program in MiB")
    partial: bool = Field(
        False, description="reward the share of tests that pass; default: reward 1 if all pass, else 0"
    )
    sandbox: Annotated[Literal["bubblewrap", "none"], NotInDigest] = Field(
        "bubblewrap",
        description="where programs run. bubblewrap: in a sandbox; none: with all your permissions",
        json_schema_extra=RECIPE_ONLY,
    )

    @property
    def column(self) -> str:
        return self.tests

    @property
    def options(self) -> dict[str, Any]:
        return {
            "column": self.tests,
            "language": self.language,
            "seconds": self.timeout,
            "memory_mib": self.memory_mib,
            "partial": self.partial,
            "mode": self.sandbox,
        }

    @property
    def request_seconds(self) -> float:
        return self.batch_size * (4 * 11 * self.timeout + SPARE_SECONDS) + SPARE_SECONDS


class ReasoningGymReward(VerifierReward):
    """Reward from reasoning-gym, 0 to 1, for an answer to one of its own questions, which a data source
    `reasoning_gym` generates. The short form `reasoning_gym` means `{verifier: reasoning_gym}`. Needs the
    package reasoning-gym. Some of its tasks evaluate an answer as Python, so answers are scored in a
    sandbox."""

    version: ClassVar[int] = 1
    shipped: ClassVar[str] = "reasoning_gym"
    column_field: ClassVar[str] = ""
    batch_size: ClassVar[int] = 64
    max_attempts: ClassVar[int] = 1  # a task that raises for an answer raises again

    kind: Literal["reasoning_gym"] = "reasoning_gym"
    verifier: Literal["reasoning_gym"] = Field("reasoning_gym", description="scores answers to its questions")
    tag: str | None = Field(
        "answer",
        pattern=r"^[A-Za-z_][\w-]*$",
        description=(
            "XML tag around the answer. If a response has several, the last one counts; if it has none, the"
            " score is 0. null: the answer is the whole response"
        ),
    )
    timeout: Rate = Field(
        5.0,
        description="time limit for scoring one answer in CPU seconds; beyond it the answer gets no reward",
    )
    sandbox: Annotated[Literal["bubblewrap", "none"], NotInDigest] = Field(
        "bubblewrap",
        description="where answers are scored. bubblewrap: in a sandbox; none: with all your permissions",
        json_schema_extra=RECIPE_ONLY,
    )

    @property
    def column(self) -> str:
        return GENERATED

    @property
    def options(self) -> dict[str, Any]:
        return {"tag": self.tag, "seconds": self.timeout, "mode": self.sandbox}

    @property
    def request_seconds(self) -> float:
        return self.batch_size * (4 * self.timeout + SPARE_SECONDS) + SPARE_SECONDS


Verifier = MathReward | CodeReward | ReasoningGymReward
