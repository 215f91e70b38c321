"""A field without effect beside the other fields of its recipe gets a note; a field that acts gets none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flows.cli.prepare import validate
from rlhf_core.config import Recipe
from rlhf_core.recipe.idle_fields import COLUMNS, RULES, idle_fields
from rlhf_core.recipe.load_recipe import load_recipe

DATA = {"sources": "rows.jsonl"}
GRPO = {"advantage_estimator": "grpo", "n_samples_per_prompt": 4}
PPO: dict[str, Any] = {"prompts": DATA, "reward": "org/reward", "actor": "base"}
SFT: dict[str, Any] = {"data": DATA}
DPO: dict[str, Any] = {"policy": "base", "data": DATA}
PREFERENCES: dict[str, Any] = {"policy": "base", "prompts": DATA, "reward": "http://host/"}
LOOP: dict[str, Any] = {"policy": "base", "prompts": DATA, "reward": "org/reward"}
EVALUATION: dict[str, Any] = {"models": ["org/m"], "baseline": "base", "questions": {"path": "q.jsonl"}}
CHAT = {"kind": "openai", "model": "m"}
CALIBRATION: dict[str, Any] = {"judge": CHAT, "labels": "l.jsonl"}
SAMPLER_OFF = {"sampler_is": "off"}
ON_GPU = {"num_ranks_per_node": 1, "gpus": 1}
LORA = {"lora": {}}
ALONE = PPO | GRPO | {"reward": "http://host/", "init_kl_coef": 0}  # no model that is only read
ALWAYS = CHAT | {"sequential_questions": 9}


def source(**fields: Any) -> dict[str, Any]:
    return {"sources": [{"path": "rows.jsonl", **fields}]}


# kind, the rest of the stage, what has no effect in it, and what makes it act
IDLE: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("ppo", PPO | GRPO, {"value_clip": 0.3}, {"advantage_estimator": "gae"}),
    ("ppo", PPO | GRPO, {"critic_learning_rate": 1e-5}, {"advantage_estimator": "gae"}),
    ("ppo", PPO | GRPO, {"critic_ranks": {"cpus": 2}}, {"advantage_estimator": "gae"}),
    ("ppo", PPO | GRPO, {"lambd": 0.9}, {"advantage_estimator": "gae"}),
    ("ppo", PPO | GRPO, {"gamma": 0.9}, {"advantage_estimator": "reinforce_pp"}),
    ("ppo", PPO | GRPO, {"reward_at": "every_token"}, {"advantage_estimator": "reinforce_pp_baseline"}),
    ("ppo", PPO | GRPO, {"whiten_advantages": False}, {"advantage_estimator": "reinforce_pp"}),
    *[
        ("ppo", PPO | {"rollout_batch_size": 128}, clip, {"max_epochs": 2})
        for clip in ({"eps_clip": 0.1}, {"eps_clip_low": 0.1}, {"eps_clip_high": 0.3}, {"dual_clip": 3.0}, {"stop_kl": 0.1})
    ],
    ("ppo", PPO | {"eps_clip_low": 0.1, "eps_clip_high": 0.3}, {"eps_clip": 0.5}, {"eps_clip_high": None}),
    ("ppo", PPO | {"init_kl_coef": 0, "kl_estimator": "k3", "reference": "base"}, {"kl_in": "loss"}, {"init_kl_coef": 0.1}),
    ("ppo", PPO, {"kl_horizon": 100}, {"kl_target": 6.0}),
    ("ppo", PPO | {"init_kl_coef": 0}, {"kl_estimator": "k3"}, {"reference": "base"}),
    ("ppo", PPO, {"overlong_penalty": 0.5}, {"overlong_buffer": 5}),
    ("ppo", PPO | {"n_samples_per_prompt": 4}, {"max_filter_rounds": 3}, {"dynamic_filtering": True}),
    ("ppo", PPO | {"n_samples_per_prompt": 4}, {"filter_min_spread": 0.1}, {"dynamic_filtering": True}),
    ("ppo", PPO | {"reward": {"model": "org/r", "normalize": "none"}}, {"normalize_reward": True}, {"reward": "org/r"}),
    ("ppo", PPO | SAMPLER_OFF, {"sampler_is_level": "sequence"}, {"sampler_is": "mask"}),
    ("ppo", PPO | {"sampler_is": "clamp"}, {"sampler_is_cap": 3.0}, {"sampler_is": "truncate"}),
    ("ppo", PPO, {"sampler_is_clamp": [0.1, 9.0]}, {"sampler_is": "mask"}),
    ("ppo", PPO | LORA, {"reference_ranks": {"cpus": 2}}, {"lora": None}),
    ("ppo", PPO | LORA | {"actor_ranks": {"cpus": 1}}, {"colocate_actor_ref": True}, {"lora": None}),
    ("ppo", PPO | GRPO | {"reward": "http://host/"}, {"reward_ranks": {"cpus": 2}}, {"reward": "org/reward"}),
    ("ppo", ALONE, {"ref_reward_offload": True}, {"init_kl_coef": 0.1, "reference_ranks": ON_GPU}),
    ("ppo", PPO | {"micro_rollout_tokens": 999}, {"micro_rollout_batch_size": 4}, {"micro_rollout_tokens": None}),
    ("ppo", PPO | {"engine": {"gpus": 1, "pipeline_parallel_size": 2}}, {"routing_replay": False}, {"engine": {"gpus": 1}}),
    ("sft", SFT | {"micro_train_tokens": 999}, {"micro_train_batch_size": 4}, {"micro_train_tokens": None}),
    ("sft", SFT | {"micro_train_tokens": 999}, {"packing": False}, {"micro_train_tokens": None}),
    ("sft", SFT, {"decay": "all"}, {"weight_decay": 0.1}),
    ("sft", SFT, {"decay_ratio": 0.5}, {"schedule": "wsd"}),
    ("sft", SFT | {"schedule": "constant"}, {"min_lr_ratio": 0.5}, {"schedule": "linear"}),
    ("sft", SFT | {"save_steps": 9}, {"save_minutes": 5.0}, {"save_steps": 0}),
    ("sft", SFT | {"save_minutes": 0}, {"keep_checkpoints": 3}, {"save_minutes": 9.0}),
    ("sft", SFT, {"eval_steps": 9}, {"eval_data": DATA}),
    ("sft", SFT, {"template": "Q: {}"}, {"data": None, "answers": "preferences"}),
    ("sft", SFT, {"template_args": {"a": 1}}, {"data": None, "answers": "preferences"}),
    ("dpo", DPO, {"template": "Q: {}"}, {"data": None, "pairs": "preferences"}),
    ("iterative_dpo", LOOP, {"eval_steps": 9}, {}),
    ("preferences", PREFERENCES, {"micro_rollout_batch_size": 4}, {"reward": "org/reward"}),
    ("evaluation", EVALUATION, {"micro_rollout_batch_size": 4}, {"judges": [{"kind": "reward", "reward": "org/r"}]}),
    ("evaluation", EVALUATION, {"judges": [ALWAYS]}, {"judges": [ALWAYS | {"interval_width": 0.1}]}),
    *[
        ("calibration", CALIBRATION, field, {"judge": {"kind": "reward", "reward": "org/r"}})
        for field in ({"template": "Q: {}"}, {"template_args": {"a": 1}}, {"prompt_max_len": 9}, {"generate_max_len": 9}, {"micro_rollout_batch_size": 9})
    ],
    *[
        ("publication", {"model": "base"}, field, {"repo_id": "org/name"})
        for field in ({"branch": "v2"}, {"private": False}, {"gated": "auto"}, {"dry_run": True})
    ],
    ("preferences", PREFERENCES | {"engine": {"gpus": 1}}, {"engine": {"gpus": 1, "kv_cache_gib": 3}}, {"engine": {"kv_cache_gib": 3}}),
    ("preferences", PREFERENCES, {"engine": {"gpu_memory_utilization": 0.5}}, {"engine": {"gpu_memory_utilization": 0.5, "gpus": 1}}),
    ("preferences", PREFERENCES, {"engine": {"seed_answers": True}}, {"engine": {"seed_answers": True, "gpus": 1}}),
    ("sft", SFT, {"data": source(split="test")}, {"data": source(split="test", path="org/rows")}),
    ("sft", SFT, {"data": source(chosen_key="best")}, {"data": source(prompt_key="best")}),
    ("ppo", PPO, {"engine": {"start_timeout": 5}}, {"engine": {}}),
    (
        "ppo",
        PPO | {"advantage_estimator": "reinforce_pp", "reference": "org/t", "init_kl_coef": 1},
        {"reward": {"kind": "none", "weight": 2.0}},
        {"reward": {"kind": "none"}},
    ),
]  # fmt: skip


def recipe_of(kind: str, *fields: dict[str, Any]) -> Recipe:
    whole: dict[str, Any] = {}
    for part in fields:
        whole |= part
    return Recipe.model_validate({"name": "r", "base_model": "org/base", "stages": {kind: whole}})


@pytest.mark.parametrize(
    ("kind", "rest", "idle", "awake"), IDLE, ids=[f"{kind}-{idle}"[:60] for kind, _, idle, _ in IDLE]
)
def test_a_field_without_effect_is_told_and_one_that_acts_is_not(
    kind: str, rest: dict[str, Any], idle: dict[str, Any], awake: dict[str, Any]
) -> None:
    (told,) = idle_fields(recipe_of(kind, rest, idle))
    assert told.startswith(f"stages.{kind}.") and "has no effect" in told
    assert f".{next(iter(idle))}" in told
    assert idle_fields(recipe_of(kind, rest)) == []
    if awake:
        assert told not in idle_fields(recipe_of(kind, rest, idle, awake))


def test_every_rule_has_an_example() -> None:
    named = [
        told.partition(" ")[0].rpartition(".")[2]
        for kind, rest, idle, _ in IDLE
        for told in idle_fields(recipe_of(kind, rest, idle))
    ]
    missing = [
        field
        for rule in RULES
        for field in rule.fields.split()
        if field not in named and rule.config is not Recipe
    ]
    assert not missing
    assert len(COLUMNS) == 5


def test_defaults_and_swept_conditions_are_not_told() -> None:
    assert idle_fields(recipe_of("ppo", PPO, GRPO, {"lambd": 0.95, "value_clip": 0.2})) == []
    swept = {"n_samples_per_prompt": 4, "value_clip": 0.3, "sweep": {"advantage_estimator": ["gae", "grpo"]}}
    assert idle_fields(recipe_of("ppo", PPO, swept)) == []
    swept["sweep"] = {"advantage_estimator": ["rloo", "grpo"]}
    assert len(idle_fields(recipe_of("ppo", PPO, swept))) == 1
    (told,) = idle_fields(recipe_of("sft", SFT).model_copy(update={"store_checkpoints": True}))
    assert told == "store_checkpoints has no effect here: it acts only with store"


def test_validate_prints_a_note_and_accepts_the_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "name: r\nbase_model: org/base\nstages:\n  ppo: {actor: base, reward: org/reward, prompts: {sources:"
        " p.jsonl}, kl_horizon: 100}\n"
    )
    assert load_recipe(path)
    assert validate(str(path)) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "note: stages.ppo.kl_horizon has no effect here: it acts only with kl_target" in told
