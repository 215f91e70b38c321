"""Compares the number of rows in a data set with the batch size of its stage. Does not read Hub data sets.
Torch-free."""

from __future__ import annotations

from pathlib import Path

from rlhf_core.config import PPO, Preferences, Rewarded, StageConfig, Trainable
from rlhf_core.config.training.optimised import FEW_STEPS
from rlhf_core.data.rows.mixture import load_rows
from rlhf_core.data.survey import LIMITS
from rlhf_core.hub.ids import is_remote
from rlhf_core.preflight.rows.sample import noun_of
from rlhf_core.recipe.plan import Node

LONG_PROMPT = 2**12  # bytes per prompt of an iteration; larger files are assumed to hold enough prompts
MOST_GENERATED = 1000  # most prompts to generate just to count them


def batch_warning(config: StageConfig, field: str, count: int) -> str:
    """Returns a warning if the `count` rows of the data set in `field` make too few or incomplete batches;
    otherwise ""."""
    if isinstance(config, Trainable) and field == "data":
        return _few_steps(config, count)
    if isinstance(config, PPO) and field == "prompts":
        return _left_prompts(config, count)
    if (
        isinstance(config, Preferences)
        and field == "prompts"
        and config.num_prompts is not None
        and count < config.num_prompts
    ):
        return f"num_prompts={config.num_prompts}, and the data has {count} prompts: all of them are used"
    return ""


def made_rows_warning(config: StageConfig, count: int) -> str:
    """Works like `batch_warning` for a stage that trains on at most `count` rows from a preferences stage."""
    if not isinstance(config, Trainable):
        return ""
    told = _few_steps(config, count)
    return f"at most {told}" if told else ""


def _few_steps(config: Trainable, count: int) -> str:
    batch = config.train_batch_size
    noun = noun_of(config.rows)
    steps = config.steps(count)
    if count < batch:
        return (
            f"{count} {noun} do not fill a batch of train_batch_size={batch}: each epoch is one step with all"
            f" of them, {steps} in all; lower train_batch_size or give more {noun}"
        )
    if steps < FEW_STEPS:
        return (
            f"{count} {noun} with train_batch_size={batch} and max_epochs={config.max_epochs} make {steps}"
            " steps, which train almost nothing: lower train_batch_size or raise max_epochs"
        )
    return ""


def _left_prompts(config: PPO, count: int) -> str:
    left = count % config.rollout_batch_size
    if count < config.rollout_batch_size or left <= LIMITS["unused rows"] * count:
        return ""
    return (
        f"each episode leaves out {left} of {count} prompts, which fill no iteration of"
        f" rollout_batch_size={config.rollout_batch_size}: set it to a divisor, or give more prompts"
    )


def prompt_problem(node: Node, seed: int) -> str:
    """Returns a sentence if there are too few prompts for one PPO iteration or one round of a loop; otherwise
    "". For PPO, does not count large files, and counts generated prompts only if they are few."""
    config = node.config
    if not isinstance(config, Rewarded):
        return ""
    files = [source for source in config.prompts.sources if not source.is_generated]
    generated = [source.reasoning_gym for source in config.prompts.sources if source.reasoning_gym]
    far = any(is_remote(file.path) for file in files) or any(
        source.verifiers is not None for source in config.prompts.sources
    )
    if far or sum(each.size for each in generated) > MOST_GENERATED:
        return ""
    where = f"stages.{node.name}.prompts"
    if isinstance(config, PPO):
        size = sum(Path(file.path).stat().st_size for file in files)
        if size > config.rollout_batch_size * LONG_PROMPT:
            return ""
        try:
            config.iterations(len(load_rows(config.prompts, seed)))
        except ValueError as error:
            return f"{where}: {error}"
        return ""
    if not isinstance(config, Preferences) or config.first_prompt == 0:
        return ""
    try:
        rows = len(load_rows(config.prompts, seed))
    except ValueError as error:
        return f"{where}: {error}"
    if rows > config.first_prompt:
        return ""
    return (
        f"stages.{node.name}: its prompts start at number {config.first_prompt}, but there are only {rows};"
        " give more prompts, fewer rounds or fewer prompts per round"
    )
