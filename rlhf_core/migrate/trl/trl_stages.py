"""Translates a TRL command to a stage: model, loss, batches, schedule, precision and adapters. `trl_data.py`
reads the data, and `trl_sampling.py` the parts specific to grpo."""

from __future__ import annotations

import json
import math
from typing import Any

from rlhf_core.migrate.draft import Draft, Flag
from rlhf_core.migrate.flag_values import count, number, true, whole
from rlhf_core.migrate.groups import fit, read_groups, read_ranks
from rlhf_core.migrate.launches import Launch
from rlhf_core.migrate.script_inputs import MODEL_FIELD, Chain, model_of, plain, required
from rlhf_core.migrate.settings import put_lora
from rlhf_core.migrate.trl.options import COMMON, COMMON_DEFAULTS, DEFAULTS, DROPPED, OWN
from rlhf_core.migrate.trl.trl_data import read_data
from rlhf_core.migrate.trl.trl_sampling import put_rollout, read_objective, read_placement, read_rewards

# lr_scheduler_type -> our schedule; decaying ones end at 0
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
SEED = 42
PEFT_TARGETS = ["q_proj", "v_proj"]


def read_trl(draft: Draft, launch: Launch, chain: Chain, gpus: int) -> None:
    """Reads a TRL command. `gpus`: number of GPUs of one machine, for launchers that use all of them. Raises
    ValueError if there is no model, data or reward."""
    _turn_off(draft)
    output = draft.take("output_dir")
    _read_model(draft, chain)
    read_data(draft)
    if draft.kind == "ppo":
        read_objective(draft)
        read_rewards(draft, chain)
        per_node = read_placement(draft, launch.gpus, gpus)
        read_groups(draft)
        draft.read_fields(("colocate_all", "vllm_num_engines", "vllm_tensor_parallel_size"))
        world = (launch.gpus[0] or 1) * per_node
    else:
        _read_loss(draft)
        read_ranks(draft, launch.gpus, gpus)
        on_cpus = draft.take("use_cpu")
        if on_cpus and true(on_cpus.words):
            draft.translate(on_cpus, "ranks.gpus", 0.0)
        world = (launch.gpus[0] or 1) * (launch.gpus[1] or gpus)
    _read_batches(draft, world)
    _read_schedule(draft)
    _read_precision(draft)
    _read_adapters(draft)
    draft.read_fields(tuple(draft.left), COMMON | OWN[draft.kind])
    _put_defaults(draft)
    fit(draft)
    draft.left.setdefault("seed", Flag("(no --seed)", (str(SEED),)))
    if output and output.words:
        chain.models[plain(output.first)] = draft.name
        text = f"the model is in the run directory of stage {draft.name}; a `publication` stage copies it"
        draft.note("approximated", output, text)


def reason_of(name: str) -> str:
    """Returns the reason why an option without a counterpart is left out."""
    if name in DROPPED:
        return DROPPED[name]
    if name.startswith("hub_"):
        return DROPPED["push_to_hub"]
    if name.startswith(("dataloader_", "ddp_", "torch_compile", "logging_", "log_", "save_")):
        return DROPPED["dataloader_num_workers"]
    return "unknown option: check whether a field of docs/reference/config.md means the same"


def _turn_off(draft: Draft) -> None:
    """Converts options like `--no_packing` to `--packing False`, and leaves out options that are None."""
    for name in list(draft.left):
        flag = draft.left[name]
        if flag.words == ("None",):
            draft.note("translated", draft.take(name), "TRL's default")
        elif name.startswith("no_") and not flag.words:
            del draft.left[name]
            draft.left[name.removeprefix("no_")] = Flag(flag.shown, ("False",))


def _read_model(draft: Draft, chain: Chain) -> None:
    flag = required(draft, draft.take("model_name_or_path"), "model (--model_name_or_path)")
    model_of(draft, flag, MODEL_FIELD[draft.kind], chain)


