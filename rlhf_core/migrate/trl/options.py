"""Maps TRL's options to stage fields by stage kind, and lists the defaults of TRL 1.16 that differ from
alignflow's and the reasons why other options are left out."""

from __future__ import annotations

from typing import Any

from rlhf_core.migrate.flag_values import count, fraction, number, off_or_number, one_of, true, whole
from rlhf_core.migrate.flags import Field

COMMON: dict[str, Field] = {
    "learning_rate": Field("learning_rate", number),
    "weight_decay": Field("weight_decay", number),
    "max_grad_norm": Field("max_norm", number),
    "warmup_ratio": Field("warmup_ratio", fraction),
    "logging_steps": Field("logging_steps", count),
    "save_steps": Field("save_steps", off_or_number),
    "save_total_limit": Field("keep_checkpoints", count),
    "gradient_checkpointing": Field("gradient_checkpointing", true),
    "router_aux_loss_coef": Field("router_aux_coef", number, "added per document"),
    "max_length": Field("max_len", count),
    "max_seq_length": Field("max_len", count),
    "zero_stage": Field("zero_stage", whole),
}
OWN: dict[str, dict[str, Field]] = {
    "sft": {},
    "reward_model": {"center_rewards_coefficient": Field("centering", number)},
    "dpo": {
        "beta": Field("beta", number),
        "label_smoothing": Field("label_smoothing", number),
        "rpo_alpha": Field("nll_coef", number, "the NLL is a mean over the tokens of a step"),
    },
    "kto": {
        "beta": Field("beta", number),
        "desirable_weight": Field("w_desirable", number),
        "undesirable_weight": Field("w_undesirable", number),
    },
    "ppo": {
        "learning_rate": Field("actor_learning_rate", number),
        "num_generations": Field("n_samples_per_prompt", count),
        "max_completion_length": Field("generate_max_len", count),
        "max_prompt_length": Field("prompt_max_len", count),
        "temperature": Field("temperature", number),
        "top_p": Field("top_p", number),
        "top_k": Field("top_k", off_or_number),
        "num_iterations": Field("max_epochs", count),
        "epsilon": Field("eps_clip", number),
        "epsilon_high": Field("eps_clip_high", number),
        "delta": Field("dual_clip", number),
        "entropy_coef": Field("entropy_coef", number),
        "mask_truncated_completions": Field("mask_truncated", true),
        "importance_sampling_level": Field("ratio", one_of(**{"token": "token", "sequence": "sequence"})),
        "beta": Field("init_kl_coef", number),
        "vllm_enable_sleep_mode": Field("engine.sleep", true),
        "vllm_gpu_memory_utilization": Field("engine.gpu_memory_utilization", fraction),
        "vllm_tensor_parallel_size": Field("engine.tensor_parallel_size", count),
    },
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"learning_rate": 2e-5, "max_len": 1024},
    "reward_model": {"learning_rate": 1e-4, "max_len": 1024},
    "dpo": {"learning_rate": 1e-6, "max_len": 1024, "beta": 0.1},
    "kto": {"learning_rate": 1e-6, "max_len": 1024, "beta": 0.1},
    "ppo": {
        "actor_learning_rate": 1e-6,
        "n_samples_per_prompt": 8,
        "generate_max_len": 512,
        "init_kl_coef": 0.0,
        "kl_in": "loss",
        "kl_estimator": "k3",
        "reward_clip": 1e6,
    },
}
COMMON_DEFAULTS: dict[str, Any] = {"warmup_ratio": 0.0, "gradient_checkpointing": True}

