"""Expands a recipe's loops, publications and evaluations into single stages. Torch-free, offline.

An `iterative_dpo` stage X becomes X.round1.preferences, X.round1.dpo, X.round2.preferences, ...; X.round1 is the name of that round's
model and X of the last round's. An evaluation that names X judges the model of every round; a gate of it that names X checks the last
one. An `iterative` stage does the same with the training stage of its post-processor: X.round1.kto, X.round1.sft.
A publication P of X with `round_branch` also becomes P.round1, P.round2, ...; each depends on its round alone. P.iteration10 is the
name of the actor of a `ppo` stage P after iteration 10.

A stage S with `sweep: {beta: [0.1, 0.3]}` becomes S.beta=0.1 and S.beta=0.3. An evaluation or a select stage that names S means all of
them; no other stage may name S.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from rlhf_core.config import (
    DPO,
    KTO,
    PPO,
    SFT,
    Evaluation,
    Gate,
    IterativeFeedback,
    Loop,
    Optimised,
    Preferences,
    Publication,
    Recipe,
    SampledLoop,
    Select,
    StageConfig,
)
from rlhf_core.config.kinds import KINDS, has_metric
from rlhf_core.config.sweep import variants
from rlhf_core.recipe.sentences import unknown


class Expanded(NamedTuple):
    """The stages by name. `aliases` maps names of loops, rounds and iterations to the stage that makes their model; `rounds` maps a loop
    to the names of its rounds, `variants` a swept stage to those of its variants."""

    stages: dict[str, StageConfig]
    aliases: dict[str, str]
    rounds: dict[str, tuple[str, ...]]
    variants: dict[str, tuple[str, ...]]


def expand(recipe: Recipe, refused: Collection[str] = ()) -> Expanded:
    """Returns the single stages of a recipe. `refused`: rounds (LOOP.roundK) that are left out: later rounds start from the one before.

    Raises ValueError when `parents` of an evaluation names a model that it does not judge.
    """
    expanded = _without_loops(recipe, refused)
    for name, config in expanded.stages.items():
        if isinstance(config, Select):
            models = tuple(model for named in config.of for model in expanded.variants.get(named, (named,)))
            expanded.stages[name] = config.model_copy(update={"of": models, "simplest": config.simplest or models[0]})
    for name, config in expanded.stages.items():
        if isinstance(config, Evaluation):
            expanded.stages[name] = _judging(name, config, expanded)
    return expanded


def _without_loops(recipe: Recipe, refused: Collection[str]) -> Expanded:
    stages: dict[str, StageConfig] = {}
    aliases: dict[str, str] = {}
    rounds: dict[str, tuple[str, ...]] = {}
    swept: dict[str, tuple[str, ...]] = {}
    for name, config in recipe.stages.items():
        if isinstance(config, Optimised) and config.sweep and not isinstance(config, Loop):
            found = {f"{name}.{suffix}": variant for suffix, variant in variants(config, config.sweep).items()}
            swept[name] = tuple(found)
            stages |= found
            exported = config.export_at if isinstance(config, PPO) else ()
            aliases |= {f"{variant}.iteration{n}": variant for variant in found for n in exported}
            continue
        if not isinstance(config, Loop):
            stages[name] = config.model_copy(update={"round_branch": None}) if isinstance(config, Publication) else config
            aliases |= {f"{name}.iteration{n}": name for n in config.export_at} if isinstance(config, PPO) else {}
            continue
        titles = [(k, f"{name}.round{k + 1}") for k in range(config.rounds)]
        titles = [(k, title) for k, title in titles if title not in refused]
        rounds[name] = tuple(title for _, title in titles)
        policy = config.policy
        for k, title in titles:
            if isinstance(config, IterativeFeedback):
                on_feedback = _on_feedback(config, policy)
                aliases[title] = policy = f"{title}.{on_feedback.stage}"
                stages[policy] = on_feedback.model_copy(update={"gates": config.gates})
                stages |= _publications_of_round(recipe, name, k + 1)
                continue
            assert isinstance(config, SampledLoop)
            slice_of_prompts = {"first_prompt": k * config.prompts_per_round, "num_prompts": config.prompts_per_round}
            sampling = Preferences(**_shared(config, Preferences), policy=policy, **slice_of_prompts)
            training = _training(config, policy, f"{title}.preferences")
            ours = tuple(gate for gate in config.gates if gate.approve or has_metric(training, gate.metric))
            theirs = tuple(gate for gate in config.gates if gate not in ours and has_metric(sampling, gate.metric))
            stages[f"{title}.preferences"] = sampling.model_copy(update={"gates": theirs})
            aliases[title] = policy = f"{title}.{training.stage}"
            stages[policy] = training.model_copy(update={"gates": ours})
            stages |= _publications_of_round(recipe, name, k + 1)
        aliases[name] = policy
    return Expanded(stages, aliases, rounds, swept)


def _publications_of_round(recipe: Recipe, loop: str, number: int) -> dict[str, StageConfig]:
    """Returns the publications of one round of a loop, each on the branch of that round."""
    found: dict[str, StageConfig] = {}
    for name, config in recipe.stages.items():
        if isinstance(config, Publication) and config.round_branch and config.model == loop:
            place: dict[str, Any] = {"model": f"{loop}.round{number}", "branch": config.round_branch.format(number), "round_branch": None}
            place["champion"] = False
            found[f"{name}.round{number}"] = config.model_copy(update=place)
    return found


def _on_feedback(loop: IterativeFeedback, policy: str) -> DPO | KTO:
    kind = DPO if loop.method == "dpo" else KTO
    return kind(**_shared(loop, kind), policy=policy, data=loop.feedback)


def _training(loop: SampledLoop, policy: str, answers: str) -> DPO | KTO | SFT:
    """Returns the stage that trains `policy` on the output of the round's preferences stage, `answers`."""
    template = loop.prompts.template
    loop = loop.model_copy(update={"max_len": loop.max_len or loop.prompt_max_len + loop.generate_max_len})
    if loop.post_processor == "dpo":
        return DPO(**_shared(loop, DPO), policy=policy, pairs=answers, template=template)
    if loop.post_processor == "kto":
        return KTO(**_shared(loop, KTO), policy=policy, answers=answers, template=template)
    condition = "reward" if loop.post_processor == "conditional_sft" else "none"
    return SFT(**_shared(loop, SFT), model=policy, answers=answers, template=template, condition=condition)