def _read_loss(draft: Draft) -> None:
    """Reads loss_type for SFT, DPO and KTO."""
    flag = draft.take("loss_type")
    weights = draft.take("loss_weights")
    names = [name for word in flag.words for name in word.split(",")] if flag else []
    if draft.kind != "dpo":
        known = {"sft": ["nll"], "kto": ["kto"]}.get(draft.kind, [])
        if flag and names != known:
            draft.note("dropped", flag, f"there is no such loss of a {draft.kind} stage, whose own is used")
        else:
            draft.note("translated", flag, "the loss of the stage")
        draft.note("dropped", weights, "the stage has one loss")
        return
    values = draft.read(weights, lambda words: [number((word,)) for word in words]) or [1.0] * len(names)
    terms = dict(zip(names, values, strict=False))
    likelihood = terms.pop("sft", None)
    if flag is None or set(terms) <= {"sigmoid"}:
        draft.note("translated", flag, "loss: sigmoid")
    elif set(terms) == {"ipo"}:
        draft.translate(flag, "loss", "ipo")
    else:
        draft.note(
            "dropped", flag, "there is no such loss: sigmoid is used, choose one of loss of a dpo stage"
        )
    if likelihood is not None:
        draft.put("nll_coef", likelihood)
        draft.note(
            "approximated", "--loss_type sft", f"nll_coef: {likelihood:g}, the mean over the tokens of a step"
        )
    main = next(iter(terms.values()), 1.0)
    draft.note(
        "translated" if main == 1 else "approximated",
        weights,
        "nll_coef; the weight of the preference loss is 1",
    )


