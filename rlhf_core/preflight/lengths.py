"""Finds lengths that the models of a stage have no positions for. Torch-free. The stage itself checks Hub
ids."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_core.config import (
    KINDS,
    PPO,
    AlignmentTax,
    Calibration,
    Evaluation,
    Preferences,
    RewardJudge,
    Trainable,
    VllmJudge,
)
from rlhf_core.hub.positions import require_positions, stored_config
from rlhf_core.recipe.plan import Node


def length_problems(node: Node, start_of: Callable[[str], str | None]) -> list[str]:
    """Returns a sentence for each model that would get more tokens than it has positions, when it trains,
    answers, scores for a calibration, or is served by vLLM.

    `start_of`: the folder or Hub id that a name's chain of models starts from; training does not change
    positions.
    """
    config = node.config
    asked = dict[tuple[str, str], tuple[int, str]]()  # (field, model): tokens, the fields that set them
    if isinstance(config, PPO | Preferences | Evaluation):
        both = config.prompt_max_len + config.generate_max_len, "prompt_max_len + generate_max_len"
        names = [getattr(config, KINDS[node.kind].start)]
        if isinstance(config, Evaluation):
            names = [
                name
                for name in (*names, *config.models, *(config.parents or {}).values())
                if name not in config.endpoints
            ]
            asked = {
                (f".judges.{i}", judge.model): (judge.max_model_len, "max_model_len")
                for i, judge in enumerate(config.judges)
                if isinstance(judge, VllmJudge) and judge.max_model_len
            }
        asked |= {("", name): both for name in names}
    elif isinstance(config, Calibration):
        if isinstance(config.judge, VllmJudge) and config.judge.max_model_len:
            asked = {(".judge", config.judge.model): (config.judge.max_model_len, "max_model_len")}
        elif isinstance(config.judge, RewardJudge):
            both = config.prompt_max_len + config.generate_max_len, "prompt_max_len + generate_max_len"
            asked = {("", config.judge.reward): both}
    elif isinstance(config, Trainable) and config.texts:  # sampled answers fit the positions of their sampler
        asked = {("", getattr(config, KINDS[node.kind].start)): (config.max_len, "max_len")}
    elif isinstance(config, AlignmentTax) and config.max_model_len:
        asked = {
            ("", name): (config.max_model_len, "max_model_len") for name in (config.baseline, *config.models)
        }
    stage = node.name.partition(".")[0]
    problems = []  # named by the recipe's stage, so once for all rounds of a loop
    for (field, name), (tokens, what) in asked.items():
        place = start_of(name) or ""
        try:
            require_positions(place, stored_config(place), tokens, what)
        except ValueError as error:
            problems.append(f"stages.{stage}{field}: {error}")
    return problems
