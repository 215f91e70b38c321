"""Translates the parts specific to grpo: rewards, objective, rollouts and the GPUs of models and engines."""

from __future__ import annotations

import math
from typing import Any

from rlhf_core.migrate.draft import Draft, Flag
from rlhf_core.migrate.flag_values import Words, count, listed, number, true
from rlhf_core.migrate.script_inputs import Chain, required

# loss_type -> loss_aggregation, and the difference
AGGREGATIONS: dict[str, tuple[str, str]] = {
    "dapo": ("token", ""),
    "bnpo": ("token", "over the tokens of a step, in place of those of a GPU's pass"),
    "grpo": ("sequence", ""),
    "dr_grpo": ("constant", ""),
    "cispo": ("token", ""),
}
# scale_rewards -> advantage_estimator, and the difference
SCALES: dict[str, tuple[str, str]] = {
    "group": ("grpo", ""),
    "true": ("grpo", ""),
    "none": ("dr_grpo", ""),
    "false": ("dr_grpo", ""),
    "batch": (
        "reinforce_pp_baseline",
        "scores less the mean of their group, by the standard deviation of all",
    ),
}
IS_MODES: dict[str, tuple[str, str]] = {  # sampler_is, sampler_is_level
    "token_truncate": ("truncate", "token"),
    "token_mask": ("mask", "token"),
    "sequence_truncate": ("truncate", "sequence"),
    "sequence_mask": ("mask", "sequence"),
}
SMALLEST_WEIGHT = 1e-30  # a lower bound that masks nothing


def read_objective(draft: Draft) -> None:
    """Reads loss_type, scale_rewards and the importance weights."""
    loss = draft.take("loss_type")
    scale = draft.take("scale_rewards")
    chosen = loss.first if loss else "dapo"
    if chosen in AGGREGATIONS:
        aggregation, how = AGGREGATIONS[chosen]
        draft.put("loss_aggregation", aggregation)
        if chosen == "cispo":
            draft.put("policy_loss", "cispo")
        text = f"loss_aggregation: {aggregation}" + (f", {how}" if how else "")
        draft.note("approximated" if how else "translated", loss or "(no --loss_type: dapo)", text)
    else:
        draft.put("loss_aggregation", "token")
        draft.note(
            "dropped", loss, "there is no such loss: the clipped one is used, averaged over all tokens"
        )
    estimator, how = SCALES.get(scale.first.lower() if scale else "group", SCALES["group"])
    draft.put("advantage_estimator", estimator)
    text = f"advantage_estimator: {estimator}" + (f", {how}" if how else "")
    draft.note("approximated" if how else "translated", scale or "(no --scale_rewards: group)", text)
    if "max_prompt_length" not in draft.left:
        text = f"prompt_max_len: {draft.default('prompt_max_len')}; TRL cuts no prompt"
        draft.note("approximated", "(no limit of prompts)", text)
    _read_importance(draft)


def _read_importance(draft: Draft) -> None:
    correction = draft.take("vllm_importance_sampling_correction")
    mode = draft.take("vllm_importance_sampling_mode")
    older_cap = draft.take("vllm_importance_sampling_cap")
    highest = draft.take("vllm_importance_sampling_clip_max") or older_cap
    lowest = draft.take("vllm_importance_sampling_clip_min")
    if correction and not true(correction.words):
        draft.translate(correction, "sampler_is", "off")
        for flag in (mode, highest, lowest):
            draft.note("dropped", flag, "importance weights are switched off")
        return
    kind, level = IS_MODES.get(mode.first if mode else "sequence_mask", IS_MODES["sequence_mask"])
    most = draft.read(highest, number, "3 is used") or 3.0
    least = draft.read(lowest, number, "no lower bound is used") or SMALLEST_WEIGHT
    draft.put("sampler_is", kind)
    draft.put("sampler_is_level", level)
    if kind == "truncate":
        draft.put("sampler_is_cap", most)
        draft.note("dropped", lowest, "truncated weights have no lower bound")
    else:
        draft.put("sampler_is_clamp", [min(1.0, least), max(1.0, most)])
        draft.note("translated", lowest, "sampler_is_clamp")
    draft.note("translated", correction, f"sampler_is: {kind}")
    draft.note(
        "translated",
        mode or "(no --vllm_importance_sampling_mode)",
        f"sampler_is: {kind}, sampler_is_level: {level}",
    )
    draft.note("translated", highest, f"the highest weight is {most:g}")


