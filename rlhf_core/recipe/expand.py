"""Expands a recipe's loops, publications and evaluations into single stages. Torch-free, offline.

An `iterative_dpo` stage X becomes X.round1.preferences, X.round1.dpo, X.round2.preferences, ...; X.round1
names the model of that round, and X the model of the last one. An evaluation that names X judges the model of
every round; its gates that name X check the last round. An `iterative` stage expands in the same way, with
the training stage of its post-processor: X.round1.kto, X.round1.sft. A publication P of X with `round_branch`
also becomes P.round1, P.round2, ..., each of which depends only on its round. For a `ppo` stage P,
P.iteration10 names the actor after iteration 10. For a stage S, S.ema names its moving average.

A stage S with `sweep: {beta: [0.1, 0.3]}` becomes S.beta=0.1 and S.beta=0.3. In an evaluation or a select
stage, S means all these stages; no other stage may name S.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel

from rlhf_core.config import (
    DPO,
    KTO,
    SFT,
    Evaluation,
    Gate,
    IterativeFeedback,
    Loop,
    Preferences,
    Publication,
    Recipe,
    SampledLoop,
    Select,
    StageConfig,
)
from rlhf_core.config.kinds import KINDS, has_metric
from rlhf_core.recipe.sentences import unknown


class Expanded(NamedTuple):
    """Holds the stages by name. `aliases` maps the names of loops, rounds and iterations to the stage that
    creates their model. `rounds` maps each loop to the names of its rounds. `variants` maps each swept stage
    to the names of its variants."""

    stages: dict[str, StageConfig]
    aliases: dict[str, str]
    rounds: dict[str, tuple[str, ...]]
    variants: dict[str, tuple[str, ...]]


def expand(recipe: Recipe, refused: Collection[str] = ()) -> Expanded:
    """Returns the single stages of a recipe. `refused` holds the rounds (LOOP.roundK) to leave out; the next
    round starts from the last round that is kept.

    Raises ValueError if an evaluation's `parents` name a model that it does not judge.
    """
    expanded = _without_loops(recipe, refused)
    for name, config in expanded.stages.items():
        if isinstance(config, Select):
            models = tuple(model for named in config.of for model in expanded.variants.get(named, (named,)))
            expanded.stages[name] = config.model_copy(
                update={"of": models, "simplest": config.simplest or models[0]}
            )
    for name, config in list(expanded.stages.items()):
        if config.published_model in refused:
            del expanded.stages[name]
        if isinstance(config, Evaluation):
            expanded.stages[name] = _judging(name, _without(config, refused), expanded)
    return expanded


def _without(config: Evaluation, refused: Collection[str]) -> Evaluation:
    """Returns the evaluation without the models of refused rounds and the gates on them."""
    models = tuple(model for model in config.models if model not in refused)
    gates = tuple(gate for gate in config.gates if gate.metric.partition("/")[2] not in refused)
    parents = {model: parent for model, parent in (config.parents or {}).items() if model not in refused}
    return config.model_copy(
        update={"models": models, "gates": gates, "parents": None if config.parents is None else parents}
    )


def _without_loops(recipe: Recipe, refused: Collection[str]) -> Expanded:
    stages: dict[str, StageConfig] = {}
    aliases: dict[str, str] = {}
    rounds: dict[str, tuple[str, ...]] = {}
    swept: dict[str, tuple[str, ...]] = {}
    for name, config in recipe.stages.items():
        found = {f"{name}.{suffix}": variant for suffix, variant in config.variants.items()}
        if found:
            swept[name] = tuple(found)
            stages |= found
            aliases |= {
                f"{variant}.{export}": variant for variant, own in found.items() for export in own.exports
            }
            continue
        if not isinstance(config, Loop):
            stages[name] = (
                config.model_copy(update={"round_branch": None})
                if isinstance(config, Publication)
                else config
            )
            aliases |= {f"{name}.{export}": name for export in config.exports}
            continue
        left_out = [title for k in range(config.rounds) if (title := f"{name}.round{k + 1}") in refused]
        titles = _rounds_used(name, config.rounds, refused)
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
            # each round has its own prompts
            fresh = any(source.is_inbox for source in config.prompts.sources)
            slice_of_prompts = {
                "first_prompt": 0 if fresh else k * config.prompts_per_round,
                "num_prompts": config.prompts_per_round,
            }
            sampling = Preferences(**_shared(config, Preferences), policy=policy, **slice_of_prompts)
            training = _training(config, policy, f"{title}.preferences")
            ours = tuple(gate for gate in config.gates if gate.approve or has_metric(training, gate.metric))
            theirs = tuple(
                gate for gate in config.gates if gate not in ours and has_metric(sampling, gate.metric)
            )
            stages[f"{title}.preferences"] = sampling.model_copy(update={"gates": theirs})
            aliases[title] = policy = f"{title}.{training.stage}"
            stages[policy] = training.model_copy(update={"gates": ours})
            stages |= _publications_of_round(recipe, name, k + 1)
        aliases[name] = policy
        before = {title: _before(title, rounds[name], config.policy) for title in left_out}
        aliases |= {title: aliases.get(other, other) for title, other in before.items() if other != "base"}
    return Expanded(stages, aliases, rounds, swept)


def _rounds_used(loop: str, count: int, refused: Collection[str]) -> list[tuple[int, str]]:
    """Returns the number (from 0) and name of each of a loop's first `count` rounds that is not refused. If
    all of them are refused, returns the next round that is not refused, because the loop's dependents need a
    model."""
    used = [(k, title) for k in range(count) if (title := f"{loop}.round{k + 1}") not in refused]
    return used or [
        next((k, title) for k in itertools.count(count) if (title := f"{loop}.round{k + 1}") not in refused)
    ]


def _before(title: str, used: Sequence[str], policy: str) -> str:
    """Returns the model that a refused round started from: the model of the last used round before it, or
    else the loop's first policy."""
    number = int(title.rpartition("round")[2])
    return next((other for other in reversed(used) if int(other.rpartition("round")[2]) < number), policy)


