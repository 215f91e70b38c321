"""Swept stages and select stages in a plan: names, digests, what names them, and mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rlhf_core.config import DPO, Evaluation, Recipe, Select
from rlhf_core.recipe.load_recipe import dump_recipe, load_recipe
from rlhf_core.recipe.plan import plan
from tests.support.text_rows import rows_of_text

PAIRS = {"sources": "pairs.jsonl"}
QUESTIONS = {"path": "q.jsonl"}


def stages(sweep: dict[str, Any] | None = None, **more: dict[str, Any]) -> dict[str, Any]:
    return {
        "sft": {"stage": "sft", "data": {"sources": "chats.jsonl"}},
        "dpo": {
            "stage": "dpo",
            "policy": "sft",
            "data": PAIRS,
            "sweep": {"beta": [0.05, 0.1, 0.3]} if sweep is None else sweep,
        },
        "trial": {"stage": "evaluation", "models": ["dpo"], "baseline": "sft", "questions": QUESTIONS},
        "best": {"stage": "select", "of": "dpo", "by": "trial"},
    } | more


def recipe(tmp_path: Path, **more: Any) -> Recipe:
    return Recipe(name="r", base_model="org/model", artifacts=str(tmp_path), stages=stages(**more))


def problems(tmp_path: Path, **more: Any) -> str:
    with pytest.raises(ValueError) as caught:
        plan(recipe(tmp_path, **more))
    return str(caught.value)


def test_a_swept_stage_is_one_stage_for_each_value(tmp_path: Path) -> None:
    final = dict(stage="evaluation", models=["best"], baseline="sft", questions={"path": "other.jsonl"})
    planned = plan(recipe(tmp_path, final=final, publication={"stage": "publication", "model": "best"}))
    names = ["dpo.beta=0.05", "dpo.beta=0.1", "dpo.beta=0.3"]
    assert [node.name for node in planned.nodes] == ["sft", *names, "trial", "best", "final", "publication"]
    betas = [node.config.beta for node in planned.nodes if isinstance(node.config, DPO)]
    assert betas == [0.05, 0.1, 0.3] and len({node.digest for node in planned.nodes}) == 8
    trial, best, final_config = (planned[name].config for name in ("trial", "best", "final"))
    assert isinstance(trial, Evaluation) and trial.models == tuple(names) and trial.parents == {}
    assert isinstance(best, Select) and best.of == tuple(names) and best.simplest == names[0]
    assert planned["best"].parents == (*names, "trial") and planned["final"].parents == ("best", "sft")
    # its model was trained from the baseline
    assert isinstance(final_config, Evaluation) and final_config.parents == {}
    assert planned.inputs(planned["final"])["best"] == str(planned["best"].run_dir / "checkpoint")
    assert [node.name for node in planned.stages_of("dpo")] == names

    alone = {"sft": stages()["sft"], "dpo": {**stages()["dpo"], "sweep": {}, "beta": 0.3}}
    single = plan(Recipe(name="r", base_model="org/model", artifacts=str(tmp_path), stages=alone))
    assert single["dpo"].digest == planned["dpo.beta=0.3"].digest, "a variant is the stage with this value"


def test_products_choices_and_switches(tmp_path: Path) -> None:
    planned = plan(recipe(tmp_path, sweep={"beta": [0.1, 1e-3], "loss": ["sigmoid", "ipo"]}))
    assert [node.name for node in planned.stages_of("dpo")] == [
        "dpo.beta=0.1,loss=sigmoid",
        "dpo.beta=0.1,loss=ipo",
        "dpo.beta=0.001,loss=sigmoid",
        "dpo.beta=0.001,loss=ipo",
    ]


def test_a_recipe_with_a_sweep_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe(tmp_path)))
    read = load_recipe(tmp_path / "recipe.yaml").stages
    assert isinstance(read["dpo"], DPO)
    assert read["dpo"].sweep == {"beta": (0.05, 0.1, 0.3)}
    assert read["best"] == recipe(tmp_path).stages["best"]
    changed = load_recipe(tmp_path / "recipe.yaml", ["dpo.sweep.beta=[0.2, 0.4]"])
    assert [node.name for node in plan(changed).stages_of("dpo")] == ["dpo.beta=0.2", "dpo.beta=0.4"]


@pytest.mark.parametrize(
    ("sweep", "told"),
    rows_of_text("""
    {beat: [1, 2]} | sweep.beat is not a field of dpo that affects its result and holds a number or a choice: name such a field
    {policy: [sft, base]} | sweep.policy is not a field
    {logging_steps: [1, 2]} | sweep.logging_steps is not a field
    {stage: [dpo, sft]} | sweep.stage is not a field
    {beta: [0.1]} | sweep.beta has 1 value: give two or more
    {beta: [0.1, 0.1]} | sweep lists a value twice
    {beta: [0.1, -1]} | sweep: beta: Input should be greater than
    {loss: [sigmoid, cosine]} | sweep: loss: Input should be
    {beta: [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09], max_epochs: [1, 2, 3, 4, 5, 6, 7, 8, 9]} | sweep has 81 combinations: give at most
    """),
)
def test_mistakes_of_a_sweep(tmp_path: Path, sweep: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=r"stages\.dpo") as caught:
        recipe(tmp_path, sweep=sweep)
    assert told in str(caught.value)


def test_a_loop_is_not_swept(tmp_path: Path) -> None:
    loop = dict(
        stage="iterative_dpo", prompts={"sources": "p.jsonl"}, reward="org/r", sweep={"beta": [0.1, 0.2]}
    )
    with pytest.raises(ValidationError, match="a loop cannot have variants"):
        recipe(tmp_path, loop=loop)


def test_what_cannot_be_named_or_chosen(tmp_path: Path) -> None:
    more = {"stage": "dpo", "policy": "dpo", "data": PAIRS}
    told = problems(tmp_path, more=more)
    assert (
        told
        == "stages.more.policy: dpo is swept, it has 3 models: name a select stage, or one of dpo.beta=0.05,"
        " dpo.beta=0.1, dpo.beta=0.3"
    )
    other = {"stage": "dpo", "policy": "sft", "data": PAIRS}
    assert (
        "stages.best.of: trial does not compare other with its baseline: add it to stages.trial.models"
        in problems(tmp_path, other=other, best={"stage": "select", "of": ["other", "dpo"], "by": "trial"})
    )
    one = problems(
        tmp_path, best={"stage": "select", "of": "dpo.beta=0.1", "by": "trial", "simplest": "dpo.beta=0.3"}
    )
    assert "stages.best.of: give two models or more" in one
    assert "stages.best.simplest: unknown model 'dpo.beta=0.3'" in one
    assert "stages.best.of: base is no stage" in problems(
        tmp_path, best={"stage": "select", "of": ["base", "dpo"], "by": "trial"}
    )
    assert "stages.best.by" in problems(tmp_path, best={"stage": "select", "of": "dpo", "by": "sft"})
    gate = [{"metric": "los", "max": 1}]
    assert "stages.dpo.gates.0.metric: unknown metric 'los'" in problems(
        tmp_path, dpo=stages()["dpo"] | {"gates": gate}
    )


def test_gates_of_variants_and_of_a_choice(tmp_path: Path) -> None:
    gates = [{"metric": "loss", "max": 1}]
    clear = [{"metric": "clear", "min": 1}, {"metric": "win_rate/dpo.beta=0.1", "min": 0.4}]
    planned = plan(
        recipe(tmp_path, dpo=stages()["dpo"] | {"gates": gates}, best=stages()["best"] | {"gates": clear})
    )
    assert all(len(node.config.gates) == 1 for node in planned.stages_of("dpo"))
    assert len(planned["best"].config.gates) == 2
