"""Settings that are more than one flag and one field: precision, adapters, schedule, PPO's variants, GPUs; and sizes that must fit."""

from __future__ import annotations

import math
from typing import Any

from rlhf_core.migrate.draft import Draft, Flag
from rlhf_core.migrate.values import count, listed, number, pair, whole

# Defaults of the two dialects where they may differ from ours; a field is only written when it does.
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
GROUPS = {"actor": "actor_ranks", "critic": "critic_ranks", "ref": "reference_ranks", "reward": "reward_ranks"}
TOTAL_LENGTH = 2048  # default of --data.max_len in PPO: prompt and answer together


def read_precision(draft: Draft) -> None:
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
    """LoRA, and 4-bit weights below it."""
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
    """Passes by tokens instead of rows."""
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
    if flag := draft.take("ipo"):
        draft.translate(flag, "loss", "ipo")


def read_ppo(draft: Draft) -> None:
    """Lengths, clips, KL, importance weights."""
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
        if draft.has("ref_reward_offload"):
            draft.translate(flag, "ref_reward_offload", True, "" if len(offload) == 2 else "both models")
        else:
            draft.note("dropped", flag.shown, "a ppo stage has no ref_reward_offload")


def _lengths(draft: Draft) -> None:
    total = draft.take("max_len")
    if draft.dialect == "flat":
        if total:
            draft.note("dropped", total.shown, "prompt_max_len and generate_max_len count")
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


def read_groups(draft: Draft) -> None:
    """PPO's GPU groups. `--num_nodes` and `--num_gpus_per_node` are one group for everything; models that share cards get equal groups."""
    nodes, per_node = _count(draft, "num_nodes"), _count(draft, "num_gpus_per_node")
    sources = draft.fields.get("reward")
    scored = any(not str(s).startswith("http") and ".py:" not in str(s) for s in (sources if isinstance(sources, list) else [sources]))
    here = [role for role in GROUPS if (role != "critic" or draft.get("advantage_estimator") == "gae") and (role != "reward" or scored)]
    sizes: dict[str, tuple[int, int]] = {}
    leader = _leaders(draft, here)
    for role in GROUPS:
        given = (_count(draft, f"{role}_num_nodes"), _count(draft, f"{role}_num_gpus_per_node"))
        if role not in here:
            continue
        size = (given[0] or nodes or 1, given[1] or per_node or 8)
        if role in leader and size != sizes[leader[role]]:
            size = sizes[leader[role]]
            if any(given):
                told = f"{GROUPS[role]}: {size[0]} x {size[1]}, the size of the {leader[role]}'s group, whose cards it shares"
                draft.note("approximated", f"--{role}_num_nodes, --{role}_num_gpus_per_node", told)
        sizes[role] = size
        draft.put(GROUPS[role], {"num_nodes": size[0], "num_ranks_per_node": size[1], "gpus": 1.0})
    one = nodes is not None or per_node is not None
    if one and not draft.has("colocate_all"):
        draft.note("approximated", "--num_nodes, --num_gpus_per_node", "every model has a group of this size of its own: make them smaller")
    shared = "colocate_all" in draft.left and draft.has("colocate_all")
    _engines(draft, math.prod(sizes["actor"]), shared, one)


def _leaders(draft: Draft, here: list[str]) -> dict[str, str]:
    """The roles that share another role's cards, and whose."""
    if "colocate_critic_reward" in draft.left and not {"critic", "reward"} <= set(here):
        draft.note("dropped", draft.left.pop("colocate_critic_reward").shown, "there is no critic, or no reward model")
    if "colocate_all" in draft.left and draft.has("colocate_all"):
        for flag in ("colocate_actor_ref", "colocate_critic_reward"):
            if given := draft.take(flag):
                draft.note("translated", given.shown, "part of colocate_all")
        return dict.fromkeys(here[1:], "actor")
    pairs = {"colocate_actor_ref": ("ref", "actor"), "colocate_critic_reward": ("reward", "critic")}
    return {role: leader for flag, (role, leader) in pairs.items() if flag in draft.left and draft.has(flag)}