def _publications_of_round(recipe: Recipe, loop: str, number: int) -> dict[str, StageConfig]:
    """Returns the publications of one round of a loop, each to that round's branch."""
    found: dict[str, StageConfig] = {}
    for name, config in recipe.stages.items():
        if isinstance(config, Publication) and config.round_branch and config.model == loop:
            place: dict[str, Any] = {
                "model": f"{loop}.round{number}",
                "branch": config.round_branch.format(number),
                "round_branch": None,
            }
            place["champion"] = False
            found[f"{name}.round{number}"] = config.model_copy(update=place)
    return found


def _on_feedback(loop: IterativeFeedback, policy: str) -> DPO | KTO:
    kind = DPO if loop.method == "dpo" else KTO
    return kind(**_shared(loop, kind), policy=policy, data=loop.feedback)


def _training(loop: SampledLoop, policy: str, answers: str) -> DPO | KTO | SFT:
    """Returns the stage that trains `policy` on the output of the round's preferences stage, `answers`."""
    rendered = {"template": loop.prompts.template, "template_args": loop.prompts.template_args}
    loop = loop.model_copy(update={"max_len": loop.max_len or loop.prompt_max_len + loop.generate_max_len})
    if loop.post_processor == "dpo":
        return DPO(**_shared(loop, DPO), policy=policy, pairs=answers, **rendered)
    if loop.post_processor == "kto":
        return KTO(**_shared(loop, KTO), policy=policy, answers=answers, **rendered)
    condition = "reward" if loop.post_processor == "conditional_sft" else "none"
    return SFT(**_shared(loop, SFT), model=policy, answers=answers, condition=condition, **rendered)


def _judging(name: str, config: Evaluation, expanded: Expanded) -> Evaluation:
    """Returns the evaluation with each loop replaced by its rounds, and with the parent of each judged
    model."""
    stages, aliases, rounds, swept = expanded
    latest = {loop: titles[-(config.last_rounds or len(titles)) :] for loop, titles in rounds.items()}
    judged = [model for named in config.models for model in (latest | swept).get(named, (named,))]
    last_mention = tuple(dict.fromkeys(reversed(judged)))[::-1]
    parents = _parents(last_mention, config.baseline, stages, aliases)
    from_baseline = (
        [model for model, parent in parents.items() if parent == config.baseline]
        if config.parents is None
        else []
    )
    others = {model: parent for model, parent in parents.items() if parent != config.baseline}
    against = others if config.parents is None else config.parents
    strange = [model for model in against if model not in last_mention]
    if strange:
        raise ValueError(f"stages.{name}.parents: {unknown(strange[0], last_mention, 'judged model')}")
    gates = tuple(_against_baseline(_of_last_round(gate, rounds), from_baseline) for gate in config.gates)
    return config.model_copy(update={"models": last_mention, "parents": against, "gates": gates})


def _of_last_round(gate: Gate, rounds: Mapping[str, tuple[str, ...]]) -> Gate:
    """Points a gate on a loop's model, `win_rate/LOOP`, at the last round, so that it still applies when
    rounds are added."""
    first, _, model = gate.metric.partition("/")
    return gate.model_copy(update={"metric": f"{first}/{rounds[model][-1]}"}) if model in rounds else gate


def _against_baseline(gate: Gate, from_baseline: Collection[str]) -> Gate:
    """Points a gate against a model's parent, `win_rate_vs_parent/MODEL`, at `win_rate/MODEL` if the baseline
    is the parent, as for the first round of a loop."""
    first, _, model = gate.metric.partition("/")
    about = first.removesuffix("_vs_parent")
    return (
        gate.model_copy(update={"metric": f"{about}/{model}"})
        if about != first and model in from_baseline
        else gate
    )


def _parents(
    models: tuple[str, ...], baseline: str, stages: Mapping[str, StageConfig], aliases: Mapping[str, str]
) -> dict[str, str]:
    """Maps each judged model to its parent, the stage or baseline that it was trained from, under the name by
    which the parent is judged. Models without a judged parent have no entry."""
    named = [(aliases.get(model, model), model) for model in (*models, baseline)]
    # without a stage's additional models, STAGE.iteration10 and STAGE.ema
    judged = {stage: model for stage, model in named if not model.startswith(f"{stage}.")}
    found = {}
    for model in models:
        config = stages.get(aliases.get(model, model))
        if isinstance(config, Select):  # all of its candidates have the same kind of parent
            config = stages.get(config.simplest or "")
        if model != baseline and config is not None and KINDS[config.stage].makes == "policy":
            named = getattr(config, KINDS[config.stage].start)
            parent = aliases.get(named, named)
            if named.startswith(f"{parent}."):  # an additional model of that stage
                found[model] = named
            elif parent in stages or parent == baseline:
                found[model] = judged.get(parent, parent)
    return found


def _shared(config: BaseModel, kind: type[BaseModel]) -> dict[str, Any]:
    """Returns the values of the fields that a loop shares with one of its stages. A field that is None keeps
    the stage's default."""
    fields = (field for field in kind.model_fields if field not in ("stage", "policy", "gates"))
    return {field: getattr(config, field) for field in fields if getattr(config, field, None) is not None}
