"""Arguments that a chat template never reads are reported before any work, for data sets and for evaluations."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_core.data.chat import Renderer, load_tokenizer
from rlhf_core.preflight.inputs import check_inputs
from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import plan
from tests.support.frame_lengths import frame_lengths
from tests.unit.preflight.test_check import TEMPLATE, Planned, planned, save_tokenizer

__all__ = ["planned"]
READING = "{% if effort is defined %}{{ 'Effort: ' + effort }}{% endif %}" + TEMPLATE


@pytest.mark.parametrize(
    ("field", "where"),
    [
        ("sft.data", "sft.data"),
        ("reward_model.data", "reward_model.data"),
        ("ppo.prompts", "ppo.prompts"),
        ("loop.prompts", "loop.round1.preferences.prompts"),
        ("evaluation", "evaluation.questions"),
    ],
)
def test_an_argument_that_is_never_read_is_one_problem(planned: Planned, field: str, where: str) -> None:
    found = planned(f"{field}.template_args={{efort: low}}")
    told = [problem for problem in check_inputs(found, found.nodes) if f"stages.{where}:" in problem]
    assert len(told) == 1 and "never reads efort of template_args" in told[0]
    assert "it reads no arguments" in told[0]


def test_arguments_that_are_read_are_no_problem_and_lengthen_the_template(planned: Planned) -> None:
    save_tokenizer(Path("base"), READING)
    given = [f"{field}.template_args={{effort: low}}" for field in ("sft.data", "ppo.prompts", "evaluation")]
    found = planned(*given)
    assert check_inputs(found, found.nodes) == []
    lengths = frame_lengths([("base", "chat"), ("base", "chat", '{"effort": "low"}')])
    assert lengths["base", "chat", '{"effort": "low"}'] == lengths["base", "chat"] + len("Effort: low")
    renderer = Renderer(load_tokenizer("base"), "chat", template_args={"effort": "low"})
    assert lengths["base", "chat", '{"effort": "low"}'] == renderer.frame_len


def test_every_model_of_an_evaluation_must_read_the_arguments(planned: Planned) -> None:
    save_tokenizer(Path("other"), TEMPLATE)
    for name in ("config.json", "model.safetensors"):
        (Path("other") / name).write_bytes((Path("base") / name).read_bytes())
    save_tokenizer(Path("base"), READING)
    text = Path("recipe.yaml").read_text().replace("models: [loop],", "models: [./other, loop],")
    Path("recipe.yaml").write_text(text)
    found = plan(load_recipe("recipe.yaml", ["evaluation.template_args={effort: low}"]))
    (told,) = check_inputs(found, found.nodes)
    assert told.startswith("stages.evaluation.questions: ")
    assert "/other: the chat template never reads" in told


def test_arguments_of_an_alignment_tax_are_read_by_its_models(planned: Planned) -> None:
    stage = "{models: [loop], tasks: [gsm8k], chat_template: true, template_args: {effort: low}}"
    Path("recipe.yaml").write_text(Path("recipe.yaml").read_text().rstrip() + f"\n  alignment_tax: {stage}\n")
    found = plan(load_recipe("recipe.yaml"))
    (told,) = check_inputs(found, found.nodes)
    assert told.startswith("stages.alignment_tax.template_args: ") and "never reads effort" in told
    save_tokenizer(Path("base"), READING)
    found = plan(load_recipe("recipe.yaml"))
    assert check_inputs(found, found.nodes) == []
