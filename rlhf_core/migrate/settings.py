"""Translates settings that span several flags or fields: precision, adapters, schedule and PPO's variants.
Also sets the dialects' defaults."""

from __future__ import annotations

from typing import Any

from rlhf_core.migrate.draft import Draft, Flag
from rlhf_core.migrate.flag_values import count, listed, number, pair, whole

# The dialects' defaults, which are written to the recipe where they differ from ours. The dotted dialect
# changed some of them.
DEFAULTS: dict[str, dict[str, float]] = {
    "sft": {"zero_stage": 2, "learning_rate": 1e-5, "max_len": 512},
    "reward_model": {"zero_stage": 2, "learning_rate": 9e-6, "max_len": 512},
    "dpo": {"zero_stage": 2, "learning_rate": 1e-5, "max_len": 512, "beta": 0.1},
    "kto": {"zero_stage": 2, "learning_rate": 1e-5, "max_len": 512, "beta": 0.01},
    "ppo": {
        "zero_stage": 2,
        "init_kl_coef": 0.02,
        "rollout_batch_size": 512,
        "lambd": 0.95,
        "value_clip": 0.2,
    },
}
DOTTED_DEFAULTS: dict[str, dict[str, float]] = {
    "sft": {"learning_rate": 5e-6, "max_len": 2048},
    "ppo": {"init_kl_coef": 0.01, "rollout_batch_size": 1024, "lambd": 1.0, "value_clip": 0.5},
}
# --lr_scheduler -> our schedule and its min_lr_ratio (None: the dialect's default, which equals ours)
SCHEDULES: dict[str, tuple[str, float | None]] = {
    "cosine_with_min_lr": ("cosine", None),
    "cosine": ("cosine", 0.0),
    "linear": ("linear", 0.0),
    "constant": ("constant", None),
    "constant_with_warmup": ("constant", None),
}
TOTAL_LENGTH = 2048  # default of --data.max_len in PPO, for prompt and answer together


def read_precision(draft: Draft) -> None:
    """Reads --bf16 and --param_dtype."""
    bf16 = draft.take("bf16")
    dtype = draft.take("param_dtype")
    if bf16:
        draft.translate(bf16, "dtype", "bfloat16")
    if dtype:
        how = "" if dtype.first in ("bf16", "fp32") else "bfloat16, which needs no loss scale"
        draft.translate(dtype, "dtype", "float32" if dtype.first == "fp32" else "bfloat16", how)
    elif not bf16 and draft.dialect == "dotted":
        draft.put("dtype", "bfloat16")
        draft.note("translated", "(no --ds.param_dtype)", "dtype: bfloat16, the dialect's default")


def read_adapters(draft: Draft) -> None:
    """Reads LoRA's flags, and 4-bit base weights."""
    rank, alpha, targets, four = (
        draft.take(flag) for flag in ("lora_rank", "lora_alpha", "target_modules", "load_in_4bit")
    )
    dropout = draft.take("lora_dropout")
    if dropout and dropout.first not in ("0", "0.0"):
        draft.note("dropped", dropout, "adapters have no dropout")
    lora: dict[str, Any] = {"rank": max(0, draft.read(rank, whole) or 0), "alpha": 16.0}
    if not lora["rank"]:
        for flag in (alpha, targets, four):
            draft.note("dropped", flag, "it belongs to --lora_rank, which is not above 0")
        return
    draft.note("translated", rank, "lora.rank")
    value = draft.read(alpha, number, "lora.alpha is 16")
    if value is not None:
        lora["alpha"] = value
        draft.note("translated", alpha, "lora.alpha")
    if targets and (names := listed(targets.words)):
        lora["targets"] = "all-linear" if "all-linear" in names else names
        draft.note("translated", targets, "lora.targets")
    put_lora(draft, lora, four)


def put_lora(draft: Draft, lora: dict[str, Any], four: Flag | None) -> None:
    """Sets adapters. `four`: the flag that requests 4-bit base weights."""
    if four:
        lora["quantize"] = "nf4"
        draft.note("translated", four, "lora.quantize: nf4")
        if draft.get("zero_stage") == 3:
            draft.put("zero_stage", 2)
            draft.note("approximated", "--zero_stage 3", "zero_stage: 2, as 4-bit weights cannot be sharded")
    draft.put("lora", lora)


def read_schedule(draft: Draft) -> None:
    """Reads --lr_scheduler."""
    flag = draft.take("lr_scheduler")
    if flag is None:
        return
    if flag.first not in SCHEDULES:
        draft.note("dropped", flag, "the schedule is cosine; others are linear, constant and wsd")
        return
    schedule, ratio = SCHEDULES[flag.first]
    if ratio is not None:
        draft.put("min_lr_ratio", ratio)
    draft.translate(flag, "schedule", schedule)