def _read_batches(draft: Draft, world: int) -> None:
    """Reads rows per step and the number of steps."""
    per_device = draft.take("per_device_train_batch_size")
    accumulation = draft.take("gradient_accumulation_steps")
    rows = draft.read(per_device, count, "8 is used") or 8
    times = draft.read(accumulation, count, "1 is used") or 1
    batch = rows * times * world
    draft.put("train_batch_size", batch)
    draft.put("micro_train_batch_size", rows)
    shown = f"train_batch_size: {batch} = {rows} rows x {times} passes x {world} GPUs"
    draft.note(
        "translated",
        per_device or "(no --per_device_train_batch_size)",
        f"micro_train_batch_size: {rows}; {shown}",
    )
    draft.note("translated", accumulation, shown)
    per_rollout = put_rollout(draft, rows, times, world) if draft.kind == "ppo" else 1
    epochs = draft.take("num_train_epochs")
    steps = draft.take("max_steps")
    passes = draft.read(epochs, number, "3 is used")
    passes = 3.0 if passes is None else passes
    limit = draft.read(steps, whole) or 0
    field = "num_episodes" if draft.kind == "ppo" else "max_epochs"
    if limit <= 0:
        draft.put(field, max(1, math.ceil(passes)))
        whole_passes = passes == int(passes)
        draft.note(
            "translated" if whole_passes else "approximated",
            epochs or "(no --num_train_epochs)",
            f"{field}: {math.ceil(passes)}",
        )
        draft.note("translated", steps, "no limit")
        return
    draft.note("dropped", epochs, "--max_steps is used")
    if draft.kind == "ppo":
        iterations = max(1, limit // per_rollout)
        draft.put("num_episodes", max(1, math.ceil(passes)))
        draft.put("max_steps", iterations)
        text = f"max_steps: {iterations} iterations; raise num_episodes if the prompts are too few for them"
        draft.note("approximated", steps, text)
    else:
        draft.fields["data"]["max_samples"] = limit * batch
        text = (
            f"max_samples: {limit * batch} of the data, {limit} steps in one epoch; with fewer rows raise"
            " max_epochs"
        )
        draft.note("approximated", steps, text)


def _read_schedule(draft: Draft) -> None:
    name = draft.take("lr_scheduler_type")
    extra = draft.take("lr_scheduler_kwargs")
    warmup = draft.take("warmup_steps")
    chosen = name.first if name else "linear"
    shown: Flag | str = name or "(no --lr_scheduler_type: linear)"
    if chosen in SCHEDULES:
        draft.put("schedule", SCHEDULES[chosen])
        if chosen in ("linear", "cosine"):
            draft.put("min_lr_ratio", 0.0)
        draft.note("translated", shown, f"schedule: {SCHEDULES[chosen]}")
    elif chosen == "cosine_with_min_lr" and (ratio_given := _min_lr_ratio(extra)) is not None:
        draft.put("min_lr_ratio", ratio_given)
        draft.note("translated", shown, f"min_lr_ratio: {ratio_given:g}")
        draft.note("translated", extra, f"min_lr_ratio: {ratio_given:g}")
        extra = None
    else:
        draft.note("dropped", shown, "the schedule is cosine; others are linear, constant and wsd")
    draft.note("dropped", extra, "the schedule has min_lr_ratio and decay_ratio")
    _read_warmup(draft, warmup)


def _read_warmup(draft: Draft, warmup: Flag | None) -> None:
    """Reads warmup_steps, which is a number of steps or, below 1, a fraction of all steps. If it is above 0,
    warmup_ratio has no effect."""
    value = draft.read(warmup, number)
    if value is None:
        return
    if value > 0:
        draft.note("dropped", draft.take("warmup_ratio"), "--warmup_steps is used")
    elif "warmup_ratio" in draft.left:
        draft.note("translated", warmup, "--warmup_ratio is used")
        return
    if value < 1:
        draft.translate(warmup, "warmup_ratio", value)
    else:
        draft.translate(warmup, "warmup_steps", int(value))


def _min_lr_ratio(extra: Flag | None) -> float | None:
    try:
        options = json.loads(" ".join(extra.words).replace("'", '"')) if extra else {}
        return float(options["min_lr_rate"])
    except (ValueError, KeyError, TypeError):
        return None


def _read_precision(draft: Draft) -> None:
    """Reads bf16, fp16 and dtype. TRL computes in bfloat16 unless the command says otherwise."""
    bf16 = draft.take("bf16")
    fp16 = draft.take("fp16")
    stored = draft.take("dtype") or draft.take("torch_dtype")
    is_half = (bf16 is None or true(bf16.words)) or (fp16 is not None and true(fp16.words))
    half_weights = stored is not None and stored.first in ("bfloat16", "float16", "auto")
    dtype = "bfloat16" if is_half or half_weights else "float32"
    draft.put("dtype", dtype)
    how = (
        ""
        if half_weights or dtype == "float32"
        else ", of weights too, whose optimiser keeps them in float32"
    )
    draft.note("approximated" if how else "translated", bf16 or "(no --bf16)", f"dtype: {dtype}{how}")
    draft.note("approximated", fp16, f"dtype: {dtype}, which needs no loss scale")
    draft.note("translated", stored, f"dtype: {dtype}")


def _read_adapters(draft: Draft) -> None:
    """Reads LoRA's options, which apply only with --use_peft, and 4-bit base weights."""
    use = draft.take("use_peft")
    rank, alpha, targets, four = (
        draft.take(name) for name in ("lora_r", "lora_alpha", "lora_target_modules", "load_in_4bit")
    )
    if use is None or not true(use.words):
        for flag in (use, rank, alpha, targets, four):
            draft.note("dropped", flag, "adapters are trained with --use_peft alone")
        return
    lora: dict[str, Any] = {
        "rank": draft.read(rank, count, "16 is used") or 16,
        "alpha": draft.read(alpha, number, "32 is used") or 32.0,
    }
    draft.note("translated", use, "lora")
    draft.note("translated", rank, "lora.rank")
    draft.note("translated", alpha, "lora.alpha")
    names = [name for word in targets.words for name in word.split(",") if name] if targets else PEFT_TARGETS
    lora["targets"] = "all-linear" if "all-linear" in names else names
    if targets:
        draft.note("translated", targets, "lora.targets")
    else:
        draft.note(
            "approximated",
            "(no --lora_target_modules)",
            f"lora.targets: {', '.join(names)}, PEFT's choice for most families",
        )
    put_lora(draft, lora, four if four and true(four.words) else None)


def _put_defaults(draft: Draft) -> None:
    """Sets AdamW's betas, and sets fields that the command does not set to TRL's defaults where these differ
    from ours."""
    first = draft.take("adam_beta1")
    second = draft.take("adam_beta2")
    betas = [draft.read(first, number) or 0.9, draft.read(second, number) or 0.999]
    draft.put("betas", betas)
    draft.note(
        "translated",
        "(AdamW's betas)" if not first and not second else first,
        f"betas: {betas[0]:g}, {betas[1]:g}",
    )
    draft.note("translated", second, f"betas: {betas[0]:g}, {betas[1]:g}")
    optimiser = draft.take("optim")
    if optimiser and not optimiser.first.startswith("adamw"):
        draft.note("dropped", optimiser, "the optimiser is AdamW")
    else:
        draft.note("translated", optimiser, "the optimiser is AdamW")
    defaults = COMMON_DEFAULTS | DEFAULTS[draft.kind]
    if "warmup_steps" in draft.fields:
        defaults = {name: value for name, value in defaults.items() if name != "warmup_ratio"}
    for name, value in defaults.items():
        if name not in draft.fields and draft.default(name) != value:
            draft.put(name, value)
            shown = (
                f"{value:g}"
                if isinstance(value, float | int) and not isinstance(value, bool)
                else str(value).lower()
            )
            draft.note("translated", f"(no option for {name})", f"{name}: {shown}, TRL's default")
