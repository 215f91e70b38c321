"""Maps the flags of both dialects to recipe fields.

DOTTED maps dotted names to flat ones. FIELDS maps a flat flag to a field of a stage, one line per flag; a flag whose field the stage's
config does not have is reported as dropped. DROPPED has the flags without a counterpart, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Words = tuple[str, ...]


def number(words: Words) -> float:
    """Reads a finite number. This and the other readers raise ValueError with the reason when the words do not fit."""
    if len(words) != 1:
        raise ValueError("one number is expected" if words else "it has no value")
    if "$" in words[0] or "`" in words[0]:
        raise ValueError("the value of this variable is not in the script")
    try:
        value = float(words[0])
    except ValueError:
        raise ValueError("this is not a number") from None
    if not math.isfinite(value):
        raise ValueError("this is not a finite number")
    return value


def whole(words: Words) -> int:
    """Reads a whole number, also as 1e8, which the dialects allow."""
    value = number(words)
    if value != int(value):
        raise ValueError("this is not a whole number")
    return int(value)


def count(words: Words) -> int:
    """Reads a whole number above 0."""
    value = whole(words)
    if value < 1:
        raise ValueError("this is not above 0")
    return value


def off_or_number(words: Words) -> int:
    """Reads a whole number; -1, which means off, becomes 0."""
    return max(0, whole(words))


def fraction(words: Words) -> float:
    """Reads a number from 0 to 1."""
    value = number(words)
    if not 0 <= value <= 1:
        raise ValueError("this is not between 0 and 1")
    return value


def pair(words: Words) -> list[float]:
    """Reads two numbers."""
    if len(words) != 2:
        raise ValueError("two numbers are expected")
    return [number(words[:1]), number(words[1:])]


def limited(read: Callable[[Words], int], valid: str, fits: Callable[[int], bool]) -> Callable[[Words], int]:
    """Returns `read` for values that fit; `valid` describes these in the error."""

    def checked(words: Words) -> int:
        value = read(words)
        if not fits(value):
            raise ValueError(f"only {valid} is known")
        return value

    return checked


def listed(words: Words) -> list[str]:
    """Reads `a,b` or `a b` as a list."""
    return [part.strip() for word in words for part in word.split(",") if part.strip()]


Dialect = Literal["flat", "dotted"]


class Field(NamedTuple):
    """The field of a flag. `name`: in the stage (`vllm.sleep` is nested); `read`: words to value; `how`: difference, if approximated."""

    name: str
    read: Callable[[tuple[str, ...]], Any]
    how: str = ""


ROLES = ("actor", "critic", "ref", "reward")
DOTTED: dict[str, str] = {
    "model.model_name_or_path": "pretrain",
    "actor.model_name_or_path": "pretrain",
    "ref.model_name_or_path": "ref_pretrain",
    "reward.model_name_or_path": "reward_pretrain",
    "critic.model_name_or_path": "critic_pretrain",
    "reward.remote_url": "remote_rm_url",
    **{f"{role}.{name}": f"{role}_{name}" for role in ROLES for name in ("num_nodes", "num_gpus_per_node")},
    **{
        f"vllm.{name}": f"vllm_{name}"
        for name in ("num_engines", "tensor_parallel_size", "gpu_memory_utilization", "sync_backend", "sync_with_ray", "enable_sleep")
    },
    "train.colocate_all_models": "colocate_all",
    "ref.offload": "ref_offload",
    "reward.offload": "reward_offload",
    "data.prompt_dataset": "prompt_data",
    "data.prompt_probs": "prompt_data_probs",
    "data.dataset_split": "train_split",
    "eval.dataset": "eval_dataset",
    "eval.split": "eval_split",
    "eval.steps": "eval_steps",
    "eval.temperature": "eval_temperature",
    "eval.n_samples_per_prompt": "eval_n_samples_per_prompt",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.max_new_tokens": "generate_max_len",
    "rollout.max_tokens_per_gpu": "rollout_max_tokens_per_gpu",
    "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size",
    "train.max_tokens_per_gpu": "train_max_tokens_per_gpu",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.full_determinism_enable": "full_determinism",
    "train.async_enable": "async_train",
    "adam.lr": "learning_rate",
    "actor.adam.lr": "actor_learning_rate",
    "critic.adam.lr": "critic_learning_rate",
    "adam.betas": "adam_betas",
    "actor.adam.betas": "adam_betas",
    "adam.weight_decay": "l2",
    "actor.adam.weight_decay": "l2",
    "actor.lr_scheduler": "lr_scheduler",
    "actor.lr_warmup_ratio": "lr_warmup_ratio",
    "actor.min_lr_ratio": "min_lr_ratio",
    "actor.max_norm": "max_norm",
    "actor.optim": "optim",
    "actor.entropy_coef": "entropy_loss_coef",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "model.gradient_checkpointing_enable": "gradient_checkpointing",
    "model.ipo_enable": "ipo",
    "model.loss_type": "loss",
    "model.margin_loss_enable": "margin_loss",
    "model.compute_fp32_loss_enable": "compute_fp32_loss",
    "model.pretrain_mode_enable": "pretrain_mode",
    "critic.freezing_steps": "freezing_actor_steps",
    "critic.value_clip": "value_clip",
    "critic.save_value_network": "save_value_network",
    "reward.normalize_enable": "normalize_reward",
    "reward.clip_range": "reward_clip_range",
    "reward.overlong_buffer_len": "overlong_buffer_len",
    "reward.overlong_penalty_factor": "overlong_penalty_factor",
    "algo.kl.init_coef": "init_kl_coef",
    "algo.kl.target": "kl_target",
    "algo.kl.horizon": "kl_horizon",
    "algo.kl.estimator": "kl_estimator",
    "algo.kl.use_loss": "use_kl_loss",
    "algo.advantage.estimator": "advantage_estimator",
    "algo.advantage.gamma": "gamma",
    "algo.advantage.lambd": "lambd",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.advantage.is_correction_enable": "enable_vllm_is_correction",
    "algo.advantage.is_correction_threshold": "is_correction_threshold",
    "algo.advantage.is_correction_type": "is_correction_type",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "algo.dynamic_filtering_range": "dynamic_filtering_reward_range",
    "ckpt.output_dir": "save_path",
    "ckpt.path": "ckpt_path",
    "ckpt.max_num": "max_ckpt_num",
    "ckpt.max_mem": "max_ckpt_mem",
    "ckpt.load_enable": "load_checkpoint",
    "ckpt.save_hf": "save_hf_ckpt",
    "ckpt.disable_ds": "disable_ds_ckpt",
    "ds.lora.rank": "lora_rank",
    "ds.lora.alpha": "lora_alpha",
    "ds.lora.dropout": "lora_dropout",
    "ds.lora.target_modules": "target_modules",
    "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "ds.use_universal_ckpt": "use_ds_universal_ckpt",
    "logger.tensorboard_dir": "use_tensorboard",
    "logger.wandb.key": "use_wandb",
    **{f"logger.wandb.{name}": f"wandb_{name}" for name in ("project", "org", "group", "run_name")},
}
SECTIONS = ("actor", "data", "model", "train", "rollout", "ds", "fsdp", "vllm", "ckpt", "logger")  # `--data.max_len` is max_len
ALIASES = {"colocate_all_models": "colocate_all", "tensorboard": "use_tensorboard", "max_new_tokens": "generate_max_len"}

ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
}


def true(words: tuple[str, ...]) -> bool:
    """Reads a switch; `--flag False` turns it off."""
    return not words or words[0].lower() not in ("false", "0", "no")


def one_of(**values: str) -> Callable[[tuple[str, ...]], str]:
    """Returns a reader that maps one of the names in `values` to its value."""

    def read(words: tuple[str, ...]) -> str:
        if len(words) != 1 or words[0].lower() not in values:
            raise ValueError(f"only {', '.join(values)} are known")
        return values[words[0].lower()]

    return read


FIELDS: dict[str, Field] = {
    # training stages
    "max_len": Field("max_len", count),
    "train_batch_size": Field("train_batch_size", count),
    "micro_train_batch_size": Field("micro_train_batch_size", count),
    "max_epochs": Field("max_epochs", count),
    "learning_rate": Field("learning_rate", number),
    "adam_betas": Field("betas", pair),
    "l2": Field("weight_decay", number),
    "lr_warmup_ratio": Field("warmup_ratio", fraction),
    "min_lr_ratio": Field("min_lr_ratio", fraction),
    "max_norm": Field("max_norm", number),
    "logging_steps": Field("logging_steps", count),
    "eval_steps": Field("eval_steps", off_or_number, "steps of the optimiser"),
    "save_steps": Field("save_steps", off_or_number),
    "max_ckpt_num": Field("keep_checkpoints", count),
    "gradient_checkpointing": Field("gradient_checkpointing", true),
    "zero_stage": Field("zero_stage", limited(whole, "0 to 3", lambda stage: 0 <= stage <= 3)),
    "adam_offload": Field("adam_offload", true),
    "aux_loss_coef": Field("router_aux_coef", number),
    "compute_fp32_loss": Field("compute_fp32_loss", true),
    # reward model, DPO, KTO
    "loss": Field("loss", one_of(sigmoid="sigmoid", logexp="logexp", log_exp="logexp")),
    "beta": Field("beta", number),
    "label_smoothing": Field("label_smoothing", number),
    "nll_loss_coef": Field("nll_coef", number),
    "desirable_loss_weight": Field("w_desirable", number),
    "undesirable_loss_weight": Field("w_undesirable", number),
    "ref_offload": Field("ref_offload", true),
    # PPO: sizes
    "rollout_batch_size": Field("rollout_batch_size", count),
    "micro_rollout_batch_size": Field("micro_rollout_batch_size", count),
    "n_samples_per_prompt": Field("n_samples_per_prompt", count),
    "num_episodes": Field("num_episodes", count),
    "prompt_max_len": Field("prompt_max_len", count),
    "generate_max_len": Field("generate_max_len", count),
    "temperature": Field("temperature", number),
    # PPO: the algorithm
    "advantage_estimator": Field("advantage_estimator", one_of(**ESTIMATORS)),
    "policy_loss_type": Field("ratio", one_of(ppo="token", gspo="sequence")),
    "actor_learning_rate": Field("actor_learning_rate", number),
    "critic_learning_rate": Field("critic_learning_rate", number),
    "init_kl_coef": Field("init_kl_coef", number),
    "kl_target": Field("kl_target", number),
    "kl_horizon": Field("kl_horizon", count),
    "kl_estimator": Field("kl_estimator", one_of(k1="k1", k2="k2", k3="k3")),
    "gamma": Field("gamma", number),
    "lambd": Field("lambd", number),
    "eps_clip": Field("eps_clip", number),
    "dual_clip": Field("dual_clip", number),
    "value_clip": Field("value_clip", number),
    "entropy_loss_coef": Field("entropy_coef", number),
    "freezing_actor_steps": Field("freezing_actor_steps", off_or_number),
    "normalize_reward": Field("normalize_reward", true, "with the mean and standard deviation kept with the reward model"),
    "overlong_buffer_len": Field("overlong_buffer", whole),
    "overlong_penalty_factor": Field("overlong_penalty", number),
    "dynamic_filtering": Field(
        "dynamic_filtering", true, "groups whose answers all have one reward are replaced, instead of those whose mean leaves a range"
    ),
    # PPO: placement
    "colocate_all": Field("colocate_all", true),
    "colocate_actor_ref": Field("colocate_actor_ref", true),
    "colocate_critic_reward": Field("colocate_critic_reward", true),
    "ref_reward_offload": Field("ref_reward_offload", true),
    "vllm_num_engines": Field("vllm.num_engines", count),
    "vllm_tensor_parallel_size": Field("vllm.tensor_parallel_size", count),
    "vllm_gpu_memory_utilization": Field("vllm.gpu_memory_utilization", fraction),
    "vllm_enable_sleep": Field("vllm.sleep", true),
    "deepspeed_enable_sleep": Field("deepspeed_enable_sleep", true),
}

PPO_ONLY = {"gamma", "lambd"}  # a dpo stage has fields of these names for SimPO and ORPO

ALWAYS = "not needed: alignflow always does this"
BUILT_IN = "not needed: alignflow chooses this itself"
ARTIFACTS = "checkpoints are in the stage's run directory, artifacts/stages/<stage>-<digest>/"
WANDB = "write `wandb: {project: ...}` into the recipe for this, with the key in WANDB_API_KEY; TensorBoard files are always written"
DROPPED: dict[str, str] = {
    **dict.fromkeys(("flash_attn", "attn_implementation", "ring_head_stride", "experts_implementation"), BUILT_IN),
    **dict.fromkeys(("vllm_sync_backend", "vllm_sync_with_ray", "enforce_eager", "enable_prefix_caching", "overlap_comm"), BUILT_IN),
    **dict.fromkeys(
        ("grad_accum_dtype", "zpg", "actor_init_on_gpu", "gradient_checkpointing_use_reentrant", "rollout_tasks_per_gpu"), BUILT_IN
    ),
    **dict.fromkeys(
        ("gradient_checkpointing_reentrant", "vllm_generate_batch_size", "value_head_prefix", "dataloader_num_workers"), BUILT_IN
    ),
    **dict.fromkeys(("disable_fast_tokenizer", "disable_trace_cache", "local_rank", "deepcompile", "use_liger_kernel"), BUILT_IN),
    **dict.fromkeys(("max_num_seqs", "tp_size", "output_path", "eval_task", "iter", "dist_backend", "dp_size"), BUILT_IN),
    **dict.fromkeys(("load_checkpoint", "save_hf_ckpt", "perf", "multiturn", "unpaired_preference"), ALWAYS),
    **dict.fromkeys(("ckpt_path", "disable_ds_ckpt", "use_ds_universal_ckpt", "max_ckpt_mem", "best_metric_key"), ARTIFACTS),
    **dict.fromkeys(("use_wandb", "use_tensorboard", "wandb_org", "wandb_group", "wandb_project", "wandb_run_name"), WANDB),
    **dict.fromkeys(("deepspeed_enable_sleep",), "an idle model stays on its GPUs"),
    **dict.fromkeys(("eval_temperature", "eval_n_samples_per_prompt"), "an `evaluation` stage does this after training"),
    "packing_samples": "not needed: SFT packs by default, other stages cut the padding",
    "ring_attn_size": "there is no context parallelism",
    "ds_tensor_parallel_size": "training has no tensor parallelism; ZeRO shards the model",
    "tokenizer_chat_template": "set the template in the model's own tokenizer",
    "pretrain_mode": "there is no continued pre-training stage",
    "lora_dropout": "adapters have no dropout",
    "top_p": "sampling is always from the whole distribution, as the log-probs of training are",
    "ptx_coef": "there is no pre-training loss in PPO; nll_coef of a dpo stage is the nearest",
    "enable_ema": "there is no moving average of the weights",
    "ema_beta": "there is no moving average of the weights",
    "no_advantage_std_norm": "dr_grpo is the estimator without the standard deviation",
    "save_value_network": "the critic stays in the stage's resume checkpoints",
    "label_key": "a reward function receives the whole row, with this column",
    "agent_func_path": "multi-turn agents are not part of a recipe",
    "async_train": "only ppo samples ahead",
    "async_queue_size": "answers are sampled one iteration ahead at most, by one_step_off_policy",
    "partial_rollout_enable": "an answer comes from one set of weights",
    "full_determinism": "runs are seeded, and reproducible on CPUs",
    "use_ms": "models come from a folder or the Hugging Face Hub",
    "optim": "the optimiser is AdamW",
    "image_key": "models are text models",
    "max_images_per_prompt": "models are text models",
    "freeze_visual_encoder": "models are text models",
    "vanilla_loss": "KTO is always that of its paper",
    "compute_fp32_loss": "the loss is always computed in float32",
    "dynamic_filtering_reward_range": "dynamic_filtering uses the spread of a group's rewards",
    "vllm_tensor_parallel_size": "a vLLM engine has one GPU here",
}


def flat(name: str) -> tuple[str, Dialect]:
    """Returns the flat name of a flag in either dialect, and its dialect."""
    dialect: Dialect = "dotted" if "." in name else "flat"
    section, dot, rest = name.partition(".")
    if section == "fsdp":
        name, section = f"ds.{rest}", "ds"
    if name in DOTTED:
        return DOTTED[name], dialect
    if dot and section in SECTIONS:
        name = rest
    return ALIASES.get(name, name), dialect
