"""Fields of a stage that contradict each other are told alone, without what follows from leaving them out."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_core.recipe.consistency import inconsistencies
from rlhf_core.recipe.expand import expand
from rlhf_core.recipe.load_recipe import recipe_of
from rlhf_core.recipe.sentences import WrongRecipe

GRPO: dict[str, Any] = {
    "actor": "base",
    "reward": {"function": "f.py:score"},
    "prompts": {"sources": "p.jsonl"},
    "advantage_estimator": "grpo",
    "n_samples_per_prompt": 4,
    "rollout_batch_size": 8,
    "train_batch_size": 32,
}


def told(**fields: Any) -> list[str]:
    stages = {"ppo": GRPO | fields}
    with pytest.raises(WrongRecipe) as caught:
        recipe_of({"name": "r", "base_model": "org/model", "stages": stages})
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"engine": {"kind": "transformers", "tensor_parallel_size": 2}}, "stages.ppo.engine: engine.kind"),
        ({"max_epochs": 2, "micro_train_batch_size": 5}, "stages.ppo: train_batch_size=32 must be"),
        ({"n_samples_per_prompt": 1}, "stages.ppo: "),
    ],
)
def test_a_contradiction_says_nothing_of_a_missing_critic(fields: dict[str, Any], start: str) -> None:
    found = told(**fields)
    assert found[0].startswith(start) and not any("critic" in line for line in found), found


def test_a_contradiction_hides_no_wrong_name_of_its_stage() -> None:
    found = told(engine={"kind": "transformers", "pipeline_parallel_size": 2}, reference="stf")
    assert len(found) == 2 and "has no pipeline_parallel_size" in found[0], found
    assert "stages.ppo.reference: unknown name 'stf'" in found[1]


def test_a_teacher_that_cannot_be_compared_says_nothing_of_the_estimator() -> None:
    teacher = {"reference": "org/teacher", "kl_in": "loss", "init_kl_coef": 1.0, "teacher_top_k": 8}
    found = told(**teacher, top_p=0.9)
    assert len(found) == 1 and "teacher_top_k compares whole distributions" in found[0], found


def test_pairs_are_trained_with_the_arguments_that_they_were_sampled_with() -> None:
    prompts = {"sources": "p.jsonl", "template_args": {"enable_thinking": False}}
    sampled = {"stage": "preferences", "policy": "base", "prompts": prompts, "reward": "org/r"}

    def problems(**fields: Any) -> list[str]:
        stages = {"sampled": sampled, "dpo": {"policy": "base", "pairs": "sampled", **fields}}
        recipe = recipe_of({"name": "r", "base_model": "org/model", "stages": stages})
        return inconsistencies(recipe, expand(recipe))

    assert problems(template_args={"enable_thinking": False}) == []
    [problem] = problems()
    assert problem.startswith("stages.dpo.template_args: they differ from those of the prompts of sampled")


def test_later_turns_of_a_validation_have_the_arguments_of_the_training() -> None:
    held_out = {"sources": "e.jsonl", "template_args": {"enable_thinking": False}}
    fields = {"environment": "guess", "reward": "environment", "eval_prompts": held_out}
    assert any("later turns" in line for line in told(**fields))
    assert not any("later turns" in line for line in told(**fields, prompts=held_out, max_epochs=0))
