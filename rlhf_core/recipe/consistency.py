"""Checks that the stages of a recipe fit together. Returns one sentence for each name, gate or branch that
does not fit. Torch-free, offline."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from rlhf_core.config import (
    DPO,
    KTO,
    SFT,
    Calibration,
    Drift,
    Evaluation,
    Preferences,
    Publication,
    Recipe,
    Select,
    StageConfig,
)
from rlhf_core.config.judging.calibration import judge_identity
from rlhf_core.config.kinds import KINDS, metrics_of, named
from rlhf_core.recipe.expand import Expanded
from rlhf_core.recipe.named_inputs import references
from rlhf_core.recipe.sentences import unknown


def inconsistencies(recipe: Recipe, expanded: Expanded) -> list[str]:
    """Returns one sentence, with the field and the correction, for each inconsistency between a recipe's
    stages or in their gates."""
    stages = expanded.stages
    rounds = expanded.rounds
    variants = expanded.variants
    problems = [problem for name, config in stages.items() for problem in _misnamed(name, config, expanded)]
    problems += [
        problem
        for name, config in recipe.stages.items()
        for problem in _misgated(name, config, stages, variants.get(name, ()))
    ]
    problems += [
        problem
        for name, config in stages.items()
        if isinstance(config, Select)
        for problem in _misselected(name, config, stages)
    ]
    problems += [
        f"stages.{name}.models: {config.baseline} is the baseline, and there is no other model to compare"
        " with it: name one"
        for name, config in recipe.stages.items()
        if isinstance(config, Evaluation) and config.judges and set(config.models) <= {config.baseline}
    ]
    problems += [
        f"stages.{name}.calibration: {config.calibration} calibrates another judge than the first of judges,"
        " which decides: make them equal, and of a reward judge the template_args of both stages"
        for name, config in stages.items()
        if isinstance(config, Evaluation)
        and isinstance(calibration := stages.get(config.calibration or ""), Calibration)
        if judge_identity(calibration.judge, {}, calibration.template_args)
        != judge_identity(config.judges[0], {}, config.template_args)
    ]
    problems += [
        f"stages.{name}.template_args: they differ from those of the prompts of {source}, whose answers would"
        " be trained after another prompt: make them equal"
        for name, config in stages.items()
        if isinstance(config, DPO | KTO | SFT)
        if (source := config.pairs if isinstance(config, DPO) else config.answers)
        if isinstance(sampled := stages.get(source), Preferences)
        if sampled.prompts.template_args != config.template_args
    ]
    problems += [
        problem
        for name, config in recipe.stages.items()
        if isinstance(config, Drift)
        for problem in _unjudged(name, config, expanded)
    ]
    return problems + [
        f"stages.{name}.round_branch: {config.model} has no rounds: name"
        f" {' or '.join(rounds) or 'an iterative stage'} as model"
        for name, config in recipe.stages.items()
        if isinstance(config, Publication) and config.round_branch and config.model not in rounds
    ]


def _misnamed(stage: str, config: StageConfig, expanded: Expanded) -> Iterator[str]:
    stages, aliases, _, variants = expanded
    for name in config.remote_models or ():
        if name in ("base", *stages, *aliases):
            yield (
                f"stages.{stage}.endpoints.{name}: {name} is also the base model's or a stage's name; give"
                " the endpoint another one"
            )
    made = KINDS[config.stage].takes
    reward_models = named("reward")
    for place, name, kinds in references(config):
        where = f"stages.{stage}.{place}"
        target = aliases.get(name, name)
        needed = "a reward model" if kinds == reward_models else "a stage of kind " + " or ".join(kinds)
        only_stages = "checkpoint" not in {KINDS[kind].output for kind in kinds}
        if target in stages:
            found = stages[target]
            if found.stage not in kinds:
                yield f"{where}: {name} is of kind {found.stage}, but {needed} is needed here; name one"
            elif made and found.made_for is not None and found.made_for not in made:
                yield (
                    f"{where}: {name} has post_processor {found.made_for!r}; set it to {' or '.join(made)}"
                )
        elif name in variants:
            models = variants[name]
            yield (
                f"{where}: {name} is swept, it has {len(models)} models: name a select stage, or one of"
                f" {', '.join(models)}"
            )
        elif only_stages or (name == "base" and kinds == reward_models):
            valid = [other for other, found in stages.items() if found.stage in kinds]
            yield f"{where}: {unknown(name, valid, 'stage')}; {needed} is needed here"
        elif name != "base" and "/" not in name and not os.path.exists(name):
            valid = ["base", *(other for other, found in stages.items() if found.stage in kinds), *aliases]
            may_be_remote = config.remote_models is not None and not place.startswith("judges")
            remote = ", an endpoint" if may_be_remote else ""
            valid += (config.remote_models or ()) if may_be_remote else ()
            yield (
                f"{where}: {unknown(name, valid, 'name')}; name base, a stage{remote}, a folder or a Hub id"
                " (owner/model)"
            )


def _misselected(name: str, config: Select, stages: Mapping[str, StageConfig]) -> Iterator[str]:
    """Yields a sentence for each model that a select stage cannot choose."""
    judged = stages.get(config.by)
    for model in dict.fromkeys((*config.of, *([config.simplest] if config.simplest else []))):
        if model not in stages:
            yield (
                f"stages.{name}.of: {model} is no stage of the recipe: name the swept stage, or stages that"
                " make the models"
            )
        elif isinstance(judged, Evaluation) and (model not in judged.models or model == judged.baseline):
            yield (
                f"stages.{name}.of: {config.by} does not compare {model} with its baseline: add it to"
                f" stages.{config.by}.models"
            )
        elif model not in config.of:
            yield f"stages.{name}.simplest: {unknown(model, config.of, 'model')}"
    if len(set(config.of)) < 2:
        yield f"stages.{name}.of: give two models or more, there is nothing to choose from"


def _unjudged(name: str, config: Drift, expanded: Expanded) -> Iterator[str]:
    """Yields a sentence for each model of a drift stage that does not answer in the stage's evaluation, and a
    sentence for a KL that the stage cannot measure."""
    evaluation = expanded.stages.get(config.evaluation)
    if not isinstance(evaluation, Evaluation):
        return  # already reported as a wrong name
    answering = {
        expanded.aliases.get(model, model)
        for model in (evaluation.baseline, *evaluation.models)
        if model not in evaluation.endpoints
    }
    for field in ("model", "reference"):
        model = getattr(config, field)
        if expanded.aliases.get(model, model) not in answering:
            yield (
                f"stages.{name}.{field}: {model} does not answer in {config.evaluation}: add it to that"
                " stage's models"
            )
    if config.kl and evaluation.temperature != 1:
        yield (
            f"stages.{name}.kl needs samples of the model: set temperature of {config.evaluation} to 1, or"
            " leave kl out"
        )


def _misgated(
    name: str, config: StageConfig, stages: Mapping[str, StageConfig], variants: Sequence[str]
) -> Iterator[str]:
    """Yields a sentence for each gate on a metric that its stage will not have. A loop's gates may name
    metrics of both stages of a round."""
    if not config.gates:
        return
    own = variants[0] if variants else name
    is_loop = KINDS[config.stage].is_loop
    gated = [
        c for stage, c in stages.items() if stage == own or (is_loop and stage.startswith(f"{name}.round"))
    ]
    if not gated:
        return  # left out, because it publishes a refused round
    known = [metric for planned in gated for metric in metrics_of(planned)]
    for i, gate in enumerate(config.gates if is_loop else stages[own].gates):
        if gate.approve is None and not any(fnmatchcase(gate.metric, metric) for metric in known):
            field = "eval_prompts" if hasattr(config, "eval_prompts") else "eval_data"
            missing = getattr(config, field, True) is None or is_loop
            told = unknown(gate.metric, known, "metric")
            if missing and gate.metric.startswith("eval/"):
                told = (
                    f"unknown metric {gate.metric!r}: there is no {field}, and eval/... is measured on it;"
                    f" set {field}"
                )
            elif gate.metric.startswith("kl/") and getattr(config, "has_reference", True) is False:
                told += "; with init_kl_coef 0 no reference is loaded: set reference to measure the KL"
            yield f"stages.{name}.gates.{i}.metric: {told}"
