"""The old batch-inference loop: one command samples answers, another scores them and makes training data. Together: a preferences stage."""

from __future__ import annotations

from rlhf_core.migrate.draft import Draft, Flag
from rlhf_core.migrate.inputs import Chain, model_of, plain, read_data
from rlhf_core.migrate.values import count

POST_PROCESSORS = {"rs": "rejection_sampling", "csft": "conditional_sft", "iter_dpo": "dpo"}


def task_of(draft: Draft) -> str:
    flag = draft.left.get("eval_task")
    return flag.words[0] if flag and flag.words else ""


def preferences(draft: Draft, scoring: Draft | None, chain: Chain) -> None:
    """Reads a sampling command, and the scoring command that reads its output. ValueError: there is none."""
    if scoring is None:
        raise ValueError(
            f"line {draft.line} of the script: answers are sampled but no command scores them (batch_inference --eval_task rm); "
            "add it to the script, or write a preferences stage by hand"
        )
    draft.take("eval_task")
    flag = draft.take("pretrain")
    if flag is None or not flag.words:
        raise ValueError(f"line {draft.line} of the script: the command names no model (--pretrain); add it")
    scoring.name = draft.name
    model_of(draft, flag, flag.words[0], "policy", chain)
    read_data(draft, chain)
    output = draft.take("output_path")
    reward, processor = scoring.take("pretrain"), scoring.take("post_processor")
    if reward and reward.words:
        draft.put("reward", chain.reward(reward.words[0]))
        scoring.note("translated", reward.shown, f"reward: {chain.reward(reward.words[0])}")
    name = processor.words[0] if processor and processor.words else ""
    if name in POST_PROCESSORS and processor:
        draft.put("post_processor", POST_PROCESSORS[name])
        scoring.note("translated", processor.shown, f"post_processor: {POST_PROCESSORS[name]}")
    elif processor:
        scoring.note("dropped", processor.shown, f"only {', '.join(POST_PROCESSORS)} are known; post_processor keeps its default, dpo")
    best = draft.take("best_of_n")
    _put(draft, best, "n_samples_per_prompt", 1)
    _put(draft, draft.take("rollout_batch_size"), "num_prompts", 2048)
    _put(draft, scoring.take("micro_batch_size") or draft.take("micro_batch_size"), "micro_rollout_batch_size", 8)
    if draft.get("n_samples_per_prompt") < 2 and draft.get("post_processor") != "conditional_sft":
        draft.put("n_samples_per_prompt", 2)
        draft.note("approximated", best.shown if best else "(no --best_of_n)", "n_samples_per_prompt: 2, the fewest that can be compared")
    draft.put("vllm.gpus", 1.0)
    if greedy := draft.take("greedy_sampling"):
        draft.translate(greedy, "temperature", 0.0)
    written = scoring.take("output_path")
    for place in (output, written):
        if place and place.words:
            chain.data[plain(place.words[0])] = draft.name
            draft.note("translated", place.shown, f"the data of stages that name {draft.name}")
    draft.note(
        "approximated", "(the loop around it)", "one round; a stage `iterative_dpo` or `iterative` repeats rounds, see docs/algorithms.md"
    )
    scoring.take("eval_task")
    for name in ("dataset", "dataset_probs"):
        scoring.take(name)


def _put(draft: Draft, flag: Flag | None, name: str, default: int) -> None:
    try:
        if flag:
            draft.translate(flag, name, count(flag.words))
        else:
            draft.put(name, default)
    except ValueError as error:
        draft.put(name, default)
        draft.note("dropped", flag.shown if flag else "", f"{error}; {name} is {default}")
