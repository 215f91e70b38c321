"""Configures the KL to a reference model: its coefficient, its estimator, and where it is applied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rlhf_core.records import Config, InDigestIfSet, NotInDigest, Positive, Ranks, check


class Teacher(Config):
    """A model that replaces the reference for the KL of some rows. In short form: only its name."""

    model: str = Field(description="the model, which must have the actor's tokenizer")
    ranks: Annotated[Ranks | None, NotInDigest] = Field(
        None, description="processes of the teacher; default: reference_ranks of the stage"
    )

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, given: Any) -> Any:
        return {"model": given} if isinstance(given, str) else given


class KLPenalty(Config):
    """Fields for the reference that the actor is kept close to, and for the KL penalty."""

    reference: str | None = Field(
        None,
        description=(
            "model that the KL is measured to; default: the actor before training, or, with init_kl_coef 0"
            " and no kl_target, none (no KL is measured)"
        ),
    )
    teachers: Annotated[dict[Annotated[str, Field(pattern=r"^[\w.-]+$")], Teacher], InDigestIfSet] = Field(
        {},
        description=(
            "teachers by name: for the answers to a row whose column `teacher` names one, the KL is measured"
            " to this teacher; rows without a name use reference"
        ),
    )
    reset_reference_every: Annotated[Positive | None, InDigestIfSet] = Field(
        None,
        description=(
            "number of iterations after which the reference is reset to the actor's current weights (ProRL,"
            " Liu et al. 2025); default: never"
        ),
    )
    init_kl_coef: float = Field(0.01, ge=0, description="coefficient of the per-token KL")
    final_kl_coef: Annotated[float | None, InDigestIfSet] = Field(
        None,
        ge=0,
        description=(
            "coefficient of the last iteration, reached linearly from init_kl_coef; default: init_kl_coef"
        ),
    )
    kl_in: Literal["reward", "loss"] = Field(
        "reward",
        description=(
            "where the KL is applied. reward: subtracted from the reward; loss: added to the loss (k2, k3)"
        ),
    )
    kl_target: float | None = Field(
        None,
        gt=0,
        description=(
            "adapt the coefficient so that kl/mean, in nats per token, approaches this value (Ziegler et al."
            " 2019; their target is per answer, so divide it by the answers' length); default: the"
            " coefficient does not adapt"
        ),
    )
    kl_horizon: Positive = Field(
        10000,
        description=(
            "number of answers over which the coefficient adapts: it changes by at most 2 % per tenth of this"
            " number"
        ),
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k1", description="KL estimator (Schulman 2020); k1 suits kl_in reward, k2 suits kl_in loss"
    )

    teacher_top_k: Annotated[int | None, InDigestIfSet] = Field(
        None,
        ge=1,
        le=1024,
        description=(
            "with kl_in loss: compute the KL in the loss as a sum over the teacher's K most probable tokens"
            " and one term for all other tokens, instead of an estimate from the sampled token; the teacher"
            " is reference (on-policy distillation, Agarwal et al. 2024)"
        ),
    )

    @property
    def has_reference(self) -> bool:
        """Whether a reference is loaded, because the recipe names one or a KL to it is measured."""
        return self.reference is not None or self.init_kl_coef > 0 or self.kl_target is not None

    def kl_coef_of(self, iteration: int, iterations: int) -> float:
        """Returns an iteration's KL coefficient if there is no `kl_target`. It is `init_kl_coef`, or a linear
        interpolation from `init_kl_coef` in iteration 0 to `final_kl_coef` in the last of `iterations`."""
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
                "teachers act only through the KL, but init_kl_coef is 0: set it above 0, or leave out"
                " teachers"
            )
        if self.reset_reference_every is not None:
            yield (
                "reset_reference_every resets the reference to the actor's weights, but teachers keep their"
                " own: leave one of them out"
            )

    @check
    def _check_kl(self) -> Iterator[str]:
        if self.final_kl_coef is not None and self.kl_target is not None:
            yield "kl_target adapts the coefficient, but final_kl_coef schedules it: leave one of them out"
        if self.final_kl_coef is not None and not self.init_kl_coef:
            yield "final_kl_coef needs a KL from the first iteration: set init_kl_coef above 0"
        if self.kl_target is not None and not self.init_kl_coef:
            yield (
                "kl_target scales the coefficient, which stays 0 if init_kl_coef is 0: set init_kl_coef above"
                " 0, or leave out kl_target"
            )
        if self.teacher_top_k is not None:
            yield from self._teacher_mistakes()
        elif self.kl_in == "loss" and self.kl_estimator == "k1":
            yield (
                "k1 has an expected gradient of zero in the loss: set kl_estimator to k2, whose gradient is"
                " that of the KL, kl_in to reward, or teacher_top_k if the reference is a teacher"
            )

    def _teacher_mistakes(self) -> Iterator[str]:
        if self.reference is None:
            yield "teacher_top_k reads the distributions of a teacher: set reference to it"
        if self.kl_in != "loss":
            yield (
                "teacher_top_k adds a KL over distributions to the loss: set kl_in to loss, or leave"
                " teacher_top_k out"
            )
        if not self.init_kl_coef:
            yield "teacher_top_k has no effect with init_kl_coef 0: set init_kl_coef above 0, usually to 1"
