"""The names in a stage's configuration that stand for models and for other stages, and what each of them must be. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rlhf_core.config import Evaluation, RewardJudge, StageConfig, VllmJudge
from rlhf_core.reward_sources import ModelReward

POLICY, REWARD = ("sft", "dpo", "ppo", "kto"), ("reward_model",)
REFERENCES: dict[str, dict[str, tuple[str, ...]]] = {
    "sft": {"model": POLICY, "answers": ("preferences",)},
    "reward_model": {"model": POLICY},
    "dpo": {"policy": POLICY, "reference": POLICY, "pairs": ("preferences",)},
    "kto": {"policy": POLICY, "reference": POLICY, "answers": ("preferences",)},
    "preferences": {"policy": POLICY, "reward": REWARD},
    "ppo": {"actor": POLICY, "critic": POLICY + REWARD, "reference": POLICY, "reward": REWARD},
    "evaluation": {"models": POLICY, "baseline": POLICY, "proxy": REWARD},
    "alignment_tax": {"models": POLICY, "baseline": POLICY},
    "publication": {"model": POLICY + REWARD, "evaluation": ("evaluation",), "dataset": ("preferences", "evaluation")},
}
TRAINED_FROM = {"sft": "model", "dpo": "policy", "kto": "policy", "ppo": "actor"}  # the field that names a policy's parent
OUTPUTS = {"preferences": "pairs", "evaluation": "report", "alignment_tax": "report", "publication": "published"}  # others: checkpoint
# What a preferences stage must make of its answers for a stage to train on them, by the field that names it.
POST_PROCESSORS = {
    ("dpo", "pairs"): ("dpo",),
    ("kto", "answers"): ("kto", "dpo"),
    ("sft", "answers"): ("rejection_sampling", "conditional_sft"),
}


class Reference(NamedTuple):
    """A name in a config that stands for a model or for another stage. `place` is the field, for messages."""

    place: str
    name: str
    kinds: tuple[str, ...]


def references(config: StageConfig) -> Iterator[Reference]:
    """The names in a config that stand for models or other stages."""
    for field, kinds in REFERENCES[config.stage].items():
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
                yield Reference(f"parents.{model}", parent, POLICY)
        for i, name in enumerate(config.reward_evaluation.models if config.reward_evaluation else ()):
            yield Reference(f"reward_evaluation.models.{i}", name, REWARD)
        for i, judge in enumerate(config.judges):
            if isinstance(judge, RewardJudge):
                yield Reference(f"judges.{i}.reward", judge.reward, REWARD)
            elif isinstance(judge, VllmJudge):
                yield Reference(f"judges.{i}.model", judge.model, POLICY)
