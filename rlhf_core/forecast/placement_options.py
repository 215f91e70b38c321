"""Lists the placements of a PPO stage to try on a given number of GPUs, as recipe fields. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlhf_core.config import PPO
from rlhf_core.config.process_groups import processes
from rlhf_core.config.rewarding.judge_models import EngineJudge
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewards import ModelReward, RewardSource
from rlhf_core.forecast.hardware import Gpu, nodes_of
from rlhf_core.forecast.memory import engine_needs
from rlhf_core.hub.model_config import Size

MOST_OF_ENGINE = 0.45  # of a GPU shared with models
RANKS = ("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks")
SWITCHES = (
    "colocate_all",
    "colocate_actor_ref",
    "colocate_critic_reward",
    "ref_reward_offload",
    "ref_reward_shard",
    "adam_offload",
    "param_offload",
    "zero_hpz",
)


def options_on(config: PPO, count: int, size: Size, gpu: Gpu) -> dict[str, dict[str, Any]]:
    """Returns the fields for each placement, by its name. `size`: the actor's size."""
    on = PlacementOptions(config, count, size, gpu)
    options = on.all_together() | on.in_halves() | on.weights_on_host()
    least = 1 if config.deepspeed else 0  # DeepSpeed's options have no effect on plain torch
    return {
        name: fields | {"zero_stage": max(least, fields["zero_stage"])} for name, fields in options.items()
    }


def judges_apart(config: PPO) -> int:
    """Returns the number of GPUs taken by judges whose engines do not sleep, and therefore cannot share GPUs
    with models."""
    engines = [judge.model.engine for judge in config.own_judges if not judge.model.engine.sleep]
    return math.ceil(sum(processes(engine) * engine.gpus for engine in engines))


