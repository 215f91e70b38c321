"""Fields that decide a result and have no change in the tables yet: by class, each with the reason or the
tests that show its effect."""

from __future__ import annotations

WITHOUT = {
    # Has one value; another post-processor is `iterative`, and min_reward is refused for pairs.
    # It refuses ema, as all loops and the reward model.
    "iterative_dpo": "post_processor min_reward ema",
    **dict.fromkeys(("iterative", "iterative_feedback"), "ema"),
    # Remote models: tests/unit/evaluation/answers/test_evaluation_remote.py. A tokenizer:
    # tests/unit/evaluation/scores.
    "evaluation": "endpoints style_tokenizer",
    # Runs the evaluation's stage; history and band: tests/unit/evaluation/regression/test_regression.py.
    "regression": (
        "band baseline bootstrap_rounds dtype endpoints generate_max_len history judges max_questions models"
        " parents prompt_max_len proxy questions reward_evaluation style_tokenizer temperature template"
        " template_args engine"
    ),
    # tests/unit/evaluation/calibration/test_stage.py
    "calibration": (
        "bootstrap_rounds generate_max_len judge labels max_labels prompt_max_len template template_args"
    ),
    # Needs lm-eval: tests/unit/evaluation/alignment_tax/test_alignment_tax.py.
    "alignment_tax": (
        "baseline bootstrap_rounds chat_template dtype limit max_gen_toks max_model_len models num_fewshot"
        " tasks trust_task_code template_args engine"
    ),
    # Rows that name theirs: tests/unit/environments/test_episodes_by_row.py.
    # Runs without engines: tests/engines/test_ppo_halves.py.
    # Teachers of rows: tests/unit/stages/ppo/test_row_teachers.py.
    "ppo": "environments teachers train_only",
    "Teacher": "model",
    # Steps whose loss is not finite: tests/unit/training/test_skipped_steps.py.
    **dict.fromkeys(("sft", "dpo", "kto"), "skip_nonfinite_steps"),
    "reward_model": "skip_nonfinite_steps ema",
    # tests/unit/evaluation/test_select.py; metric has one value.
    "select": "by metric of simplest",
    # tests/unit/evaluation/drift/test_stage.py
    "drift": "anchors bootstrap_rounds evaluation kl max_prompts model past_prompts prompts reference",
    "Anchors": "days judge pairs",
    # tests/unit/stages/publication
    "publication": (
        "base_repo branch dataset dry_run evaluation folder gated license licenses model private repo_id"
        " round_branch"
    ),
    # 4 bits need a GPU: tests/unit/models/test_lora.py.
    "Lora": "quantize",
    # Options of the engine itself: tests/unit/rollout/test_engine_options.py; random streams need a GPU.
    "EngineConfig": "options seed_answers",
    # Requests: tests/unit/rewards/test_http_rewards.py.
    "FunctionReward": "batch_size",
    "HttpReward": "batch_size",
    # Requests: tests/unit/rewards/judge.
    "JudgeReward": "agreement compare criteria judge pairs_per_answer reference rubric scale",
    "RatingModel": "max_tokens model",
    # tests/unit/rollout/test_engine_chat.py, tests/engines/test_own_judge.py
    "EngineJudge": "dtype engine kind max_model_len max_tokens model",
    "Criterion": "name text weight",
    "LabelledPairs": "data limit min",
    # tests/unit/environments/verifiers; verifier and language have one value.
    "MathReward": "answer timeout verifier",
    "CodeReward": "language memory_mib partial tests timeout verifier",
    "ReasoningGymReward": "tag timeout verifier",
    # Gives no reward, under the only normalisation there is.
    "NoReward": "name normalize weight",
    # Data sets of the Hub: tests/unit/data/rows/test_sources.py.
    "Source": "split",
    # Requests to endpoints: tests/unit/evaluation/judges,
    # tests/unit/evaluation/answers/test_remote_answers.py.
    "Endpoint": "base_url max_tokens model more system temperature",
    "OpenAIJudge": "base_url interval_width max_tokens model sequential_questions",
    "VllmJudge": "dtype interval_width max_model_len max_tokens model sequential_questions engine",
}
