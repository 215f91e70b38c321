"""Wrong recipes: each mistake is one sentence with where and what to do, and all are reported at once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rlhf_core.recipe.load_recipe import given_recipe, load_recipe
from rlhf_core.recipe.plan import plan
from tests.support.text_rows import rows_of_text
from tests.support.tiny_recipe import TEXT, Write


@pytest.mark.parametrize(
    ("change", "told"),
    [
        *rows_of_text(r"""
    [', learning_rate', ', learning_rat'] | stages.sft.learning_rat: unknown key 'learning_rat'; did you mean learning_rate
    ["base_model: models/base\n", ""] | base_model: missing (local folder or Hub id of the model that stages refer to as `base`); add it
    ['  ppo: {', '  ppo: {model: sft, '] | stages.ppo.model: unknown key 'model'; did you mean actor?
    ['  ppo: {', '  ppo: {stage: pppo, '] | stages.ppo: stage: unknown value 'pppo'; did you mean ppo?
    [ppo, p.po] | stages.p.po
    ['name: tiny', 'name: stages'] | name: 'stages' is a name that the artifacts folder uses for all recipes: choose another name
    ['name: tiny', 'name: !!timestamp 2001-13-45'] | recipe.yaml line 2: '2001-13-45' cannot be read as the date or number it
    ['name: tiny', 'name: !!bool tiny'] | recipe.yaml line 2: 'tiny' cannot be read as the date or number it looks like
    ['name: tiny', 'name: !!set [tiny]'] | correct the YAML
    ['name: tiny', '[name]: tiny'] | recipe.yaml line 2: a key is a list or a mapping, and must be text
    ["name: tiny", "name: tiny\ntrue: 1"] | recipe: the key True is no text: put it in quotes (YAML reads true, null and 1 as
    ["name: tiny", "name: tiny\non: 1"] | on: unknown key 'on'; valid: name, base_model
    ["name: tiny", "name: tiny\nseed: 12:30"] | seed: input should be a valid integer, unable to parse string as an integer, not '12:30'
    ["name: tiny", "name: tiny\n<<: 3"] | recipe.yaml line 3: expected a mapping or list of mappings for merging, but found scalar
    ['  ppo: {', '  ppo: {<<: {seed: 1}, <<: {seed: 2}, '] | recipe.yaml line 7: the key '<<' appears twice
    ['{data: {sources: train.jsonl}', '{3: 1, data: {sources: train.jsonl}'] | stages.sft: the key 3 is no text
    ['  ppo: {', '  false: {stage: ppo, '] | stages: the key False is no text
    ['  ppo: {', '  ppo: {teachers: {a b: base}, '] | stages.ppo.teachers: the key 'a b' does not match ^[\w.-]+$: rename it
    ["name: tiny", "name: tiny\nartifacts: ''"] | artifacts: string should have at least 1 character, not ''; correct it
    ['  ppo:', "  base: {stage: sft, data: {sources: a.jsonl}}\n  ppo:"] | stages.base: a stage name is
    ['  ppo:', '  sft:'] | line 7: the key 'sft' appears twice
    ['sources: train.jsonl}', 'sources: [{path: a, probability: 0.2}, {path: b, probability: 0.2}]}'] | sum to 0.4
    """),
        (("name: tiny", "name: tiny\nseed: " + "9" * 5000), "recipe.yaml line 3: '9999"),
        (("ppo", "policy"), "stages.policy: say which stage it is with `stage:`, one of sft, "),
    ],
)
def test_a_wrong_recipe_is_one_sentence(recipe: Write, change: tuple[str, str], told: str) -> None:
    assert change[0] in TEXT
    with pytest.raises(ValueError) as caught:
        load_recipe(recipe(TEXT.replace(*change)))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a" * 300, "b\0"])
def test_a_name_that_no_folder_can_have_is_unknown(recipe: Write, name: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"stages.sft.model: unknown name {name!r}; valid: base, ")
    ):
        plan(load_recipe(recipe(), [f"sft.model={json.dumps(name)}"]))
    if name:
        assert plan(
            load_recipe(
                recipe(), [f"base_model={json.dumps(name)}", f"sft.data.sources.0.path={json.dumps(name)}"]
            )
        )


def test_every_mistake_has_its_line(recipe: Write) -> None:
    with pytest.raises(ValueError) as caught:
        load_recipe(
            recipe(TEXT.replace("learning_rate: 1e-3", "lr: 1").replace("models: [ppo]", "model: ppo"))
        )
    places = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    assert sorted(places) == ["stages.evaluation.model", "stages.evaluation.models", "stages.sft.lr"]


def test_checks_of_all_stages_are_told_with_the_first_mistake(recipe: Write) -> None:
    """Also those that a wrong key or value keeps from running, unless they may be about it."""
    both = "train_batch_size: 12, micro_train_batch_size: 8, zero_stage: 0"
    sft = f"{both}, ranks: {{num_ranks_per_node: 2}}"
    ppo = f"{both}, actor_ranks: {{num_ranks_per_node: 3}}, rollout_batch_size: 10"

    def told(wrong: str = "gamma: 1") -> list[str]:
        text = TEXT.replace("learning_rate: 1e-3", sft).replace(
            "actor_learning_rate: 5e-7", f"{ppo}, {wrong}"
        )
        with pytest.raises(ValueError) as caught:
            load_recipe(recipe(text))
        return [
            line.partition(":")[0] + ":" + line.rpartition(": ")[2] for line in str(caught.value).splitlines()
        ]

    checks = [
        "stages.sft:set zero_stage to 1, 2, 3 or auto",
        "stages.sft:every rank must run the same number of full forward passes",
        "stages.ppo:set zero_stage to 1, 2, 3 or auto",
        "stages.ppo:every rank must run the same number of full forward passes",  # of the actor's ranks
        "stages.ppo:every rank must run the same number of full forward passes",  # of the critic's
        "stages.ppo:a rollout is split into whole optimiser steps",
    ]
    assert told() == checks
    assert sorted(told("gama: 1, max_epochs: some"))[-6:] == sorted(checks)
    assert len(told("gama: 1, max_epochs: some")) == 8
    # without those on batch sizes, which may be about the wrong key
    assert len(told("rollout_batch_sise: 8")) == 3 + 1


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the path of a YAML file"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="must be a mapping"):
        load_recipe(tmp_path / "list.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        load_recipe(tmp_path / "binary.yaml")


def test_what_does_not_fit_between_stages_is_told_with_wrong_fields() -> None:
    stages = {
        "sft": {"data": {"sources": "/nowhere/x.jsonl"}, "learning_rat": 1},
        "reward_model": dict(
            data={"sources": "/nowhere/x.jsonl"}, model="sfft", train_batch_size=7, micro_train_batch_size=2
        ),
        "ppo": {"actor": "fst", "reward": "sft", "prompts": {"sources": "/nowhere/x.jsonl"}},
        "evaluation": {
            "models": ["ppo"],
            "questions": {"path": "/nowhere/q.jsonl"},
            "gates": [{"metric": "win_rat/ppo", "min": 0}],
        },
        "publication": {"model": "ppo", "repo_id": "me/x", "round_branch": "round-{}"},
    }
    with pytest.raises(ValueError) as refused:
        given_recipe({"name": "x", "base_model": "org/base", "stages": stages})
    told = str(refused.value)
    for part in (
        "stages.sft.learning_rat: unknown key 'learning_rat'; did you mean learning_rate or image_encoder_learning_rate?",
        "stages.reward_model: train_batch_size=7 must be a multiple of",
        "stages.ppo.actor: unknown name 'fst'",
        "stages.ppo.reward: sft is of kind sft, but a reward model is needed here",
        "stages.evaluation.gates.0.metric: unknown metric 'win_rat/ppo'",
        "stages.publication.round_branch: ppo has no rounds",
    ):
        assert part in told, told
    assert len(told.splitlines()) == len(set(told.splitlines()))


def test_a_recipe_whose_only_stage_is_wrong_is_one_sentence() -> None:
    for stages, told in (
        ({"sft": {"stage": "sftt"}}, "stages.sft: stage: unknown value 'sftt'; did you mean sft?"),
        (
            {"sft": {"data": {"sources": "/x.jsonl"}, "train_batch_size": 7, "micro_train_batch_size": 8}},
            "stages.sft: train_batch_size=7 must be a multiple of",
        ),
    ):
        with pytest.raises(ValueError) as refused:
            given_recipe({"name": "x", "base_model": "org/base", "stages": stages})
        assert str(refused.value).startswith(told) and "\n" not in str(refused.value)


def test_checks_behind_missing_fields_are_told_with_them() -> None:
    stages = {
        "ppo": {"advantage_estimator": "rloo", "n_samples_per_prompt": 1},
        "evaluation": {"gates": [{"metric": "win_rate/ppo"}], "judges": []},
        "dpo": {"data": {}, "train_batch_size": 7, "micro_train_batch_size": 2},
    }
    with pytest.raises(ValueError) as refused:
        given_recipe({"base_model": "org/base", "stages": stages})
    told = str(refused.value)
    for part in (
        "name: missing (",
        "stages.ppo.prompts: missing (rows with a prompt); add it",
        "stages.ppo: rloo compares the answers to one prompt: set n_samples_per_prompt to 2 or more",
        "stages.evaluation.models: missing (",
        "stages.evaluation.questions: missing (",
        "stages.dpo.data.sources: missing (",
        "stages.dpo: train_batch_size=7 must be a multiple of",
    ):
        assert part in told, told
    assert "placeholder" not in told and len(told.splitlines()) == len(set(told.splitlines()))
