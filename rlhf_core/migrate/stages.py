"""Translates the launches of a script to the stages of a recipe, linked where one reads another's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_core.migrate.draft import Draft, Flag, Note, draft_of
from rlhf_core.migrate.groups import fit, read_async, read_groups, read_ranks
from rlhf_core.migrate.inputs import Chain, model_of, plain, read_data, read_models, required
from rlhf_core.migrate.launches import Launch
from rlhf_core.migrate.settings import (
    put_defaults,
    read_adapters,
    read_ppo,
    read_precision,
    read_schedule,
    read_token_limits,
)
from rlhf_core.migrate.values import count, off_or_number, one_of


class Stages(NamedTuple):
    """A recipe's content besides its name: `base_model`, `stages` and, when the script sets it, `seed`; and the notes about all flags."""

    raw: dict[str, Any]
    notes: list[Note]


def stages_of(launches: Sequence[Launch], gpus: int) -> Stages:
    """Translates launches, in order. `gpus`: GPUs of one machine, for launchers that take all.

    Raises ValueError when a command has no model, data or reward.
    """
    chain, notes, seeds = Chain(), list[Note](), list[int]()
    stages: dict[str, dict[str, Any]] = {}
    scorings = [draft for launch in launches if task_of(draft := draft_of(launch, "", "preferences")) == "rm"]
    for launch in launches:
        if launch.kind == "batch_inference":
            draft = draft_of(launch, _name("preferences", stages), "preferences")
            if task_of(draft) == "rm":
                continue
            notes += _read_sampling(draft, scorings, chain)
        else:
            draft = draft_of(launch, _name(launch.kind, stages))
            _read_training(draft, launch, chain, gpus)
        _read_seed(draft, seeds)
        draft.drop_rest()
        notes += draft.notes
        stages[draft.name] = draft.fields if draft.name == draft.kind else {"stage": draft.kind, **draft.fields}
    for scoring in scorings:
        scoring.note("dropped", "--eval_task rm", "it scores answers that no command of the script samples")
        notes += scoring.notes
    return Stages({"base_model": chain.base, **({"seed": seeds[0]} if seeds else {}), "stages": stages}, notes)


def _name(kind: str, stages: dict[str, Any]) -> str:
    same = sum(name == kind or name.startswith(f"{kind}-") for name in stages)
    return kind if not same else f"{kind}-{same + 1}"


def _read_training(draft: Draft, launch: Launch, chain: Chain, gpus: int) -> None:
    """Reads a training command. The order matters: rewards need the estimator, groups the rewards, adapters zero_stage, sizes the ranks."""
    output = draft.take("save_path")
    read_precision(draft)
    read_schedule(draft)
    read_token_limits(draft)
    if draft.kind == "ppo":
        draft.read_fields(("advantage_estimator", "freezing_actor_steps", "kl_estimator"))
        read_ppo(draft)
    elif flag := draft.take("ipo"):
        draft.translate(flag, "loss", "ipo")
    read_models(draft, chain)
    read_data(draft, chain)
    if draft.kind == "ppo":
        read_groups(draft)
    else:
        read_ranks(draft, launch.gpus, gpus)
    draft.read_fields()
    if draft.kind == "ppo":
        read_async(draft)
    put_defaults(draft)
    read_adapters(draft)
    fit(draft)
    if output and output.words:
        chain.models[plain(output.first)] = draft.name
        text = f"the model is in the run directory of stage {draft.name}; a `publication` stage copies it"
        draft.note("approximated", output, text)


def _read_seed(draft: Draft, seeds: list[int]) -> None:
    value = draft.read(seed := draft.take("seed"), off_or_number)
    if value is not None:
        seeds.append(value)
        same = value == seeds[0]
        text = "seed of the recipe" if same else f"a recipe has one seed: {seeds[0]}"
        draft.note("translated" if same else "approximated", seed, text)


POST_PROCESSORS = {"rs": "rejection_sampling", "csft": "conditional_sft", "iter_dpo": "dpo"}


def task_of(draft: Draft) -> str:
    """Returns the value of --eval_task, or ''."""
    flag = draft.left.get("eval_task")
    return flag.first if flag else ""


def _read_sampling(draft: Draft, scorings: list[Draft], chain: Chain) -> list[Note]:
    """Reads a sampling command, and the scoring command that reads its output, which is removed from `scorings`.

    Returns the notes about the scoring command. Raises ValueError when there is no scoring command, model or data.
    """
    output = draft.take("output_path")
    place = plain(output.first) if output else ""
    scoring = next((s for s in scorings if (data := s.left.get("dataset")) and data.words and plain(data.first) == place), None)
    if scoring is None:
        raise ValueError(
            f"line {draft.line} of the script: answers are sampled but no command scores them (batch_inference --eval_task rm); "
            "add it to the script, or write a preferences stage by hand"
        )
    scorings.remove(scoring)
    scoring.name = draft.name
    model_of(draft, required(draft, draft.take("pretrain"), "model (--pretrain)"), "policy", chain)
    read_data(draft, chain)
    reward, processor = scoring.take("pretrain"), scoring.take("post_processor")
    if reward and reward.words:
        draft.put("reward", chain.reward(reward.first))
        scoring.note("translated", reward, f"reward: {draft.get('reward')}")
    if name := scoring.read(processor, one_of(**POST_PROCESSORS), "post_processor keeps its default, dpo"):
        draft.put("post_processor", name)
        scoring.note("translated", processor, f"post_processor: {name}")
    best = draft.take("best_of_n")
    _put(draft, best, "n_samples_per_prompt", 1)
    _put(draft, draft.take("rollout_batch_size"), "num_prompts", 2048)
    _put(draft, scoring.take("micro_batch_size") or draft.take("micro_batch_size"), "micro_rollout_batch_size", 8)
    if draft.get("n_samples_per_prompt") < 2 and draft.get("post_processor") != "conditional_sft":
        draft.put("n_samples_per_prompt", 2)
        draft.note("approximated", best or "(no --best_of_n)", "n_samples_per_prompt: 2, the fewest that can be compared")
    draft.put("vllm.gpus", 1.0)
    if greedy := draft.take("greedy_sampling"):
        draft.translate(greedy, "temperature", 0.0)
    for written in (output, scoring.take("output_path")):
        if written and written.words:
            chain.data[plain(written.first)] = draft.name
            draft.note("translated", written, f"the data of stages that name {draft.name}")
    text = "one round; a stage `iterative_dpo` or `iterative` repeats rounds, see docs/reference/algorithms.md"
    draft.note("approximated", "(the loop around it)", text)
    draft.read_fields()
    for unused in ("eval_task", "dataset", "dataset_probs"):
        scoring.take(unused)
    draft.take("eval_task")
    scoring.drop_rest()
    return scoring.notes


def _put(draft: Draft, flag: Flag | None, name: str, default: int) -> None:
    value = draft.read(flag, count, f"{name} is {default}")
    draft.translate(flag if value else None, name, value or default)
