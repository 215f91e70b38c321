"""Kinds of engines and what each can do, and the names that the fields had before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf_core.config import EngineConfig, Recipe
from rlhf_core.config.former_names import with_new_keys, with_new_names
from rlhf_core.recipe.load_recipe import dump_recipe, load_recipe, recipe_of
from rlhf_core.runs.run_dir import StageRequest

FORMER: dict[str, Any] = {
    "name": "tiny",
    "base_model": "org/model",
    "stages": {
        "ppo": {
            "reward": {"function": "f.py:score"},
            "advantage_estimator": "grpo",
            "n_samples_per_prompt": 2,
            "prompts": {"sources": "p.jsonl"},
            "vllm": {"num_engines": 2, "engine": {"max_num_seqs": 4}},
        },
        "evaluation": {
            "models": ["ppo"],
            "baseline": "base",
            "questions": {"path": "q.jsonl"},
            "judges": [
                {"kind": "vllm", "model": "org/judge", "vllm": {"gpus": 1, "engine": {"max_num_seqs": 8}}}
            ],
        },
    },
}


def write(folder: Path, recipe: dict[str, Any]) -> str:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return str(folder / "recipe.yaml")


def engines(recipe: Recipe) -> tuple[EngineConfig, EngineConfig]:
    ppo: Any = recipe.stages["ppo"]
    evaluation: Any = recipe.stages["evaluation"]
    return ppo.engine, evaluation.judges[0].engine


def test_former_names_are_read_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(write(tmp_path, FORMER))
    of_ppo, of_judge = engines(recipe)
    assert of_ppo == EngineConfig(num_engines=2, options={"max_num_seqs": 4})
    assert of_judge == EngineConfig(gpus=1, options={"max_num_seqs": 8})
    told = capsys.readouterr().err
    assert told.count("note: recipe") == 1 and "engine.options (for vllm.engine):" in told
    load_recipe(write(tmp_path, yaml.safe_load(dump_recipe(recipe))))
    assert capsys.readouterr().err == "", "today's names need no note"


@pytest.mark.parametrize(
    "override",
    [
        "ppo.vllm.engine.max_num_seqs=7",
        "ppo.vllm.engine={max_num_seqs: 7}",
        "ppo.vllm={num_engines: 2, engine: {max_num_seqs: 7}}",
        "ppo.engine.options.max_num_seqs=7",
    ],
)
def test_overrides_of_former_names(tmp_path: Path, override: str) -> None:
    of_ppo, _ = engines(load_recipe(write(tmp_path, FORMER), [override]))
    assert of_ppo == EngineConfig(num_engines=2, options={"max_num_seqs": 7})


def test_names_that_users_chose_are_kept() -> None:
    """A stage, an endpoint and options of an environment that are called vllm."""
    mine = {"vllm": {"engine": 1}}
    ppo = {"environment": {"options": mine}}
    recipe = {"stages": {"vllm": ppo, "evaluation": {"endpoints": mine, "judges": [{"extra": mine}]}}}
    assert with_new_names(recipe) == recipe
    keys = ["evaluation", "endpoints", "vllm", "url"]
    assert with_new_keys(keys, 1) == (keys, 1)
    judge = ["evaluation", "judges", "0", "vllm", "engine"]
    assert with_new_keys(judge, {}) == (["evaluation", "judges", "0", "engine", "options"], {})


def test_both_names_at_once_are_a_mistake() -> None:
    both = {"vllm": {"gpus": 1}, "engine": {"gpus": 1}}
    stages = {"ppo": FORMER["stages"]["ppo"] | both}
    with pytest.raises(ValueError, match="vllm"):
        recipe_of(FORMER | {"stages": stages})


def test_the_request_of_an_earlier_run_is_read() -> None:
    config = FORMER["stages"]["ppo"] | {"stage": "ppo", "actor": "base"}
    request = StageRequest.model_validate(
        {"name": "ppo", "digest": "0", "config": config, "inputs": {}, "seed": 1}
    )
    read: Any = request.config
    assert read.engine.options == {"max_num_seqs": 4}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tensor_parallel_size": 2}, "has no tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "has no pipeline_parallel_size"),
        ({"adapters": "alone"}, "has no adapters of its own"),
        ({"options": {"max_num_seqs": 4}}, "has no option 'max_num_seqs'"),
        ({"options": {"batch_size": 0}}, "batch_size must be 1 or more, not 0"),
        ({"options": {"batch_size": True}}, "batch_size must be 1 or more, not True"),
    ],
)
def test_what_transformers_cannot_do_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        EngineConfig(kind="transformers", **given)
    assert EngineConfig(kind="transformers", options={"batch_size": 1}).options == {"batch_size": 1}


def test_a_server_is_of_vllm() -> None:
    stages = {"evaluation": FORMER["stages"]["evaluation"] | {"models": ["other"]}}
    recipe = FORMER | {"stages": stages}
    judge = {"kind": "vllm", "model": "org/judge", "engine": {"kind": "transformers"}}
    stages["evaluation"] = stages["evaluation"] | {"judges": [judge]}
    with pytest.raises(ValueError, match=r"a server needs vLLM, but engine.kind is transformers"):
        recipe_of(recipe)


def test_weights_do_not_change_within_answers_of_transformers() -> None:
    stage = FORMER["stages"]["ppo"] | {"max_staleness": 2, "vllm": {"kind": "transformers"}}
    with pytest.raises(ValueError, match="finishes its answers first: set max_staleness to 1"):
        recipe_of(FORMER | {"stages": {"ppo": stage}})
    assert recipe_of(FORMER | {"stages": {"ppo": stage | {"max_staleness": 1}}})
