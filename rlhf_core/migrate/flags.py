"""Maps the flags of both dialects to recipe fields.

RENAMED maps dotted names to flat names. FIELDS maps a flat flag to a stage field; if the stage's config lacks
that field, the flag is reported as dropped. DROPPED lists the flags without a counterpart, with the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from rlhf_core.migrate.flag_values import (
    Words,
    count,
    fraction,
    number,
    off_or_number,
    one_of,
    pair,
    true,
    whole,
    zero_stage,
)

Dialect = Literal["flat", "dotted"]


class Field(NamedTuple):
    """The field for a flag. `name`: the field's name in the stage (`engine.sleep` is nested); `read`:
    converts words to the value; `how`: the difference, if the translation is an approximation."""

    name: str
    read: Callable[[Words], Any]
    how: str = ""


# Dotted flags whose flat name is neither their last part nor all parts joined by _.
RENAMED: dict[str, str] = {
    "model.model_name_or_path": "pretrain",
    "actor.model_name_or_path": "pretrain",
    "ref.model_name_or_path": "ref_pretrain",
    "reward.model_name_or_path": "reward_pretrain",
    "critic.model_name_or_path": "critic_pretrain",
    "reward.remote_url": "remote_rm_url",
    "train.colocate_all_models": "colocate_all",
    "data.prompt_dataset": "prompt_data",
    "data.prompt_probs": "prompt_data_probs",
    "data.dataset_split": "train_split",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.max_new_tokens": "generate_max_len",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.async_enable": "async_train",
    "adam.lr": "learning_rate",
    "actor.adam.lr": "actor_learning_rate",
    "critic.adam.lr": "critic_learning_rate",
    "adam.weight_decay": "l2",
    "actor.adam.weight_decay": "l2",
    "actor.entropy_coef": "entropy_loss_coef",
    "model.loss_type": "loss",
    "critic.freezing_steps": "freezing_actor_steps",
    "critic.value_clip": "value_clip",
    "critic.save_value_network": "save_value_network",
    "reward.normalize_enable": "normalize_reward",
    "reward.overlong_buffer_len": "overlong_buffer_len",
    "reward.overlong_penalty_factor": "overlong_penalty_factor",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.use_loss": "use_kl_loss",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.advantage.is_correction_enable": "enable_vllm_is_correction",
    "algo.dynamic_filtering_range": "dynamic_filtering_reward_range",
    "ckpt.output_dir": "save_path",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.max_mem": "max_ckpt_mem",
    "ckpt.load_enable": "load_checkpoint",
    "ckpt.save_hf": "save_hf_ckpt",
    "ckpt.disable_ds": "disable_ds_ckpt",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.use_universal_ckpt": "use_ds_universal_ckpt",
    "logger.tensorboard_dir": "use_tensorboard",
    "logger.wandb.key": "use_wandb",
}
# `--data.max_len` is max_len
SECTIONS = ("actor", "data", "model", "train", "rollout", "ds", "vllm", "ckpt", "logger")
ALIASES = {
    "colocate_all_models": "colocate_all",
    "tensorboard": "use_tensorboard",
    "max_new_tokens": "generate_max_len",
}

ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
}

SAME_NAME: dict[Callable[[Words], Any], str] = {  # flags with the same name as their field
    count: (
        "max_len train_batch_size micro_train_batch_size max_epochs logging_steps rollout_batch_size"
        " micro_rollout_batch_size n_samples_per_prompt num_episodes prompt_max_len generate_max_len"
        " kl_horizon"
    ),
    number: (
        "learning_rate max_norm beta label_smoothing temperature actor_learning_rate critic_learning_rate"
        " init_kl_coef kl_target gamma lambd eps_clip dual_clip"
    ),
    fraction: "min_lr_ratio",
    off_or_number: "save_steps freezing_actor_steps",
    zero_stage: "zero_stage",
    true: (
        "gradient_checkpointing adam_offload compute_fp32_loss ref_offload colocate_all colocate_actor_ref"
        " colocate_critic_reward ref_reward_offload deepspeed_enable_sleep"
    ),
}
FIELDS: dict[str, Field] = {
    **{name: Field(name, read) for read, names in SAME_NAME.items() for name in names.split()},
    "adam_betas": Field("betas", pair),
    "l2": Field("weight_decay", number),
    "lr_warmup_ratio": Field("warmup_ratio", fraction),
    "eval_steps": Field("eval_steps", off_or_number, "steps of the optimiser"),
    "max_ckpt_num": Field("keep_checkpoints", count),
    "aux_loss_coef": Field("router_aux_coef", number),
    "nll_loss_coef": Field("nll_coef", number),
    "desirable_loss_weight": Field("w_desirable", number),
    "undesirable_loss_weight": Field("w_undesirable", number),
    "advantage_estimator": Field("advantage_estimator", one_of(**ESTIMATORS)),
    "policy_loss_type": Field("ratio", one_of(ppo="token", gspo="sequence")),
    "kl_estimator": Field("kl_estimator", one_of(k1="k1", k2="k2", k3="k3")),
    "entropy_loss_coef": Field("entropy_coef", number),
    "value_clip": Field(
        "value_clip", number, "in standard deviations of the returns, instead of units of the reward"
    ),
    "normalize_reward": Field(
        "normalize_reward", true, "with the mean and standard deviation kept with the reward model"
    ),
    "overlong_buffer_len": Field("overlong_buffer", whole),
    "overlong_penalty_factor": Field("overlong_penalty", number),
    "dynamic_filtering": Field(
        "dynamic_filtering",
        true,
        "groups whose answers all have one reward are replaced, instead of those whose mean leaves a range",
    ),
    "top_p": Field("top_p", number),
    "ring_attn_size": Field(
        "sequence_parallel_size",
        count,
        "ranks exchange heads in place of blocks of keys: it divides the heads too",
    ),
    "vllm_num_engines": Field("engine.num_engines", count),
    "vllm_tensor_parallel_size": Field("engine.tensor_parallel_size", count),
    "vllm_gpu_memory_utilization": Field("engine.gpu_memory_utilization", fraction),
    "vllm_enable_sleep": Field("engine.sleep", true),
}

PPO_ONLY = {"gamma", "lambd"}  # in a dpo stage, these names are fields of SimPO and ORPO

REASONS: dict[str, str] = {
    "not needed: alignflow chooses this itself": (
        """
        flash_attn attn_implementation ring_head_stride experts_implementation vllm_sync_backend
        vllm_sync_with_ray enforce_eager enable_prefix_caching overlap_comm grad_accum_dtype zpg
        actor_init_on_gpu gradient_checkpointing_use_reentrant rollout_tasks_per_gpu
        gradient_checkpointing_reentrant vllm_generate_batch_size value_head_prefix dataloader_num_workers
        disable_fast_tokenizer disable_trace_cache local_rank deepcompile use_liger_kernel max_num_seqs
        dist_backend"""
    ),
    "not needed: alignflow always does this": (
        "load_checkpoint save_hf_ckpt perf multiturn unpaired_preference"
    ),
    "checkpoints are in the stage's run directory, artifacts/stages/<stage>-<digest>/": (
        """
        ckpt_path disable_ds_ckpt use_ds_universal_ckpt max_ckpt_mem best_metric_key"""
    ),
    "write `wandb: {project: ...}` into the recipe for this, with the key in WANDB_API_KEY; TensorBoard files"
    " are always written": (
        """
        use_wandb use_tensorboard wandb_org wandb_group wandb_project wandb_run_name"""
    ),
    "models are text models": "image_key max_images_per_prompt freeze_visual_encoder",
    "there is no moving average of the weights": "enable_ema ema_beta",
}
DROPPED: dict[str, str] = {
    **{flag: reason for reason, flags in REASONS.items() for flag in flags.split()},
    "deepspeed_enable_sleep": "an idle model stays on its GPUs",
    "loss": "sigmoid and logexp are one function, the loss of every reward model",
    "packing_samples": "not needed: SFT packs by default, other stages cut the padding",
    "ds_tensor_parallel_size": "training has no tensor parallelism; ZeRO shards the model",
    "tokenizer_chat_template": "set the template in the model's own tokenizer",
    "pretrain_mode": "there is no continued pre-training stage",
    "lora_dropout": "adapters have no dropout",
    "ptx_coef": "there is no pre-training loss in PPO; nll_coef of a dpo stage is the nearest",
    "no_advantage_std_norm": "dr_grpo is the estimator without the standard deviation",
    "save_value_network": "the critic stays in the stage's resume checkpoints",
    "label_key": "a reward function receives the whole row, with this column",
    "agent_func_path": "an agent is what ppo.environment.agent names: docs/how-to/agents.md",
    "async_train": "only ppo samples ahead",
    "async_queue_size": "max_staleness bounds how far answers are ahead, and 1 is set: raise it",
    "partial_rollout_enable": "with max_staleness of 2 or more answers go on over updates",
    "full_determinism": "runs are seeded, and reproducible on CPUs",
    "use_ms": "models come from a folder or the Hugging Face Hub",
    "optim": "the optimiser is AdamW, or Muon with optimizer: muon",
    "vanilla_loss": "KTO is always that of its paper",
    "compute_fp32_loss": "the loss is always computed in float32",
    "dynamic_filtering_reward_range": "dynamic_filtering uses the spread of a group's rewards",
    "vllm_tensor_parallel_size": "a vLLM engine has one GPU here",
}

# Flags that other modules read. Every known dotted flag is listed here or in the tables.
ELSEWHERE = (
    "lora_rank lora_alpha target_modules reward_clip_range is_correction_threshold is_correction_type"
    " rollout_max_tokens_per_gpu eval_n_samples_per_prompt train_max_tokens_per_gpu reward_offload"
    " eval_dataset eval_split margin_loss ipo actor_num_nodes actor_num_gpus_per_node critic_num_nodes"
    " critic_num_gpus_per_node ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node"
)
KNOWN = {*FIELDS, *DROPPED, *ELSEWHERE.split()}


def flat(name: str) -> tuple[str, Dialect]:
    """Returns the flat name of a flag and the dialect in which the flag is written."""
    if "." not in name:
        return ALIASES.get(name, name), "flat"
    if name.startswith("fsdp."):
        name = "ds." + name.removeprefix("fsdp.")
    if name in RENAMED:
        return RENAMED[name], "dotted"
    parts = name.removesuffix("_enable").split(".")
    ends = ["_".join(parts[at:]) for at in range(len(parts) if parts[0] in (*SECTIONS, "algo") else 1)]
    known = next((end for end in ends if end in KNOWN), None)
    if known:
        return known, "dotted"
    section, _, rest = name.partition(".")
    name = rest if section in SECTIONS else name
    return ALIASES.get(name, name), "dotted"
