"""PPO stages that ran on GPUs, as `alignflow plan` sees them, and what it was not fitted to
(tests/benchmarks/README.md)."""

from __future__ import annotations

from typing import Any

from rlhf_core.config import PPO
from rlhf_core.forecast.hardware import GPUS, Gpu
from rlhf_core.hub.model_config import Size, size_of_config

LARGE = {"num_hidden_layers": 28, "vocab_size": 151936}
SMALL_MODEL = size_of_config(
    {
        **LARGE,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
)
LARGE_MODEL = size_of_config(
    {
        **LARGE,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }
)


def one_card(count: int) -> dict[str, Any]:
    return {"num_ranks_per_node": count, "gpus": 1}


def all_roles(ranks: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(("actor_ranks", "critic_ranks", "reference_ranks", "reward_ranks"), ranks)


def ppo(**fields: Any) -> PPO:
    common = {"prompts": {"sources": "p.jsonl"}, "prompt_max_len": 256, "dtype": "bfloat16", "reward": "rm"}
    return PPO.model_validate({**common, **fields})


def with_bf16_sums(config: PPO) -> PPO:
    """Returns a recipe as it was when its memory was measured: the gradients of passes were added in bf16."""
    return config.model_copy(update={"deepspeed": {"data_types": {"grad_accum_dtype": "bf16"}}})


ONE = ppo(
    **all_roles({"gpus": 0.15}), engine={"gpus": 0.3, "gpu_memory_utilization": 0.3}, zero_stage=2, rollout_batch_size=128,
    train_batch_size=128, generate_max_len=512, micro_train_tokens=24576, micro_rollout_tokens=24576, gradient_checkpointing=True,
    micro_train_batch_size=1,
)  # fmt: skip
ALL_ONE = ONE.model_copy(
    update={
        **{name: ONE.actor_ranks.model_copy(update={"gpus": 1.0}) for name in all_roles({})}, "colocate_all": True,
        "ref_reward_offload": True, "adam_offload": ("critic",),
        "engine": ONE.engine.model_copy(update={"gpus": 1.0, "gpu_memory_utilization": 0.45, "sleep": True}),
    }
)  # fmt: skip
ALL_RESIDENT = ALL_ONE.model_copy(update={"ref_reward_offload": False, "adam_offload": ()})
ADAM_OFFLOADED = ALL_RESIDENT.model_copy(update={"adam_offload": ("actor", "critic")})
TWO_APART = ONE.model_copy(
    update={
        **{name: ONE.actor_ranks.model_copy(update={"gpus": 0.25}) for name in all_roles({})},
        "engine": ONE.engine.model_copy(update={"gpus": 1.0, "gpu_memory_utilization": 0.9}),
    }
)  # fmt: skip
ONE_IN_TORCH = ONE.model_copy(update={"zero_stage": 0})
TWO_REWARDS = ppo(
    **all_roles({"gpus": 0.2}), reward=["rm", "other"], engine={"gpus": 1}, zero_stage=0, rollout_batch_size=128, train_batch_size=128,
    generate_max_len=512, micro_train_tokens=24576, micro_rollout_tokens=24576, gradient_checkpointing=True, micro_train_batch_size=1,
)  # fmt: skip
HALVES = TWO_APART.model_copy(
    update={"engine": ONE.engine.model_copy(update={"gpus": 0.5, "gpu_memory_utilization": 0.35})}
)
ACTOR_BESIDE_REFERENCE = HALVES.model_copy(update={"colocate_actor_ref": True})
CRITIC_BESIDE_REWARD = HALVES.model_copy(update={"colocate_critic_reward": True})
TWO_TOGETHER = ppo(
    **all_roles(one_card(2)), colocate_all=True, zero_stage=3, rollout_batch_size=128, train_batch_size=128, generate_max_len=512,
    engine={"num_engines": 2, "gpus": 1, "gpu_memory_utilization": 0.45, "sleep": True}, micro_train_tokens=24576,
    micro_rollout_tokens=24576, gradient_checkpointing=True, micro_train_batch_size=1,
)  # fmt: skip
ONE_ENGINE = TWO_TOGETHER.model_copy(
    update={"engine": TWO_TOGETHER.engine.model_copy(update={"num_engines": 1, "tensor_parallel_size": 2})}
)  # fmt: skip
SPLIT = ppo(
    actor_ranks=one_card(2), reference_ranks=one_card(2), critic_ranks=one_card(1), reward_ranks=one_card(1), colocate_actor_ref=True,
    colocate_critic_reward=True, engine={"gpus": 1}, adam_offload=["critic"], zero_stage=3, rollout_batch_size=128, train_batch_size=128,
    generate_max_len=1024, micro_train_tokens=8192, micro_rollout_tokens=16384, gradient_checkpointing=0.5, micro_train_batch_size=1,
)  # fmt: skip
ALL_FOUR = ppo(
    **all_roles(one_card(4)), colocate_all=True, ref_reward_offload=True, zero_stage=3, rollout_batch_size=512, train_batch_size=128,
    engine={"num_engines": 4, "gpus": 1, "gpu_memory_utilization": 0.3, "sleep": True}, generate_max_len=1024, micro_train_tokens=8192,
    micro_rollout_tokens=16384, gradient_checkpointing=0.5, micro_train_batch_size=1,
)  # fmt: skip
IN_TURN = ALL_FOUR.model_copy(update={"gradient_checkpointing": 0.0})
LONG_PROMPTS = IN_TURN.model_copy(
    update={
        "prompt_max_len": 1024,
        "rollout_batch_size": 1024,
        "engine": ALL_FOUR.engine.model_copy(update={"gpu_memory_utilization": 0.36}),
    }
)


H200 = GPUS["h200"]
H100 = GPUS["h100"]
# What the plan chooses for a recipe that recomputes nothing on one H100, and the option beside it: Adam on
# the host, long passes.
LONG_PASSES = ONE_IN_TORCH.model_copy(update={"gradient_checkpointing": 0.0})
CHOSEN = ALL_RESIDENT.model_copy(
    update={
        "ref_reward_offload": True, "zero_stage": 0, "gradient_checkpointing": 0.0, "micro_train_tokens": 6144,
        "engine": ALL_RESIDENT.engine.model_copy(update={"gpu_memory_utilization": 0.15}),
    }
)  # fmt: skip
# Half of its answers fit the engine at a time.
TURNS = CHOSEN.model_copy(
    update={
        "rollout_batch_size": 384, "generate_max_len": 1536, "engine": CHOSEN.engine.model_copy(update={"gpu_memory_utilization": 0.25}),
    }
)  # fmt: skip
BESIDE_IT = CHOSEN.model_copy(
    update={"zero_stage": 2, "adam_offload": ("actor", "critic"), "micro_train_tokens": 24576}
)

# The same question for a recipe of short passes with everything recomputed, on an H200: the recipe itself,
# and the plan's choice.
SHORT_PASSES = ONE_IN_TORCH.model_copy(update={"micro_train_tokens": 2048, "micro_rollout_tokens": 2048})
LONGER_PASSES = CHOSEN.model_copy(
    update={
        "micro_train_tokens": 8192, "micro_rollout_tokens": 2048,
        "engine": CHOSEN.engine.model_copy(update={"gpu_memory_utilization": 0.1}),
    }
)  # fmt: skip
NO_CRITIC = PPO.model_validate(
    IN_TURN.model_dump() | all_roles(one_card(2)) | {
        "advantage_estimator": "reinforce_pp", "rollout_batch_size": 256, "micro_train_tokens": 6144,
        "engine": IN_TURN.engine.model_dump() | {"num_engines": 2},
    }
)  # fmt: skip

# Nothing in the forecast was fitted to these: cards, GiB of each, seconds of the second step (of the last on
# the H100).
NOT_FITTED: list[tuple[PPO, Gpu, list[float], float]] = [
    (TWO_TOGETHER, H200, [104.2, 104.4], 6.8),
    (ACTOR_BESIDE_REFERENCE, H200, [49.6, 94.6], 7.2),
    (CRITIC_BESIDE_REWARD, H200, [45.7, 95.0], 5.8),
    (ONE_ENGINE, H200, [105.1, 105.7], 7.1),
    (TWO_APART, H200, [94.7, 126.6], 10.5),
    (ONE_IN_TORCH, H200, [111.2], 9.5),
    (ONE_IN_TORCH, H200, [114.0], 8.8),
    (TWO_REWARDS, H200, [77.7, 126.6], 9.5),
    (CHOSEN, H100, [65.8], 10.1),
    (CHOSEN, H100, [62.9], 9.7),
    (TURNS, H100, [73.9], 80.0),
    (BESIDE_IT, H100, [71.5], 12.7),
    (SHORT_PASSES, H200, [105.6], 19.0),
    (LONGER_PASSES, H200, [71.7], 8.5),
]
BEFORE_THEY_RAN = [
    *((config, SMALL_MODEL, card, held) for config, card, held, _ in NOT_FITTED),
    (NO_CRITIC, LARGE_MODEL, H200, [113.0, 114.0]),
]


def sizes(config: PPO, size: Any) -> dict[str, Any]:
    return dict.fromkeys(config.groups, size)


# Stages with seconds by phase, that rates are taken from (tests/benchmarks/calibrate.py).
Phases = list[tuple[PPO, Size, Gpu, dict[str, float]]]
CALIBRATION: Phases = [
    (ALL_ONE, SMALL_MODEL, H200, {"score": 2.65, "train": 6.29}),
    (ONE, SMALL_MODEL, H200, {"score": 2.6, "train": 4.92}),
    (ONE, SMALL_MODEL, H200, {"generate": 2.8, "score": 2.27, "train": 4.57}),
    (TWO_APART, SMALL_MODEL, H200, {"generate": 2.5, "score": 2.27, "train": 4.55}),
    (TWO_TOGETHER, SMALL_MODEL, H200, {"generate": 2.55, "score": 1.27, "train": 2.9}),
    (SPLIT, LARGE_MODEL, H200, {"generate": 9.42, "score": 7.87, "train": 26.77}),
    (ONE, SMALL_MODEL, H200, {"generate": 2.11, "score": 2.22, "train": 4.45}),
    (
        ALL_RESIDENT,
        SMALL_MODEL,
        H200,
        {"generate": 2.01, "score": 2.23, "train": 4.27, "sleep and wake": 0.21},
    ),
    (ADAM_OFFLOADED, SMALL_MODEL, H200, {"generate": 2.4, "score": 2.24, "train": 6.9}),
    (ALL_FOUR, LARGE_MODEL, H200, {"generate": 11.24, "score": 19.67, "train": 49.31}),
    (ALL_FOUR, LARGE_MODEL, H200, {"generate": 11.10, "score": 17.93, "train": 42.41}),
    (ONE, SMALL_MODEL, H200, {"generate": 2.74, "score": 2.22, "train": 4.50}),
    (IN_TURN, LARGE_MODEL, H200, {"generate": 8.47, "score": 17.93, "train": 30.19}),
]
GRPO = PPO.model_validate(
    ONE_IN_TORCH.model_dump() | {
        "advantage_estimator": "grpo", "n_samples_per_prompt": 8, "train_batch_size": 256, "rollout_batch_size": 32, "kl_in": "loss",
        "kl_estimator": "k3", "init_kl_coef": 0.001, "generate_max_len": 2048, "micro_train_tokens": 12288, "micro_rollout_tokens": 12288,
    }
)  # fmt: skip
# Others with seconds by phase, which no rate is taken from. The engine of the GRPO stage is in bf16 once, in
# FP8 once.
HELD_OUT: Phases = [
    (NO_CRITIC, LARGE_MODEL, H200, {"generate": 8.27, "score": 12.76, "train": 16.37}),
    (LONG_PROMPTS, LARGE_MODEL, H200, {"generate": 20.32, "score": 56.71, "train": 90.93}),
    (ONE_IN_TORCH, SMALL_MODEL, H200, {"generate": 2.43, "score": 2.19, "train": 4.24, "sync": 0.11}),
    (GRPO, SMALL_MODEL, H100, {"generate": 20.07, "score": 7.27, "train": 16.09, "sync": 0.2}),
    (GRPO, SMALL_MODEL, H100, {"score": 7.22, "train": 15.79}),
]
