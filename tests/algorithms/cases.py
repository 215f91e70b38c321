"""Every algorithm as a short run of a shipped recipe: the recipe, its overrides, the stage that learns, and
what its objective is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

from rlhf_core.recipe.load_recipe import load_recipe
from rlhf_core.recipe.plan import Plan, plan

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "deployments" / "recipes"
Objective = Literal["answers", "ranking", "margin", "mean margin", "reward"]


class Case(NamedTuple):
    """An algorithm; `stage` is the stage (or loop) of the recipe that learns, `objective` as `measure` reads
    it."""

    algorithm: str
    recipe: str
    stage: str
    objective: Objective
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The recipe's name in the artifacts: the same for cases that are parts of one run."""
        return f"learn-{self.run}"

    @property
    def run(self) -> str:
        name = self.algorithm.lower().replace("++", "-pp")
        return self.recipe if self.recipe == "tiny-cpu" else re.sub(r"[^a-z0-9]+", "-", name).strip("-")

    @property
    def arguments(self) -> tuple[str, ...]:
        """What the command gets after `alignflow run`."""
        return (
            str((RECIPES / f"{self.recipe}.yaml").relative_to(ROOT)),
            f"name={self.name}",
            *self.overrides,
        )

    def plan(self) -> Plan:
        return plan(load_recipe(RECIPES / f"{self.recipe}.yaml", self.arguments[1:]))


# Iterative DPO starts from SFT here, as all others do; the demo lets it start from PPO.
DEMO = (
    "ppo.max_steps=10",
    "ppo.actor_learning_rate=1e-4",
    "iterative_dpo.policy=sft",
    "iterative_dpo.prompts_per_round=512",
)


def loop(stage: str) -> tuple[str, ...]:
    """Rounds of fewer prompts."""
    return (f"{stage}.prompts_per_round=512",)


def rl(stage: str, *more: str) -> tuple[str, ...]:
    """Fewer iterations."""
    return (f"{stage}.max_steps=8", *(f"{stage}.{override}" for override in more))


DAPO = (
    "eps_clip_high=0.28",
    "loss_aggregation=token",
    "dynamic_filtering=true",
    "filter_min_spread=1",
    "overlong_buffer=8",
    "init_kl_coef=0",
)

CASES = (
    Case("SFT", "tiny-cpu", "sft", "answers", DEMO),
    Case("Reward model", "tiny-cpu", "reward_model", "ranking", DEMO),
    Case("PPO", "tiny-cpu", "ppo", "reward", DEMO),
    Case("Iterative DPO", "tiny-cpu", "iterative_dpo", "reward", DEMO),
    Case("Iterative KTO", "iterative-kto", "iterative_kto", "reward", loop("iterative_kto")),
    Case(
        "Rejection sampling", "rejection-sampling", "rejection_sampling", "reward", loop("rejection_sampling")
    ),
    Case("Conditional SFT", "conditional-sft", "conditional_sft", "reward", loop("conditional_sft")),
    Case("DPO", "dpo", "dpo", "margin", ("dpo.label_smoothing=0", "dpo.nll_coef=0")),
    Case("cDPO with NLL", "dpo", "dpo", "margin"),
    Case("IPO", "ipo", "dpo", "mean margin"),
    Case("SimPO", "simpo", "dpo", "mean margin"),
    Case("ORPO", "orpo", "dpo", "mean margin"),
    Case("KTO", "kto", "kto", "margin"),
    Case("GRPO", "grpo", "grpo", "reward", rl("grpo")),
    Case(
        "Dr. GRPO",
        "grpo",
        "grpo",
        "reward",
        rl("grpo", "advantage_estimator=dr_grpo", "normalize_reward=true"),
    ),
    Case("RLOO", "rloo", "rloo", "reward", rl("rloo")),
    Case(
        "REINFORCE++",
        "reinforce-pp",
        "reinforce_pp",
        "reward",
        rl("reinforce_pp", "advantage_estimator=reinforce_pp"),
    ),
    Case("REINFORCE++ baseline", "reinforce-pp", "reinforce_pp", "reward", rl("reinforce_pp")),
    Case(
        "GSPO",
        "grpo",
        "grpo",
        "reward",
        rl("grpo", "ratio=sequence", "eps_clip_low=3e-4", "eps_clip_high=4e-4"),
    ),
    Case(
        "Clip-higher, dual clip",
        "grpo",
        "grpo",
        "reward",
        rl("grpo", "eps_clip_high=0.28", "dual_clip=3", "max_epochs=2"),
    ),
    Case("Dynamic filtering (DAPO)", "grpo", "grpo", "reward", rl("grpo", *DAPO)),
    Case("Several rewards", "rewards", "ppo", "reward", rl("ppo")),
)