def _judging(name: str, config: Evaluation, expanded: Expanded) -> Evaluation:
    """Returns the evaluation with each loop replaced by its rounds, and with the model that each judged model was trained from."""
    stages, aliases, rounds, swept = expanded
    judged = [model for named in config.models for model in (rounds | swept).get(named, (named,))]
    last_mention = tuple(dict.fromkeys(reversed(judged)))[::-1]
    against = _parents(last_mention, config.baseline, stages, aliases) if config.parents is None else config.parents
    if strange := [model for model in against if model not in last_mention]:
        raise ValueError(f"stages.{name}.parents: {unknown(strange[0], last_mention, 'judged model')}")
    gates = tuple(_of_last_round(gate, rounds) for gate in config.gates)
    return config.model_copy(update={"models": last_mention, "parents": against, "gates": gates})


def _of_last_round(gate: Gate, rounds: Mapping[str, tuple[str, ...]]) -> Gate:
    """Points a gate on a loop's model, `win_rate/LOOP`, at the last round, so that it also applies after rounds are added."""
    first, _, model = gate.metric.partition("/")
    return gate.model_copy(update={"metric": f"{first}/{rounds[model][-1]}"}) if model in rounds else gate


def _parents(models: tuple[str, ...], baseline: str, stages: Mapping[str, StageConfig], aliases: Mapping[str, str]) -> dict[str, str]:
    """Maps each judged model to the stage it was trained from, named as it is judged; models trained from the baseline have no entry."""
    judged = {aliases.get(model, model): model for model in (*models, baseline) if ".iteration" not in model}
    found = {}
    for model in models:
        config = stages.get(aliases.get(model, model))
        if isinstance(config, Select):  # all of its models were trained alike
            config = stages.get(config.simplest or "")
        if model != baseline and config is not None and KINDS[config.stage].makes == "policy":
            named = getattr(config, KINDS[config.stage].start)
            parent = aliases.get(named, named)
            if parent in stages and judged.get(parent, parent) != baseline:
                found[model] = judged.get(parent, parent)
    return found


def _shared(config: BaseModel, kind: type[BaseModel]) -> dict[str, Any]:
    """Returns the values of the fields that a loop shares with one of its stages; a field that is None keeps the stage's default."""
    fields = (field for field in kind.model_fields if field not in ("stage", "policy", "gates"))
    return {field: getattr(config, field) for field in fields if getattr(config, field, None) is not None}