def read_rewards(draft: Draft, chain: Chain) -> None:
    """Reads reward functions and the reward model. Raises ValueError when there is neither."""
    model = draft.take("reward_model_name_or_path")
    functions = draft.take("reward_funcs")
    weights = draft.take("reward_weights")
    sources: list[dict[str, Any]] = []
    if model and model.words:
        sources.append({"model": chain.reward(model.first)})
        draft.note("translated", model, f"reward: {sources[-1]['model']}")
    for name in listed(functions.words) if functions else ():
        module, _, function = name.rpartition(".")
        if module:
            place = f"{module.replace('.', '/')}.py:{function}"
            text = (
                f"reward: {place}; a function names the arguments it needs, see docs/how-to/rewards.md;"
                " change its signature"
            )
        else:
            place = f"rewards.py:{name}"
            text = (
                f"reward: {place}; TRL's own function is not part of alignflow: write it into rewards.py"
                " (docs/how-to/rewards.md)"
            )
        sources.append({"function": place})
        draft.note("approximated", f"--reward_funcs {name}", text)
    if not sources:
        required(draft, None, "reward (--reward_funcs or --reward_model_name_or_path)")

    def weights_of(words: Words) -> list[float]:
        values = [number((word,)) for word in listed(words)]
        if len(values) != len(sources):
            raise ValueError(f"{len(values)} weights for {len(sources)} rewards")
        return values

    for source, weight in zip(
        sources, draft.read(weights, weights_of, "each reward has weight 1") or (), strict=False
    ):
        source["weight"] = weight
    draft.note("translated", weights if "weight" in sources[0] else None, "weight of each reward")
    short = [next(iter(source.values())) if len(source) == 1 else source for source in sources]
    draft.put("reward", short[0] if len(short) == 1 else short)


def read_placement(draft: Draft, given: tuple[int | None, int | None], gpus: int) -> int:
    """Adds grpo's processes and engines to `left`, as flags of GPU groups. Returns the number of processes
    per node."""
    use = draft.take("use_vllm")
    mode = draft.take("vllm_mode")
    is_apart = use is not None and true(use.words) and mode is not None and mode.first == "server"
    text = "the engines have GPUs of their own" if is_apart else "the engines share the GPUs of the models"
    if use is None or not true(use.words):
        draft.note("approximated", use or "(no --use_vllm)", f"answers are always sampled by vLLM; {text}")
    else:
        draft.note("translated", use, text)
    draft.note("translated", mode, text)
    per_node = given[1] or gpus
    if given[1] is None:
        draft.note(
            "approximated",
            "(all GPUs of the machine)",
            f"{per_node} GPUs on a machine, from --gpus of alignflow migrate",
        )
    draft.left["num_nodes"] = Flag("(the launcher's machines)", (str(given[0] or 1),))
    draft.left["num_gpus_per_node"] = Flag("(the launcher's processes)", (str(per_node),))
    if is_apart:
        draft.left["vllm_num_engines"] = Flag("(--vllm_mode server)", ("1",))
    else:
        draft.left["colocate_all"] = Flag("(--vllm_mode colocate)", ())
        draft.left.setdefault(
            "vllm_gpu_memory_utilization", Flag("(no --vllm_gpu_memory_utilization)", ("0.3",))
        )
    return per_node


def put_rollout(draft: Draft, rows: int, times: int, world: int) -> int:
    """Sets the prompts per iteration from the number of answers that TRL samples at once. Returns TRL's
    optimiser steps per iteration."""
    sampled = draft.take("generation_batch_size")
    per_rollout = draft.take("steps_per_generation")
    group = draft.left.get("num_generations")
    answers_each = draft.read(group, count) or 8
    passes = draft.read(per_rollout, count) or times
    answers = draft.read(sampled, count) or rows * world * passes
    prompts = max(1, math.ceil(answers / answers_each))
    draft.put("rollout_batch_size", prompts)
    text = f"rollout_batch_size: {prompts} prompts = {answers} answers / {answers_each}"
    draft.note("translated", sampled or per_rollout or "(answers of a generation)", text)
    draft.note("translated", per_rollout if sampled else None, text)
    iterations = draft.read(draft.left.get("num_iterations"), count) or 1
    return max(1, answers // (rows * times * world)) * iterations
