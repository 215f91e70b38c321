"""Configures DeepSpeed beyond the ZeRO stage. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from rlhf_core.records import Config, NotInDigest, check, keys_that_are_no_text

ZERO = "zero_optimization"
QUANTISED_FROZEN = "zero_quantized_nontrainable_weights"
# Options that `deepspeed` refuses, with the reason. A dot marks options of its zero_optimization block.
NOT_FOR_DEEPSPEED = {
    **dict.fromkeys(
        (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "managed_gradient_accumulation",
        ),
        "the stage's train_batch_size and micro_train_batch_size (or micro_train_tokens) set it",
    ),
    "gradient_clipping": "max_norm of the stage sets it",
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "torch_autocast"), "dtype of the stage sets it"),
    **dict.fromkeys(
        ("optimizer", "scheduler", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        "alignflow sets AdamW and its schedule",
    ),
    **dict.fromkeys(
        ("gradient_allreduce_op", "gradient_predivide_factor"),
        "losses are sums over all ranks and must not be divided again",
    ),
    **dict.fromkeys(
        ("steps_per_print", "tensorboard", "wandb", "comet", "csv_monitor"), "metrics are in metrics.jsonl"
    ),
    **dict.fromkeys(("checkpoint", "datastates_ckpt"), "alignflow writes the resume states"),
    **dict.fromkeys(
        ("data_efficiency", "dataloader_drop_last", "autotuning"),
        "alignflow distributes the data and sets the passes",
    ),
    "activation_checkpointing": "gradient_checkpointing of the stage sets it",
    **dict.fromkeys(
        ("hybrid_engine", "tensor_parallel", "expert_parallel", "pipeline", "sequence_parallel_size"),
        "it needs a model in a different form",
    ),
    f"{ZERO}.stage": "zero_stage of the stage sets it",
    **dict.fromkeys(
        (f"{ZERO}.offload_optimizer", f"{ZERO}.cpu_offload"), "adam_offload of the stage sets it"
    ),
    **dict.fromkeys(
        (f"{ZERO}.offload_param", f"{ZERO}.cpu_offload_param"), "param_offload of the stage sets it"
    ),
    f"{ZERO}.cpu_offload_use_pin_memory": "alignflow keeps offloaded state in pinned memory",
    f"{ZERO}.zero_hpz_partition_size": "zero_hpz of the stage sets it",
    f"{ZERO}.compute_grad_norm": "clipping and the metrics need the norm",
    f"{ZERO}.leaf_module": "alignflow sets which modules are fetched as a whole",
    f"{ZERO}.elastic_checkpoint": "alignflow writes the resume states",
}
# Options that affect only speed, memory or what is printed. They are in no digest.
SPEED_ONLY = frozenset(
    [
        *"wall_clock_breakdown memory_breakdown comms_logger flops_profiler dump_state".split(),
        *"disable_python_gc log_level timers aio disable_allgather".split(),
        *(
            f"{ZERO}.{prefix}{name}"
            for name in (
                "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce"
                " allgather_partitions allgather_bucket_size overlap_comm sub_group_size prefetch_bucket_size"
                " param_persistence_threshold model_persistence_threshold max_live_parameters"
                " max_reuse_distance module_granularity_threshold use_all_reduce_for_fetch_params"
                " allgather_sequential round_robin_gradients parameter_alignment memory_efficient_linear"
                " override_module_apply log_trace_cache_warnings enable_sanity_checks"
            ).split()
            for prefix in ("", "stage3_")
        ),
    ]
)


class ZeroFields(Config):
    """Fields for DeepSpeed options beyond the ZeRO stage."""

    zero_hpz: Annotated[bool, NotInDigest] = Field(
        False,
        description=(
            "on several nodes under ZeRO-3: keep a second copy of the weights on each node, sharded over its"
            " ranks, so that backward passes fetch weights without using the network (hpZ of ZeRO++, Wang et"
            " al. 2023)"
        ),
    )
    deepspeed: dict[str, Any] = Field(
        {},
        description=(
            "further DeepSpeed options under their own names, such as"
            " {zero_optimization: {reduce_bucket_size: 100000000}}; they override alignflow's. Options that"
            " affect only speed or memory are not in the digest"
        ),
    )

    @check
    def _check_deepspeed(self) -> Iterator[str]:
        zero = self.deepspeed.get(ZERO, {})
        if not isinstance(zero, dict):
            yield f"deepspeed.{ZERO}={zero!r} must be a mapping of DeepSpeed options"
            return
        yield from keys_that_are_no_text("deepspeed", self.deepspeed)
        for name in (*self.deepspeed, *(f"{ZERO}.{name}" for name in zero)):
            if name in NOT_FOR_DEEPSPEED:
                yield f"deepspeed.{name}: {NOT_FOR_DEEPSPEED[name]}, so leave it out"


def deciding_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of `deepspeed` that affect a stage's result."""
    zero = {
        name: value for name, value in options.get(ZERO, {}).items() if f"{ZERO}.{name}" not in SPEED_ONLY
    }
    others = {name: value for name, value in options.items() if name not in SPEED_ONLY and name != ZERO}
    return others | ({ZERO: zero} if zero else {})
