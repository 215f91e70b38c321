"""The runs on two, four and eight GPUs that `several_gpus.py` lists, forecasts and makes: data alone.

Left out: experts spread over training ranks, which alignflow does not have. A mixture of experts trains under ZeRO-3,
which fetches whole layers with their experts; engines can spread experts (vLLM's enable_expert_parallel).
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class GpuCase(NamedTuple):
    """A run: GPUs of the machine, the shape of its models (of shapes.py; "": made in memory), the benchmark
    with its arguments, and arguments that replace some of them on H100s, which have less memory."""

    name: str
    gpus: int
    shape: str
    script: str
    arguments: str
    on_h100: str = ""


def setting(**fields: Any) -> str:
    return f" --set '{json.dumps(fields)}'"


def ppo(name: str, gpus: int, shape: str, placement: str, sizes: str, **fields: Any) -> GpuCase:
    """A case of ppo_step.py; `fields` of the stage besides its `sizes`."""
    return GpuCase(name, gpus, shape, "ppo_step", f"--placement {placement} {sizes}{setting(**fields)}")


def training(name: str, gpus: int, shape: str, arguments: str, **fields: Any) -> GpuCase:
    """A case of training.py under ZeRO-3, without an export."""
    more = setting(**fields) if fields else ""
    return GpuCase(
        name, gpus, shape, "training", f"{arguments} --gpus {gpus} --zero-stage 3 --no-export{more}"
    )


LONG = "--prompts 1024 --prompt-len 1024 --generate-len 1024 --steps 2"
SHORT = "--prompts 256 --prompt-len 1024 --generate-len 1024 --steps 3"
VERL = "--peer verl --peer-seconds 900"
FOUR = "--prompts 256 --prompt-len 256 --generate-len 1024 --micro-tokens 16384 --recompute 0"
GROUPS = "--prompts 32 --prompt-len 256 --generate-len 2048 --micro-tokens 16384"
LARGE = "--prompts 128 --prompt-len 256 --generate-len 512 --micro-tokens 8192 --zero-stage 3 --steps 2"
PLAIN = "--zero-stage 2 --recompute 0"
OFFLOADED: dict[str, Any] = {"ref_reward_offload": True}
THIRD = {"engine": {"gpu_memory_utilization": 0.3}}
IN_TURN = {**OFFLOADED, **THIRD, "micro_train_tokens": 8192}
GRPO: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "n_samples_per_prompt": 8,
    "train_batch_size": 256,
    "kl_in": "loss",
    "kl_estimator": "k3",
    "init_kl_coef": 0.001,
    "reward": [],
}
APART = {**GRPO, **OFFLOADED, "micro_train_tokens": 4608, "engine": {"gpu_memory_utilization": 0.85}}
SHARDED = {"ref_reward_shard": True, "engine": {"gpu_memory_utilization": 0.28}}
LORA: dict[str, Any] = {"lora": {"rank": 16, "export": "adapter"}, "ref_reward_shard": True}
ENGINES_APART = {**OFFLOADED, "engine": {"gpu_memory_utilization": 0.85}}

CASES = [
    *(
        case
        for suffix, work in (("", LONG), ("-short", SHORT))
        for case in (
            ppo(
                f"ppo-7.6b-8-split{suffix}",
                8,
                "7.6b",
                "split-6",
                f"{work} --micro-tokens 16384",
                **ENGINES_APART,
            ),
            ppo(
                f"ppo-7.6b-8-split-tp2{suffix}",
                8,
                "7.6b",
                "split-8",
                f"{work} --micro-tokens 16384",
                **ENGINES_APART,
            ),
            ppo(
                f"ppo-7.6b-8-all{suffix}",
                8,
                "7.6b",
                "all-8",
                f"{work} --micro-tokens 16384 --recompute 0 {VERL}",
                **IN_TURN,
            )._replace(on_h100=f"--micro-tokens 8192 --recompute 1{setting(**SHARDED)}"),
        )
    ),
    ppo("ppo-72b-lora-8-tp8", 8, "72b", "tp-8", LARGE, **LORA, **THIRD)._replace(
        on_h100=setting(**LORA, **THIRD, param_offload=["critic"])
    ),
    ppo("ppo-72b-lora-8-tp4", 8, "72b", "tp-4-4", LARGE, **LORA, engine={"gpu_memory_utilization": 0.4}),
    training(
        "dpo-72b-8-host-adam", 8, "72b", "--what dpo --work 8 --steps 4 --checkpointing", adam_offload=True
    ),
    GpuCase(
        "sequence-8b-8", 8, "", "sequence_parallel", "--gpus 8 --shape 8b --tokens 262144 --mlp-tokens 8192"
    ),
    training("sft-30b-a3b-8", 8, "30b-a3b-whole", "--what sft --steps 5 --checkpointing --active 3.35e9"),
    ppo(
        "grpo-30b-a3b-8",
        8,
        "30b-a3b-whole",
        "tp-8",
        f"{GROUPS} --zero-stage 3 --steps 3",
        **GRPO,
        ref_reward_shard=True,
        engine={"gpu_memory_utilization": 0.25, "options": {"enable_expert_parallel": True}},
    ),
    GpuCase(
        "sequence-7.6b-4", 4, "", "sequence_parallel", "--gpus 4 --shape 7b --tokens 262144 --mlp-tokens 8192"
    ),
    ppo("ppo-7.6b-4", 4, "7.6b", "all-4", f"{FOUR} --steps 3", **IN_TURN),
    ppo(
        "ppo-7.6b-4-float8",
        4,
        "7.6b",
        "all-4",
        f"{FOUR} --steps 3",
        **IN_TURN,
        float8=True,
        sampler_is="in_ratio",
    ),
    ppo("first-rollout-7.6b-4", 4, "7.6b", "all-4", f"{FOUR} --steps 1", **IN_TURN),
    ppo("grpo-7.6b-4-apart", 4, "7.6b", "ahead-4", f"{GROUPS} {PLAIN} --steps 4", **APART),
    ppo("grpo-7.6b-4-ahead", 4, "7.6b", "ahead-4", f"{GROUPS} {PLAIN} --steps 4", **APART, max_staleness=1),
    training("sft-7.6b-4", 4, "7.6b", "--what sft --steps 6")._replace(on_h100="--checkpointing"),
    training("dpo-7.6b-4", 4, "7.6b", "--what dpo --steps 6")._replace(on_h100="--checkpointing"),
    ppo(
        "grpo-7.6b-2",
        2,
        "7.6b",
        "all-2",
        f"{GROUPS} {PLAIN} --steps 3",
        **GRPO,
        **OFFLOADED,
        micro_train_tokens=6912,
        engine={"gpu_memory_utilization": 0.26},
    ),
]
