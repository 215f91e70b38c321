"""The KL to a reference model: its coefficient, its estimator, and where it counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.records import Config, InDigestIfSet, NotInDigest, Positive, Ranks, check


class Teacher(Config):
    """A model that the KL of some rows is measured from, in place of the reference. Its name alone also
    writes one."""

    model: str = Field(description="the model, with the actor's tokenizer")
    ranks: Annotated[Ranks | None, NotInDigest] = Field(
        None, description="its processes; default: reference_ranks of the stage"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, given: Any) -> Any:
        return {"model": given} if isinstance(given, str) else given


class KLPenalty(Config):
    """The reference that the actor is kept near, and the KL penalty."""

    reference: str | None = Field(
        None,
        description=(
            "KL anchor; default: the actor before training, or, with init_kl_coef 0 and no kl_target, none:"
            " no KL is measured"
        ),
    )
    teachers: Annotated[dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], Teacher], InDigestIfSet] = Field(
        {},
        description=(
            "models by name: the column `teacher` of a row names the one that the KL of its answers is"
            " measured from; rows without a name use reference"
        ),
    )
    reset_reference_every: Annotated[Positive | None, InDigestIfSet] = Field(
        None,
        description=(
            "iterations between two updates of the reference to the actor's weights (ProRL, Liu et"
            " al. 2025); default: it stays the actor before training"
        ),
    )
    init_kl_coef: float = Field(0.01, ge=0, description="coefficient of the per-token KL")
    final_kl_coef: Annotated[float | None, InDigestIfSet] = Field(
        None,
        ge=0,
        description=(
            "coefficient of the last iteration; it moves there linearly from init_kl_coef; default: it stays"
            " at init_kl_coef"
        ),
    )
    kl_in: Literal["reward", "loss"] = Field(
        "reward", description="the KL is subtracted from the reward, or added to the loss (k2, k3)"
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description=(
            "adapt the coefficient so that kl/mean, in nats per token, comes to this (Ziegler et al. 2019,"
            " whose target is per answer: divide it by the answers' length); default: fixed"
        ),
    )
    kl_horizon: Positive = Field(
        10000,
        description="answers over which the coefficient adapts: it changes by 2 % at most in a tenth of them",
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k1", description="KL estimator (Schulman 2020); k1 suits kl_in reward, k2 suits kl_in loss"
    )

    teacher_top_k: Annotated[int | None, InDigestIfSet] = Field(
        None,
        ge=1,
        le=1024,
        description=(
            "with kl_in loss: the KL in the loss is the sum over the K most probable tokens of the teacher,"
            " reference, and all others together, in place of an estimate from the sampled token (on-policy"
            " distillation, Agarwal et al. 2024)"
        ),
    )

    @property
    def has_reference(self) -> bool:
        """Whether a reference is loaded: the recipe names one, or a KL to it is measured."""
        return self.reference is not None or self.init_kl_coef > 0 or self.kl_target is not None

    def kl_coef_of(self, iteration: int, iterations: int) -> float:
        """Returns the coefficient of an iteration, the first being 0, without `kl_target`: `init_kl_coef`, or
        on the straight line from it to `final_kl_coef` in the last of `iterations`."""
        if self.final_kl_coef is None or iterations < 2:
            return self.init_kl_coef
        done = iteration / (iterations - 1)
        return (1 - done) * self.init_kl_coef + done * self.final_kl_coef

    @check
    def _check_teachers(self) -> Iterator[str]:
        if not self.teachers:
            return
        if not self.init_kl_coef:
            yield (
                "teachers teach by the KL to them, and init_kl_coef is 0: set it above 0, or leave out"
                " teachers"
            )
        if self.reset_reference_every is not None:
            yield (
                "reset_reference_every gives the reference the actor's weights, and teachers keep theirs:"
                " leave one of them out"
            )

    @check
    def _check_kl(self) -> Iterator[str]:
        if self.final_kl_coef is not None and self.kl_target is not None:
            yield "kl_target adapts the coefficient, and final_kl_coef schedules it: leave one of them out"
        if self.final_kl_coef is not None and not self.init_kl_coef:
            yield "final_kl_coef needs a KL from the first iteration on: set init_kl_coef above 0"
        if self.kl_target is not None and not self.init_kl_coef:
            yield (
                "kl_target multiplies the coefficient, which stays 0 with init_kl_coef 0: set init_kl_coef"
                " above 0, or leave out kl_target"
            )
        if self.teacher_top_k is not None:
            yield from self._teacher_mistakes()
        elif self.kl_in == "loss" and self.kl_estimator == "k1":
            yield (
                "k1 as a loss has an expected gradient of zero: set kl_estimator to k2, whose gradient is"
                " that of the KL, kl_in to reward, or teacher_top_k if the reference is a teacher"
            )

    def _teacher_mistakes(self) -> Iterator[str]:
        if self.reference is None:
            yield "teacher_top_k reads the distributions of a teacher: set reference to it"
        if self.kl_in != "loss":
            yield (
                "teacher_top_k puts the KL of whole distributions into the loss: set kl_in to loss, or leave"
                " teacher_top_k out"
            )
        if not self.init_kl_coef:
            yield "teacher_top_k has no effect with init_kl_coef 0: set init_kl_coef above 0, usually to 1"