def read_token_limits(draft: Draft) -> None:
    """Reads the limits of forward passes that are given in tokens instead of rows."""
    dynamic = draft.take("use_dynamic_batch")
    draft.note("translated", dynamic, "micro_train_tokens")
    for name, default in (
        ("train", Flag("(no --train_max_tokens_per_gpu)", ("16192",)) if dynamic else None),
        ("rollout", None),
    ):
        flag = draft.take(f"{name}_max_tokens_per_gpu") or default
        limit = f"micro_{name}_tokens"
        if not dynamic or not draft.has(limit):
            draft.note(
                "dropped",
                flag,
                f"a {draft.kind} stage has no {limit}" if dynamic else "it belongs to --use_dynamic_batch",
            )
        elif value := draft.read(flag, count):
            draft.translate(flag, limit, value)


def read_ppo(draft: Draft) -> None:
    """Reads PPO's lengths, clips, KL, importance weights and offloads."""
    _lengths(draft)
    clips = draft.read(flag := draft.take("eps_clip_low_high"), pair)
    if clips:
        draft.put("eps_clip_low", clips[0])
        draft.put("eps_clip_high", clips[1])
        draft.note("translated", flag, "eps_clip_low and eps_clip_high")
    clips = draft.read(flag := draft.take("reward_clip_range"), pair)
    if clips:
        clip = max(map(abs, clips))
        draft.translate(
            flag, "reward_clip", clip, "" if -clips[0] == clips[1] else f"the same on both sides, {clip:g}"
        )
    flag = draft.take("use_kl_loss")
    if flag:
        draft.translate(flag, "kl_in", "loss")
        if draft.get("kl_estimator") == "k1":
            draft.put("kl_estimator", "k2")
            draft.note("approximated", flag, "kl_estimator: k2, as k1 has no gradient as a loss")
    _importance(draft)
    offload = [flag for flag in (draft.take("ref_offload"), draft.take("reward_offload")) if flag]
    for flag in offload:
        draft.translate(flag, "ref_reward_offload", True, "" if len(offload) == 2 else "both models")


def _lengths(draft: Draft) -> None:
    total = draft.take("max_len")
    given = draft.left.get("generate_max_len")
    if draft.dialect == "flat":
        draft.note("dropped", total, "prompt_max_len and generate_max_len are used")
        return
    shown = total or f"(no --data.max_len, {TOTAL_LENGTH})"
    try:
        longest = count(total.words) if total else TOTAL_LENGTH
        answer = count(given.words) if given else longest // 2
    except ValueError as error:
        draft.note("dropped", total or "--rollout.max_new_tokens", f"{error}; lengths keep their defaults")
        return
    answer = min(answer, max(1, longest - 1))
    draft.translate(draft.take("generate_max_len"), "generate_max_len", answer)
    if not given:
        draft.note("approximated", shown, f"generate_max_len: {answer}, half of the whole length")
    draft.put("prompt_max_len", max(1, longest - answer))
    draft.note(
        "approximated",
        shown,
        f"prompt_max_len: {max(1, longest - answer)}, what the answer leaves of the whole length",
    )


def _importance(draft: Draft) -> None:
    on = draft.take("enable_vllm_is_correction")
    kind = draft.take("is_correction_type")
    threshold = draft.take("is_correction_threshold") or draft.take("vllm_is_truncated_threshold")
    if not on:
        draft.put("sampler_is", "off")
        draft.note(
            "translated", "(no importance weights)", "sampler_is: off; alignflow's own default is truncate"
        )
        for flag in (kind, threshold):
            draft.note("dropped", flag, "importance weights are not switched on")
        return
    values = draft.read(threshold, lambda words: [number((word,)) for word in words])
    if values is None:
        values = [0.5, 5.0] if draft.dialect == "dotted" and not threshold else [2.0]
    filters = kind is not None and kind.first != "tis"
    clamped = len(values) == 2 and 0 < values[0] <= 1 <= values[1]
    how = "weights are clamped, none is filtered out" if filters else ""
    draft.translate(on, "sampler_is", "clamp" if clamped else "truncate", how)
    if clamped:
        draft.put("sampler_is_clamp", values)
    else:
        draft.put("sampler_is_cap", max(values))
    draft.note("approximated" if filters else "translated", kind, f"sampler_is: {draft.get('sampler_is')}")
    draft.note("translated", threshold, f"sampler_is: {draft.get('sampler_is')}")


def put_defaults(draft: Draft) -> None:
    """Sets fields that the script does not set to the dialect's defaults where these differ from ours."""
    changed = DOTTED_DEFAULTS.get(draft.kind, {}) if draft.dialect == "dotted" else {}
    for name, value in (DEFAULTS[draft.kind] | changed).items():
        if name not in draft.fields and draft.default(name) != value:
            draft.put(name, value)
            draft.note("translated", f"(no flag for {name})", f"{name}: {value:g}, the dialect's default")
