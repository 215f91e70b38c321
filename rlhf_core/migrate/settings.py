"""Translates settings of several flags or fields: precision, adapters, schedule, PPO's variants; and sets the dialects' defaults."""

from __future__ import annotations

from typing import Any

from rlhf_core.migrate.draft import Draft, Flag
from rlhf_core.migrate.flags import count, listed, number, pair, whole

# Defaults of the two dialects; those that differ from ours are written to the recipe.
DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "flat": {
        "sft": {"zero_stage": 2, "learning_rate": 1e-5, "max_len": 512},
        "reward_model": {"zero_stage": 2, "learning_rate": 9e-6, "max_len": 512},
        "dpo": {"zero_stage": 2, "learning_rate": 1e-5, "max_len": 512, "beta": 0.1},
        "kto": {"zero_stage": 2, "learning_rate": 1e-5, "max_len": 512, "beta": 0.01},
        "ppo": {"zero_stage": 2, "init_kl_coef": 0.02, "rollout_batch_size": 512, "lambd": 0.95, "value_clip": 0.2},
    },
    "dotted": {
        "sft": {"zero_stage": 2, "learning_rate": 5e-6, "max_len": 2048},
        "reward_model": {"zero_stage": 2, "learning_rate": 9e-6, "max_len": 512},
        "dpo": {"zero_stage": 2, "learning_rate": 1e-5, "max_len": 512, "beta": 0.1},
        "kto": {"zero_stage": 2, "learning_rate": 1e-5, "max_len": 512, "beta": 0.01},
        "ppo": {"zero_stage": 2, "init_kl_coef": 0.01, "rollout_batch_size": 1024, "lambd": 1.0, "value_clip": 0.5},
    },
}
SCHEDULES = {"cosine_with_min_lr": None, "constant": 1.0, "constant_with_warmup": 1.0, "cosine": 0.0}  # min_lr_ratio of our cosine
TOTAL_LENGTH = 2048  # default of --data.max_len in PPO: prompt and answer together


def read_precision(draft: Draft) -> None:
    """Reads --bf16 and --param_dtype."""
    bf16, dtype = draft.take("bf16"), draft.take("param_dtype")
    if bf16:
        draft.translate(bf16, "dtype", "bfloat16")
    if dtype:
        same = dtype.words[:1] in (("bf16",), ("fp32",))
        value = "float32" if dtype.words[:1] == ("fp32",) else "bfloat16"
        draft.translate(dtype, "dtype", value, "" if same else "bfloat16, the only half precision")
    elif not bf16 and draft.dialect == "dotted":
        draft.put("dtype", "bfloat16")
        draft.note("translated", "(no --ds.param_dtype)", "dtype: bfloat16, the dialect's default")


def read_adapters(draft: Draft) -> None:
    """Reads LoRA's flags, and 4-bit base weights."""
    rank, alpha, targets, four = (draft.take(flag) for flag in ("lora_rank", "lora_alpha", "target_modules", "load_in_4bit"))
    if dropout := draft.take("lora_dropout"):
        if dropout.words[:1] not in (("0",), ("0.0",)):
            draft.note("dropped", dropout.shown, "adapters have no dropout")
    used = 0
    if rank:
        try:
            used = max(0, whole(rank.words))
        except ValueError as error:
            draft.note("dropped", rank.shown, str(error))
    if not used:
        for flag in (alpha, targets, four):
            if flag:
                draft.note("dropped", flag.shown, "it belongs to --lora_rank, which is not above 0")
        return
    lora: dict[str, Any] = {"rank": used, "alpha": 16.0}
    draft.note("translated", rank.shown if rank else "", "lora.rank")
    if alpha:
        try:
            lora["alpha"] = number(alpha.words)
            draft.note("translated", alpha.shown, "lora.alpha")
        except ValueError as error:
            draft.note("dropped", alpha.shown, f"{error}; lora.alpha is 16")
    if targets and (names := listed(targets.words)):
        lora["targets"] = "all-linear" if "all-linear" in names else names
        draft.note("translated", targets.shown, "lora.targets")
    if four:
        lora["quantize"] = "nf4"
        draft.note("translated", four.shown, "lora.quantize: nf4")
        if draft.get("zero_stage") == 3:
            draft.put("zero_stage", 2)
            draft.note("approximated", "--zero_stage 3", "zero_stage: 2, as 4-bit weights cannot be sharded")
    draft.put("lora", lora)


def read_schedule(draft: Draft) -> None:
    """Reads --lr_scheduler; ours is a linear warm-up and a cosine to min_lr_ratio."""
    if flag := draft.take("lr_scheduler"):
        name = flag.words[0] if flag.words else ""
        ratio = SCHEDULES.get(name)
        if name not in SCHEDULES:
            draft.note("dropped", flag.shown, "the schedule is a linear warm-up and a cosine")
        elif ratio is None:
            draft.note("translated", flag.shown, "the schedule of every stage")
        else:
            draft.translate(flag, "min_lr_ratio", ratio)