def _engines(draft: Draft, gpus: int, shared: bool, one_group: bool) -> None:
    """vLLM's engines; where they share the models' cards there is one on each card, or on each `tensor_parallel_size` of them."""
    parallel, given = 1, draft.left.get("vllm_tensor_parallel_size")
    if given and draft.has("vllm.tensor_parallel_size"):
        parallel = max(1, _whole_or(given, 1))
    elif given and _whole_or(given, 0) == 1:
        draft.note("translated", draft.left.pop("vllm_tensor_parallel_size").shown, "vllm.gpus: 1")
    draft.put("vllm.gpus", 1.0)
    wanted = _whole_or(draft.left["vllm_num_engines"], 0) if "vllm_num_engines" in draft.left else None
    if wanted and not (shared and wanted * parallel != gpus):
        return
    flag = draft.take("vllm_num_engines")
    if shared or (one_group and wanted is None):
        engines = max(1, gpus // parallel)
        draft.put("vllm.num_engines", engines)
        told = f"vllm.num_engines: {engines}, as many as fit on the models' cards"
        draft.note("approximated" if flag else "translated", flag.shown if flag else "(no --vllm_num_engines)", told)
    else:
        shown = flag.shown if flag else "(no --vllm_num_engines)"
        draft.note("approximated", shown, "vllm.num_engines: 1, as sampling is always by vLLM; give it as many GPUs as there are")


def _whole_or(flag: Flag, other: int) -> int:
    try:
        return whole(flag.words)
    except ValueError:
        return other


def _count(draft: Draft, name: str) -> int | None:
    flag = draft.take(name)
    if flag is None:
        return None
    value = _whole_or(flag, 0)
    if value < 1:
        draft.note("dropped", flag.shown, "this is not a number of machines or GPUs above 0; the default counts")
        return None
    draft.note(
        "translated", flag.shown, "ranks of the stage" if draft.kind != "ppo" else GROUPS.get(name.partition("_num_")[0], "all groups")
    )
    return value


def read_ranks(draft: Draft, told: tuple[int | None, int | None], gpus: int) -> None:
    """The ranks of a stage that torchrun or deepspeed starts."""
    nodes, per_node = told[0] or 1, told[1] or gpus
    draft.put("ranks", {"num_nodes": nodes, "num_ranks_per_node": per_node, "gpus": 1.0})
    if told[1] is None:
        draft.note("approximated", "(all GPUs of the machine)", f"ranks: {per_node} GPUs on a machine, from --gpus of alignflow migrate")
    else:
        draft.note("translated", "(the launcher's processes)", f"ranks: {nodes} x {per_node}")


def put_defaults(draft: Draft) -> None:
    """The dialect's own defaults, where the script is silent and ours are others."""
    for name, value in DEFAULTS[draft.dialect].get(draft.kind, {}).items():
        if name not in draft.fields and draft.default(name) != value:
            draft.put(name, value)
            draft.note("translated", f"(no flag for {name})", f"{name}: {value:g}, the dialect's default")


def fit(draft: Draft) -> None:
    """Makes zero_stage and batch sizes fit the ranks, as a recipe demands."""
    names = ("actor_ranks", "critic_ranks") if draft.kind == "ppo" else ("ranks",)
    worlds = [r["num_nodes"] * r["num_ranks_per_node"] for r in (draft.fields.get(name) for name in names) if r]
    world = math.lcm(*worlds) if worlds else 1
    if draft.get("zero_stage") == 0 and (world > 1 or draft.kind == "ppo"):
        draft.put("zero_stage", 1)
        draft.note("approximated", "--zero_stage 0", "zero_stage: 1, the same on several ranks with the optimiser's state shared out")
    batch, micro = draft.get("train_batch_size"), draft.get("micro_train_batch_size")
    samples = draft.get("rollout_batch_size") * draft.get("n_samples_per_prompt") if draft.kind == "ppo" else 0
    fitting = batch if not batch % world else -(-batch // world) * world
    if samples and samples % fitting:
        divisors = [size for size in range(world, fitting + 1, world) if samples % size == 0]
        if divisors:
            fitting = divisors[-1]
        else:
            prompts = math.lcm(fitting, draft.get("n_samples_per_prompt")) // draft.get("n_samples_per_prompt")
            prompts = -(-draft.get("rollout_batch_size") // prompts) * prompts
            draft.put("rollout_batch_size", prompts)
            draft.note("approximated", "--rollout_batch_size", f"rollout_batch_size: {prompts}, a whole number of optimiser steps")
    if fitting != batch:
        draft.put("train_batch_size", fitting)
        draft.note("approximated", "--train_batch_size", f"train_batch_size: {fitting}, which {world} ranks share evenly")
    if fitting % (micro * world):
        micro = next(size for size in range(min(micro, fitting // world), 0, -1) if fitting % (size * world) == 0)
        draft.put("micro_train_batch_size", micro)
        draft.note("approximated", "--micro_train_batch_size", f"micro_train_batch_size: {micro}, so that {world} ranks make whole passes")
