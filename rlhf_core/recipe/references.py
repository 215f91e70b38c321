"""Finds the names of models and stages in a stage's config, with the kinds that each may have. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rlhf_core.config import Evaluation, RewardJudge, StageConfig, VllmJudge
from rlhf_core.config.kinds import KINDS, named
from rlhf_core.config.rewards import ModelReward


class Reference(NamedTuple):
    """A name of a model or stage in a config. `place` is its field, for messages; `kinds` are the stage kinds it may have."""

    place: str
    name: str
    kinds: tuple[str, ...]


def references(config: StageConfig) -> Iterator[Reference]:
    """The names in a config that stand for models or other stages."""
    for field, wanted in KINDS[config.stage].names.items():
        kinds = named(*wanted)
        value = getattr(config, field)
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        for i, item in enumerate(values):
            if isinstance(item, str) and not (isinstance(config, Evaluation) and item in config.endpoints):
                yield Reference(field, item, kinds)
            elif isinstance(item, ModelReward):
                yield Reference(field if len(values) == 1 else f"{field}.{i}", item.model, kinds)
    if isinstance(config, Evaluation):
        for model, parent in (config.parents or {}).items():
            if parent not in config.endpoints:
                yield Reference(f"parents.{model}", parent, named("policy"))
        for i, name in enumerate(config.reward_evaluation.models if config.reward_evaluation else ()):
            yield Reference(f"reward_evaluation.models.{i}", name, named("reward"))
        for i, judge in enumerate(config.judges):
            if isinstance(judge, RewardJudge):
                yield Reference(f"judges.{i}.reward", judge.reward, named("reward"))
            elif isinstance(judge, VllmJudge):
                yield Reference(f"judges.{i}.model", judge.model, named("policy"))
