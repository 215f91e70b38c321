"""Finds fields that have no effect given a recipe's other fields. Torch-free, offline.

Some combinations are already rejected when the config is read. The combinations reported here are allowed,
because overrides may give the field an effect. A value equal to the field's default is not reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from rlhf_core.config import (
    PPO,
    SFT,
    Calibration,
    Data,
    EngineConfig,
    Evaluation,
    Loop,
    Preferences,
    Publication,
    Recipe,
    Source,
    StageConfig,
)
from rlhf_core.config.data import Rows
from rlhf_core.config.judging.judges import ChatJudge, RewardJudge
from rlhf_core.config.rewards import NoReward
from rlhf_core.config.training.optimised import Optimised
from rlhf_core.config.training.preference import DirectAlignment
from rlhf_core.config.training.trainable import Trainable
from rlhf_core.hub.ids import is_remote


class Rule(NamedTuple):
    """Holds fields of a config class that have an effect only if `acts` returns true for the config. `where`
    completes the sentence "they act only ..."."""

    config: type[BaseModel]
    fields: str
    acts: Callable[[Any], bool]
    where: str


def _steps(config: PPO) -> int:
    """Returns the number of optimiser steps per iteration."""
    return config.max_epochs * (
        config.rollout_batch_size * config.n_samples_per_prompt // config.train_batch_size
    )


def _default_reference_ranks(config: PPO) -> bool:
    """Returns whether the reference or a teacher uses the stage's `reference` ranks."""
    return "reference" in config.groups or any(each.ranks is None for each in config.teachers.values())


def _default_reward_ranks(config: PPO) -> bool:
    return any(source.ranks is None for source in config.reward_models)


def _scores_by_model(config: Evaluation) -> bool:
    judged = any(isinstance(judge, RewardJudge) for judge in config.judges)
    return judged or config.proxy is not None or config.reward_evaluation is not None


CLIPS = "eps_clip eps_clip_low eps_clip_high dual_clip stop_kl"
SCORES = "template template_args prompt_max_len generate_max_len micro_rollout_batch_size"
RULES = (
    Rule(
        PPO,
        "value_clip critic_learning_rate critic_ranks lambd",
        lambda c: c.has_critic,
        "with advantage_estimator gae",
    ),
    Rule(
        PPO,
        "gamma reward_at",
        lambda c: c.advantage_estimator in ("gae", "reinforce_pp", "reinforce_pp_baseline"),
        "with advantage_estimator gae, reinforce_pp or reinforce_pp_baseline",
    ),
    Rule(
        PPO,
        "whiten_advantages",
        lambda c: c.advantage_estimator in ("gae", "reinforce_pp"),
        "with advantage_estimator gae or reinforce_pp",
    ),
    Rule(
        PPO,
        CLIPS,
        lambda c: _steps(c) > 1 or c.sampler_is == "in_ratio",
        "where an iteration has several optimiser steps (before the second the policy ratio is 1)",
    ),
    Rule(
        PPO,
        "eps_clip",
        lambda c: c.eps_clip_low is None or c.eps_clip_high is None,
        "where eps_clip_low or eps_clip_high is left out",
    ),
    Rule(PPO, "kl_in", lambda c: c.init_kl_coef > 0, "with init_kl_coef above 0"),
    Rule(PPO, "kl_horizon", lambda c: c.kl_target is not None, "with kl_target"),
    Rule(PPO, "kl_estimator", lambda c: c.has_reference, "where there is a reference"),
    Rule(PPO, "overlong_penalty", lambda c: c.overlong_buffer > 0, "with overlong_buffer"),
    Rule(PPO, "max_filter_rounds filter_min_spread", lambda c: c.dynamic_filtering, "with dynamic_filtering"),
    Rule(
        PPO,
        "normalize_reward",
        lambda c: any(source.normalize is None for source in c.reward_models),
        "on reward models that leave normalize out",
    ),
    Rule(PPO, "sampler_is_level", lambda c: c.weighs_tokens, "with sampler_is truncate, clamp or mask"),
    Rule(PPO, "sampler_is_cap", lambda c: c.sampler_is == "truncate", "with sampler_is truncate"),
    Rule(
        PPO, "sampler_is_clamp", lambda c: c.sampler_is in ("clamp", "mask"), "with sampler_is clamp or mask"
    ),
    Rule(
        PPO,
        "reference_ranks",
        _default_reference_ranks,
        "where the reference, or a teacher that leaves ranks out, has processes of its own",
    ),
    Rule(PPO, "reward_ranks", _default_reward_ranks, "on reward models that leave ranks out"),
    Rule(
        PPO,
        "colocate_actor_ref",
        lambda c: "reference" in c.groups or bool(c.teachers),
        "where the reference or a teacher has processes of its own",
    ),
    Rule(
        PPO, "ref_reward_offload", lambda c: bool(c.read_only), "where there is a reference or a reward model"
    ),
    Rule(
        PPO,
        "micro_rollout_batch_size",
        lambda c: c.micro_rollout_tokens is None,
        "where micro_rollout_tokens is left out",
    ),
    Rule(
        PPO,
        "routing_replay",
        lambda c: c.engine.pipeline_parallel_size == 1,
        "without engine.pipeline_parallel_size",
    ),
    Rule(
        Optimised,
        "micro_train_batch_size",
        lambda c: c.micro_train_tokens is None,
        "where micro_train_tokens is left out",
    ),
    Rule(Optimised, "decay", lambda c: c.weight_decay > 0, "with weight_decay"),
    Rule(Optimised, "decay_ratio", lambda c: c.schedule == "wsd", "with schedule wsd"),
    Rule(
        Optimised, "min_lr_ratio", lambda c: c.schedule != "constant", "with schedule cosine, linear or wsd"
    ),
    Rule(Optimised, "save_minutes", lambda c: c.save_steps == 0, "where save_steps is 0"),
    Rule(
        Optimised,
        "keep_checkpoints",
        lambda c: bool(c.save_steps or c.save_minutes),
        "with save_steps or save_minutes",
    ),
    Rule(
        Loop,
        "eval_steps",
        lambda _: False,
        "in stages with eval_data, which the rounds of a loop do not have",
    ),
    Rule(Trainable, "eval_steps", lambda c: getattr(c, "eval_data", True) is not None, "with eval_data"),
    Rule(
        SFT,
        "template template_args",
        lambda c: c.data is None,
        "with answers (data has a template of its own)",
    ),
    Rule(
        SFT,
        "packing",
        lambda c: c.micro_train_tokens is None,
        "where micro_train_tokens, which always packs, is left out",
    ),
    Rule(
        DirectAlignment,
        "template template_args",
        lambda c: c.data is None,
        "with pairs or answers (data has a template of its own)",
    ),
    Rule(
        Preferences,
        "micro_rollout_batch_size",
        lambda c: bool(c.reward_models),
        "where a reward model scores",
    ),
    Rule(
        Evaluation,
        "micro_rollout_batch_size",
        _scores_by_model,
        "with a reward judge, proxy or reward_evaluation",
    ),
    Rule(Calibration, SCORES, lambda c: isinstance(c.judge, RewardJudge), "with a reward judge"),
    Rule(ChatJudge, "sequential_questions", lambda c: c.interval_width is not None, "with interval_width"),
    Rule(Publication, "branch private gated dry_run", lambda c: c.repo_id is not None, "with repo_id"),
    Rule(NoReward, "weight", lambda _: False, "on a reward, and this source gives none"),
    Rule(
        EngineConfig, "kv_cache_gib", lambda c: not c.gpus and c.kind == "vllm", "with vLLM where gpus is 0"
    ),
    Rule(EngineConfig, "gpu_memory_utilization", lambda c: c.gpus > 0, "where gpus is above 0"),
    Rule(
        EngineConfig,
        "seed_answers",
        lambda c: c.gpus > 0 and c.kind == "vllm",
        "with vLLM where gpus is above 0",
    ),
    Rule(Source, "split", lambda c: not c.is_generated and is_remote(c.path), "on a data set of the Hub"),
    Rule(Recipe, "store_checkpoints", lambda c: c.store is not None, "with store"),
)
COLUMNS: dict[Rows, str] = {  # columns read from rows of each kind
    "sft": "messages prompt response",
    "preference": "prompt chosen rejected margin",
    "prompt": "prompt",
    "scored": "prompt response reward",
    "labelled": "prompt response label chosen rejected",
}


