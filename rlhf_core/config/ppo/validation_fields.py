"""Configures validation during training: its prompts, how they are answered, and when validation ends the
stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import Field

from rlhf_core.config.data import Data, Text
from rlhf_core.config.sampled.rewarded_sampling import Rewarded
from rlhf_core.records import Positive, check


def pass_sizes(samples: int) -> list[int]:
    """Returns each k for which pass@k is reported with `samples` answers per prompt: 1, 2, 4, ... and
    `samples`."""
    return sorted({1 << power for power in range(samples.bit_length())} | {samples})


# fields that are read only with `eval_prompts`
OF_PROMPTS = ("eval_steps", "eval_samples", "eval_temperature", "eval_top_p", "eval_right", "stop_when")


class ValidationFields(Rewarded):
    """Fields for validating the actor on prompts that it is not trained on."""

    eval_prompts: Data | None = Field(
        None,
        description=(
            "prompts that are answered and scored during and after training; the checkpoint is then from the"
            " iteration with the highest mean reward (which may be the model before training)"
        ),
    )
    eval_steps: Positive = Field(
        10, description="number of iterations between two validations on eval_prompts"
    )
    eval_samples: Positive = Field(1, description="number of answers to each of eval_prompts")
    eval_temperature: float | None = Field(
        None,
        ge=0,
        description=(
            "temperature of the answers to eval_prompts; default: that of training, so that validation"
            " measures the distribution that is trained. To measure the model as it will be used, set the"
            " temperature of that use (0: greedy, one answer each)"
        ),
    )
    eval_top_p: float | None = Field(
        None, gt=0, le=1, description="top_p of the answers to eval_prompts; default: that of training"
    )
    eval_right: float | None = Field(
        None,
        description=(
            "reward from which an answer counts as right; reports the share of right answers, and pass@k for"
            " k = 1, 2, 4, ... and eval_samples"
        ),
    )
    stop_when: Positive | None = Field(
        None, description="stop after this many validations in a row without a higher mean reward"
    )

    @property
    def texts(self) -> Sequence[Text]:
        trained = super().texts
        if self.eval_prompts is None:
            return trained
        own = Text("eval_prompts", self.eval_prompts, "prompt", "prompt_max_len", self.prompt_max_len)
        return [*trained, own]

    @check
    def _check_validation(self) -> Iterator[str]:
        fields = type(self).model_fields
        changed = [name for name in OF_PROMPTS if getattr(self, name) != fields[name].default]
        if self.eval_prompts is None and changed:
            yield (
                f"eval_prompts is not set, but {', '.join(changed)} applies to it: set eval_prompts, or leave"
                f" {changed[0]} out"
            )
        if self.eval_temperature == 0 and self.eval_samples > 1:
            yield (
                "eval_temperature=0 gives the same answer every time: set eval_samples to 1, or"
                " eval_temperature above 0"
            )
