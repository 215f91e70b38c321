"""Derives the parameters of PPO's iterations from the recipe: model paths, values that are fixed for all
iterations, and each iteration's batches and learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from rlhf_core.config import PPO
from rlhf_core.data.documents import Document, Prompt
from rlhf_core.data.rows.pass_rate_column import pass_rates
from rlhf_core.rewards.combine import term_of
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.stages.ppo.iteration import IterationSchedule
from rlhf_core.stages.ppo.sampling.curriculum_draws import CurriculumDraws
from rlhf_core.stages.ppo.sampling.sampled_answers import PromptOrder, Setup
from rlhf_core.training.learning_rate import learning_rate, tell_long_warmup

PROBE_DOCUMENTS = 4
PROBE_TOKENS = 128


def model_paths(config: PPO, inputs: Mapping[str, str]) -> dict[str, str]:
    """Returns the path of each role's model. By default the critic starts from the first reward model, and
    the reference is the actor's starting model."""
    names = {"actor": config.actor} | config.read_names
    names |= {judge.group: judge.model.model for judge in config.own_judges if config.has_engines}
    if config.has_critic:
        names["critic"] = config.critic or config.reward_models[0].model
    return {role: inputs[name] for role, name in names.items()}


def setup_of(
    config: PPO,
    prompts: Sequence[Prompt],
    paths: Mapping[str, str],
    stop_token_ids: Sequence[int],
    seed: int,
    sources: Sequence[int] = (),
) -> Setup:
    """Returns the values that are fixed for all iterations. `sources` holds the index of each prompt's
    source, and is empty if there is only one source."""
    n = config.n_samples_per_prompt
    normalize: Literal["none", "stored"] = "stored" if config.normalize_reward else "none"
    terms = [term_of(source, paths.get(f"reward:{source.title}"), normalize) for source in config.reward]
    probe = [probe_of(prompt) for prompt in prompts[:PROBE_DOCUMENTS]]
    return Setup(
        config=config,
        order=PromptOrder(
            prompts, config.rollout_batch_size, seed, curriculum_of(config, prompts, seed, sources)
        ),
        sampling=Sampling.of(config, n, stop_token_ids),
        terms=terms,
        probe=probe,
        allowed_failures=int(config.max_failed_rewards * config.rollout_batch_size * n),
        actor=paths.get("actor", ""),
    )


def probe_of(prompt: Prompt) -> Document:
    """Returns the end of a prompt as a document whose log-probs are compared. A prompt with images is
    returned whole."""
    tokens = prompt.tokens if prompt.pictures else prompt.tokens[-PROBE_TOKENS:]
    return Document(tokens, [True] * len(tokens), pictures=prompt.pictures)


def curriculum_of(
    config: PPO, prompts: Sequence[Prompt], seed: int, sources: Sequence[int]
) -> CurriculumDraws | None:
    """Returns the draws of a curriculum at the start of the run, or None if the recipe has no curriculum.
    Raises ValueError for a row with an invalid pass rate."""
    if config.curriculum is None:
        return None
    assert config.right_from is not None, "it is checked"
    rows = [(f"prompts: number {i}", prompt.row) for i, prompt in enumerate(prompts, 1)]
    of_source = np.array(sources, np.int64) if len(sources) else np.zeros(len(prompts), np.int64)
    return CurriculumDraws(
        config.curriculum,
        of_source,
        pass_rates(config.curriculum.pass_rate_key, rows),
        config.n_samples_per_prompt,
        config.right_from,
        config.rollout_batch_size,
        seed,
    )


def tell_schedule(config: PPO, iterations: int) -> None:
    """Prints a warning if the actor's learning rate never reaches its peak."""
    trained = iterations - config.freezing_actor_steps
    if trained > 0:
        tell_long_warmup(trained * config.max_epochs * _steps_per_epoch(config), config)


def _steps_per_epoch(config: PPO) -> int:
    return config.rollout_batch_size * config.n_samples_per_prompt // config.train_batch_size


def schedule_of(config: PPO, step: int, iterations: int, seed: int) -> IterationSchedule:
    """Returns the batches and learning rates of one iteration. The actor does not train in the first
    `freezing_actor_steps` iterations."""
    per_epoch = _steps_per_epoch(config)
    per_iteration = per_epoch * config.max_epochs
    frozen = config.freezing_actor_steps

    def rates(peak: float, first: int) -> list[float]:
        total = (iterations - first) * per_iteration
        now = (step - first) * per_iteration
        return [learning_rate(now + k, total, peak, config) for k in range(per_iteration)]

    by_role = {"critic": rates(config.critic_learning_rate, 0)} if config.has_critic else {}
    by_role |= {"actor": rates(config.actor_learning_rate, frozen)} if step >= frozen else {}
    return IterationSchedule(per_epoch, config.max_epochs, by_role, f"{seed}-{step}")