def read_token_limits(draft: Draft) -> None:
    """Reads limits of passes in tokens instead of rows."""
    dynamic = draft.take("use_dynamic_batch")
    limits = {"train_max_tokens_per_gpu": "micro_train_tokens", "rollout_max_tokens_per_gpu": "micro_rollout_tokens"}
    given = {name: draft.take(flag) for flag, name in limits.items()}
    if dynamic:
        draft.note("translated", dynamic.shown, "micro_train_tokens")
        if not given["micro_train_tokens"]:
            given["micro_train_tokens"] = Flag("(no --train_max_tokens_per_gpu)", ("16192",))
    for name, flag in given.items():
        if flag and not dynamic:
            draft.note("dropped", flag.shown, "it belongs to --use_dynamic_batch")
        elif flag and not draft.has(name):
            draft.note("dropped", flag.shown, f"a {draft.kind} stage has no {name}")
        elif flag:
            try:
                draft.translate(flag, name, count(flag.words))
            except ValueError as error:
                draft.note("dropped", flag.shown, str(error))


def read_preference(draft: Draft) -> None:
    """Reads --ipo."""
    if flag := draft.take("ipo"):
        draft.translate(flag, "loss", "ipo")


def read_ppo(draft: Draft) -> None:
    """Reads PPO's lengths, clips, KL, importance weights and offloads."""
    _lengths(draft)
    _try(draft, "eps_clip_low_high", ("eps_clip_low", "eps_clip_high"))
    if flag := draft.take("reward_clip_range"):
        try:
            low, high = pair(flag.words)
            clip = max(abs(low), abs(high))
            draft.translate(flag, "reward_clip", clip, "" if -low == high else f"the same on both sides, {clip:g}")
        except ValueError as error:
            draft.note("dropped", flag.shown, str(error))
    if flag := draft.take("use_kl_loss"):
        draft.translate(flag, "kl_in", "loss")
        if draft.get("kl_estimator") == "k1":
            draft.put("kl_estimator", "k2")
            draft.note("approximated", flag.shown, "kl_estimator: k2, as k1 has no gradient as a loss")
    _importance(draft)
    offload = [flag for flag in (draft.take("ref_offload"), draft.take("reward_offload")) if flag]
    for flag in offload:
        draft.translate(flag, "ref_reward_offload", True, "" if len(offload) == 2 else "both models")


def _lengths(draft: Draft) -> None:
    total = draft.take("max_len")
    if draft.dialect == "flat":
        if total:
            draft.note("dropped", total.shown, "prompt_max_len and generate_max_len are used")
        return
    try:
        longest = count(total.words) if total else TOTAL_LENGTH
        answer = count(draft.left["generate_max_len"].words) if "generate_max_len" in draft.left else longest // 2
    except ValueError as error:
        draft.note("dropped", total.shown if total else "--rollout.max_new_tokens", f"{error}; lengths keep their defaults")
        return
    answer = min(answer, max(1, longest - 1))
    shown = total.shown if total else f"(no --data.max_len, {TOTAL_LENGTH})"
    if "generate_max_len" in draft.left:
        draft.translate(draft.left.pop("generate_max_len"), "generate_max_len", answer)
    else:
        draft.put("generate_max_len", answer)
        draft.note("approximated", shown, f"generate_max_len: {answer}, half of the whole length")
    draft.put("prompt_max_len", max(1, longest - answer))
    draft.note("approximated", shown, f"prompt_max_len: {max(1, longest - answer)}, what the answer leaves of the whole length")


def _importance(draft: Draft) -> None:
    on, kind = draft.take("enable_vllm_is_correction"), draft.take("is_correction_type")
    threshold = draft.take("is_correction_threshold") or draft.take("vllm_is_truncated_threshold")
    if not on:
        draft.put("sampler_is", "off")
        draft.note("translated", "(no importance weights)", "sampler_is: off; alignflow's own default is truncate")
        for flag in (kind, threshold):
            if flag:
                draft.note("dropped", flag.shown, "importance weights are not switched on")
        return
    try:
        values = [number((word,)) for word in threshold.words] if threshold else [2.0] if draft.dialect == "flat" else [0.5, 5.0]
    except ValueError as error:
        values = [2.0]
        draft.note("dropped", threshold.shown if threshold else "", str(error))
    filters = kind is not None and kind.words[:1] != ("tis",)
    how = "weights are clamped, none is filtered out" if filters else ""
    if len(values) == 2 and 0 < values[0] <= 1 <= values[1]:
        draft.translate(on, "sampler_is", "clamp", how)
        draft.put("sampler_is_clamp", values)
    else:
        draft.translate(on, "sampler_is", "truncate", how)
        draft.put("sampler_is_cap", max(values))
    for flag in (kind, threshold):
        if flag:
            draft.note("approximated" if filters and flag is kind else "translated", flag.shown, f"sampler_is: {draft.get('sampler_is')}")


def _try(draft: Draft, flag: str, names: tuple[str, str]) -> None:
    if given := draft.take(flag):
        try:
            for name, value in zip(names, pair(given.words), strict=True):
                draft.put(name, value)
            draft.note("translated", given.shown, " and ".join(names))
        except ValueError as error:
            draft.note("dropped", given.shown, str(error))


def put_defaults(draft: Draft) -> None:
    """Sets the dialect's defaults that differ from ours for fields that the script does not set."""
    for name, value in DEFAULTS[draft.dialect].get(draft.kind, {}).items():
        if name not in draft.fields and draft.default(name) != value:
            draft.put(name, value)
            draft.note("translated", f"(no flag for {name})", f"{name}: {value:g}, the dialect's default")