@dataclass(frozen=True)
class PlacementOptions:
    """The options for a stage on `count` GPUs, each given as the fields that produce it. `size`: the actor's
    size."""

    config: PPO
    count: int
    size: Size
    gpu: Gpu

    def all_together(self) -> dict[str, dict[str, Any]]:
        """Returns options in which all roles use all GPUs."""
        together = self._together()
        most = self.config.shardings[-1].stage
        shards = f", ZeRO-{most}" if self.count > 1 else ""  # one GPU has nothing to shard
        zero_stage = most if shards else 0
        offloaded = self._offloaded()
        on_host = {"ref_reward_offload": True, "adam_offload": offloaded, "zero_stage": most if shards else 2}
        options = {
            "all together": together | {"zero_stage": 2 if shards else 0},
            f"all together{shards}, reference and reward offloaded": (
                together | {"zero_stage": zero_stage, "ref_reward_offload": True}
            ),
            "all together, Adam offloaded too": together | on_host,
        }
        if shards and self.config.read_only:
            in_shares = together | {"ref_reward_shard": True, "zero_stage": most}
            options |= {
                f"all together{shards}, reference and reward sharded": in_shares,
                "all together, reference and reward sharded, Adam offloaded": (
                    in_shares | {"adam_offload": offloaded}
                ),
            }
        if shards and not self.config.quantized and nodes_of(self.count, self.gpu) > 1:
            options["all together, all offloaded, a copy of the weights on each node (zero_hpz)"] = (
                together | on_host | {"zero_hpz": True}
            )
        return options

    def in_halves(self) -> dict[str, dict[str, Any]]:
        """Returns options with the actor on one half of the GPUs, and the other models and vLLM on the other;
        none if there are too few GPUs."""
        config = self.config
        actor = self.count // 2
        each = max(1, self.count // 4)
        # without a critic, reward models do not share GPUs
        judging = each * (1 if config.has_critic else len(config.reward_models))
        left = self.count - actor - judging
        if left < 1 or self.count < 3:
            return {}
        most = self.config.shardings[-1].stage
        split = {
            **self._apart(),
            **dict.fromkeys(("actor_ranks", "reference_ranks"), self._ranks(actor)),
            **dict.fromkeys(
                [field for field in self._roles() if field in ("critic_ranks", "reward_ranks")],
                self._ranks(each),
            ),
            "colocate_actor_ref": True,
            "colocate_critic_reward": config.has_critic and bool(config.reward_models),
            "zero_stage": most if actor > 1 else 0,
            "engine": self._engines(left, alone=True),
        }
        judges = ["critic"] * config.has_critic + ["reward"] * bool(config.reward_models)
        others = f"{' and '.join(judges)} on {judging}, " if judges else ""
        options = {f"actor and reference on {actor}, {others}vLLM on {left}": split}
        if min(actor, each) > 1 and config.read_only:
            options[f"the same, reference and reward sharded ({actor} + {each} + {left})"] = split | {
                "ref_reward_shard": True
            }
        if config.has_critic:
            offload = {"adam_offload": ["critic"], "zero_stage": most if actor > 1 else 2}
            options[f"the same, the critic's Adam offloaded ({actor} + {each} + {left})"] = split | offload
        return options

    def weights_on_host(self) -> dict[str, dict[str, Any]]:
        """Returns the option that keeps the trained weights in host memory, if they can be sharded."""
        if self.config.quantized:
            return {}
        shares = self.count > 1 and self.config.read_only
        frozen = {"ref_reward_shard": True} if shares else {"ref_reward_offload": True}
        offloaded = self._offloaded()
        most = self.config.shardings[-1].stage
        on_host = {"adam_offload": offloaded, "param_offload": offloaded, "zero_stage": most}
        return {"all together, weights and Adam offloaded": self._together() | frozen | on_host}

    def _offloaded(self) -> list[str]:
        return ["actor", "critic"] if self.config.has_critic else ["actor"]

    def _roles(self) -> list[str]:
        return [field for field in RANKS if self.config.has_critic or field != "critic_ranks"]

    def _apart(self, judges_on: int = 0) -> dict[str, Any]:
        """Returns the fields under which no roles share GPUs and nothing is offloaded. `judges_on`: number of
        GPUs that each get one engine of every judge that sleeps; 0: these judges keep their number."""
        apart: dict[str, Any] = dict.fromkeys(SWITCHES, False)
        rewards = [_placed(source, judges_on) for source in self.config.reward]
        if rewards != list(self.config.reward):
            apart["reward"] = [source.model_dump() for source in rewards]
        if self.config.teachers:
            teachers = self.config.teachers.items()
            apart["teachers"] = {name: {"model": teacher.model, "ranks": None} for name, teacher in teachers}
        return apart

    def _together(self) -> dict[str, Any]:
        """Returns the fields under which all roles share all GPUs."""
        return {
            **self._apart(self.count),
            **dict.fromkeys(self._roles(), self._ranks(self.count)),
            "colocate_all": True,
            "engine": self._engines(self.count, alone=False),
        }

    def _ranks(self, number: int) -> dict[str, Any]:
        """Returns ranks on this many GPUs, using complete nodes if they exceed one node."""
        per_node = self.gpu.per_node
        nodes = number // per_node if number > per_node and number % per_node == 0 else 1
        return {
            "num_nodes": nodes,
            "num_ranks_per_node": number // nodes,
            "cpus": self.config.actor_ranks.cpus,
            "gpus": 1.0,
        }

    def _engines(self, gpus: int, alone: bool) -> dict[str, Any]:
        """Returns as many engines as fit on `gpus`.

        Each uses the recipe's number of GPUs if that divides `gpus`. If its weights would take more than
        `MOST_OF_ENGINE` of each GPU, it uses more GPUs of a node or, beyond a node, pipeline stages. Engines
        either have their GPUs `alone` or share them with models.
        """
        engine = self.config.engine
        over = engine.tensor_parallel_size if gpus % engine.tensor_parallel_size == 0 else 1
        most = (0.9 if alone else MOST_OF_ENGINE) * self.gpu.memory
        stages = 1
        while engine_needs(self.size, over * stages) > most and gpus % (2 * over * stages) == 0:
            over, stages = (2 * over, 1) if 2 * over <= self.gpu.per_node else (over, 2 * stages)
        sizes = {
            "num_engines": gpus // over // stages,
            "tensor_parallel_size": over,
            "pipeline_parallel_size": stages,
        }
        return engine.model_dump() | sizes | {"gpus": 1.0, "sleep": not alone}


def _placed(source: RewardSource, judges_on: int) -> RewardSource:
    """Returns a reward source without its own ranks, and a judge that sleeps with engines on each of
    `judges_on` GPUs (0: unchanged)."""
    if isinstance(source, ModelReward):
        return source.model_copy(update={"ranks": None})
    if not isinstance(source, JudgeReward) or not isinstance(source.judge, EngineJudge):
        return source
    engine = source.judge.engine
    if not judges_on or not engine.sleep or judges_on % engine.processes:
        return source
    engines = engine.model_copy(update={"num_engines": judges_on // engine.processes, "gpus": 1.0})
    return source.model_copy(update={"judge": source.judge.model_copy(update={"engine": engines})})