def idle_fields(recipe: Recipe) -> list[str]:
    """Returns a sentence for each field that the recipe sets without effect. In a swept stage, a field is
    reported only if it has no effect in any variant."""
    told = list(_idle("", recipe))
    for name, config in recipe.stages.items():
        found = list(config.variants.values()) or [config]
        by_variant = [list(_idle_in_stage(f"stages.{name}", variant)) for variant in found]
        told += [sentence for sentence in by_variant[0] if all(sentence in others for others in by_variant)]
    return told


def _idle_in_stage(where: str, config: StageConfig) -> Iterator[str]:
    yield from _idle(where, config)
    yield from _idle_inside(where, config)
    for text in config.texts:
        if text.rows is not None and text.rows in COLUMNS:
            yield from _unread_columns(f"{where}.{text.field}", text.data, text.rows)
    if isinstance(config, PPO) and _set(config.engine, "start_timeout"):
        yield (
            f"{where}.engine.start_timeout has no effect: ppo waits for its engines as long as its own"
            " timeout says"
        )


def _idle_inside(where: str, value: Any) -> Iterator[str]:
    """Yields the sentences about records nested in a config, at any depth."""
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _idle_inside(f"{where}.{name}", getattr(value, name))
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _idle_inside(f"{where}.{name}", item)
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from _idle_inside(f"{where}.{number}", item)
    if isinstance(value, BaseModel) and not hasattr(value, "stage"):
        yield from _idle(where, value)


def _idle(where: str, config: BaseModel) -> Iterator[str]:
    for rule in RULES:
        if isinstance(config, rule.config) and not rule.acts(config):
            for field in rule.fields.split():
                if _set(config, field):
                    yield f"{where}.{field}".lstrip(".") + f" has no effect here: it acts only {rule.where}"


def _unread_columns(where: str, data: Data, rows: Rows) -> Iterator[str]:
    for number, source in enumerate(data.sources):
        for field in type(source).model_fields:
            column, _, key = field.rpartition("_")
            if key == "key" and column not in COLUMNS[rows].split() and _set(source, field):
                yield (
                    f"{where}.sources.{number}.{field} has no effect here: these rows are read without the"
                    f" column {column}"
                )


def _set(config: BaseModel, field: str) -> bool:
    """Returns whether the recipe sets the field to a value other than its default."""
    return (
        field in config.model_fields_set
        and getattr(config, field) != type(config).model_fields[field].default
    )