REASONS: dict[str, str] = {
    "not needed: alignflow chooses this itself": (
        """
        attn_implementation packing packing_strategy padding_free pad_to_multiple_of eval_packing
        use_liger_kernel activation_offloading precompute_ref_log_probs precompute_ref_batch_size
        dataset_num_proc dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor
        dataloader_persistent_workers group_by_length length_column_name remove_unused_columns
        gradient_checkpointing_kwargs ddp_find_unused_parameters ddp_timeout ddp_bucket_cap_mb tf32
        torch_compile torch_compile_backend per_device_eval_batch_size eval_accumulation_steps
        torch_empty_cache_steps optim_args ds3_gather_for_generation cache_implementation vllm_model_impl
        vllm_max_model_length vllm_server_timeout vllm_group_port use_transformers_paged
        num_generations_eval ignore_bias_buffers dataset_streaming streaming use_cache bnb_4bit_quant_type
        use_bnb_nested_quant bnb_4bit_quant_storage lora_task_type train_sampling_strategy
        logging_first_step logging_strategy save_strategy save_safetensors save_only_model local_rank debug
        auto_find_batch_size bf16_full_eval fp16_full_eval eval_delay prediction_loss_only
        eval_do_concat_batches eval_use_gather_object include_for_metrics batch_eval_metrics
        include_num_input_tokens_seen enable_jit_checkpoint ignore_data_skip
        restore_callback_states_from_checkpoint skip_memory_metrics accelerator_config
        average_tokens_across_devices liger_kernel_config use_transformers_continuous_batching
        transformers_continuous_batching_config do_predict label_names do_train do_eval
        overwrite_output_dir resume_from_checkpoint trl_project disable_tqdm log_level eval_on_start"""
    ),
    "checkpoints are in the stage's run directory, artifacts/stages/<stage>-<digest>/": (
        "logging_dir load_best_model_at_end"
    ),
    "write `wandb: {project: ...}` into the recipe for this, with the key in WANDB_API_KEY; TensorBoard files"
    " are always written": (
        """
        report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id"""
    ),
    "a `publication` stage copies a model to the Hub": (
        """
        push_to_hub hub_model_id hub_strategy hub_private_repo hub_token hub_revision"""
    ),
    "samples are in the run directory of the stage": (
        "log_completions num_completions_to_print log_unique_prompts log_completions_hub_repo"
    ),
    "adapters have no such variant": "use_dora use_rslora lora_modules_to_save lora_target_parameters",
    "the reference model does not move": "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    "there is no such loss term": (
        """
        ld_alpha use_weighting discopop_tau f_divergence_type f_alpha_divergence_coef top_entropy_quantile
        off_policy_mask_threshold use_bias_correction_kl use_adaptive_entropy entropy_coef_min
        entropy_coef_max entropy_coef_delta entropy_target sapo_temperature_neg sapo_temperature_pos
        vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg multi_objective_aggregation"""
    ),
    "sampling has temperature, top_p and top_k alone": (
        "min_p repetition_penalty generation_kwargs vllm_structured_outputs_regex"
    ),
    "the template is that of the model's own tokenizer": (
        "chat_template_path chat_template_kwargs eos_token pad_token"
    ),
    "models train without dropout": "disable_dropout",
}
DROPPED: dict[str, str] = {
    **{name: reason for reason, names in REASONS.items() for name in names.split()},
    "trust_remote_code": (
        "set trust_remote_code at the top of the recipe, if you trust the code of these models"
    ),
    "model_revision": "write the model as owner/name@REVISION",
    "model_init_kwargs": "a stage loads a model by dtype and zero_stage",
    "truncation_mode": "rows that are too long are cut on the right, prompts on the left",
    "dataset_text_field": (
        "rows are conversations, or prompts with answers: texts without them are not trained on"
    ),
    "dataset_kwargs": "rows are used as they are",
    "shuffle_dataset": "the rows of each epoch are always shuffled by the seed",
    "lora_dropout": "adapters have no dropout",
    "load_in_8bit": "quantised base weights have 4 bits: lora.quantize: nf4",
    "deepspeed": "set zero_stage, and other options under deepspeed, by this file",
    "fsdp": "ZeRO shards the model: set zero_stage",
    "fsdp_config": "ZeRO shards the model: set zero_stage",
    "neftune_noise_alpha": "embeddings get no noise",
    "adam_epsilon": "AdamW's epsilon is 1e-8",
    "label_smoothing_factor": "the loss of SFT has no label smoothing",
    "fp16": "bfloat16 needs no loss scale",
    "data_seed": "a recipe has one seed",
    "full_determinism": "runs are seeded, and reproducible on CPUs",
    "use_cpu": "set gpus to 0 in the groups and the engines of the stage",
    "parallelism_config": "set sequence_parallel_size, or zero_stage",
    "optim_target_modules": "the optimiser is AdamW, of all weights",
    "greater_is_better": (
        "the model of the last step is used; of ppo with eval_prompts that of the best iteration"
    ),
    "max_prompt_length": "a pair has one limit, max_len: the prompt keeps its end, then the answers are cut",
    "max_completion_length": (
        "a pair has one limit, max_len: the prompt keeps its end, then the answers are cut"
    ),
    "test_split_size": "set eval_data to rows of their own",
    "cast_lm_head_to_fp32": "log-probs are computed in float32",
    "max_tool_calling_iterations": "tools are those of ppo.environment: docs/how-to/environments.md",
    "vllm_server_base_url": "a ppo stage starts its own engines",
    "vllm_server_host": "a ppo stage starts its own engines",
    "vllm_server_port": "a ppo stage starts its own engines",
    "metric_for_best_model": (
        "the model of the last step is used; of ppo with eval_prompts that of the best iteration"
    ),
}
