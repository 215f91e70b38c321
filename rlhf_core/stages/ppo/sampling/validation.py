"""Validates the actor during training: answers prompts that are not trained on, reports rewards with
intervals, and finds the best iteration.

Each prompt has the same seed at every validation, so that two validations differ only in the weights. The
largest of several noisy means is biased upwards. The weights of the best iteration therefore answer the
prompts again, with seeds that were not used in the selection.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

from rlhf_core.config import PPO
from rlhf_core.config.ppo.validation_fields import pass_sizes
from rlhf_core.data.chat import Renderer
from rlhf_core.data.documents import Prompt
from rlhf_core.data.sources import prompts as load_prompts
from rlhf_core.environments.row_environments import ENVIRONMENT
from rlhf_core.mean_interval import mean_interval
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Term, plain_sum
from rlhf_core.rollout.engine_contract import Sampling
from rlhf_core.runs.run_dir import STATE, VALIDATION, RunDir
from rlhf_core.stages.ppo.rollout_records import Rollout, shown
from rlhf_core.stages.ppo.sampling.rollout_group import RolloutGroup
from rlhf_core.stages.ppo.sampling.sampled_answers import ScoringModels
from rlhf_core.system.files import write_text

BEST = f"{STATE}/best"  # folder with the exports of the best iterations, until the stage is done
REWARD, LOW, HIGH = (f"eval/reward/{name}" for name in ("mean", "ci_low", "ci_high"))
ROUNDING = 1e-6  # largest error of a sum of weighted rewards


class Validation(NamedTuple):
    """Specifies the prompts and their scoring.

    `groups` holds the indices of the prompts of each data source, if there are several. For generated
    questions each task is a source; with several environments, each of them is. `allowed_failures` is the
    number of answers on which a reward source may fail. `fresh_seeds` are the seeds for the best iteration's
    second answers.
    """

    prompts: Sequence[Prompt]
    groups: Mapping[str, Sequence[int]]
    seeds: Sequence[int]
    sampling: Sampling
    terms: Sequence[Term]
    right: float | None
    allowed_failures: int
    fresh_seeds: Sequence[int] = ()


class Best(NamedTuple):
    """Holds the iteration whose answers had the highest mean reward (0: before training), its metrics, and
    the number of validations since. Also holds the metrics of its second answers if these cannot be sampled
    later."""

    iteration: int
    metrics: dict[str, float]
    since: int = 0
    answered_again: dict[str, float] | None = None

    def after(self, iteration: int, metrics: dict[str, float]) -> Best:
        better = metrics[REWARD] > self.metrics[REWARD]
        return Best(iteration, metrics) if better else self._replace(since=self.since + 1)


def load_validation(
    config: PPO,
    renderer: Renderer,
    training: Sequence[Prompt],
    terms: Sequence[Term],
    stop_token_ids: Sequence[int],
    seed: int,
) -> Validation | None:
    """Loads `eval_prompts` without prompts that are also in the training data. Returns None if the recipe has
    none. Raises ValueError if no prompt is left."""
    if config.eval_prompts is None:
        return None
    known = {prompt.key for prompt in training}
    prompts: list[Prompt] = []
    groups: dict[str, list[int]] = {}
    of_files: set[str] = set()  # names of groups that are whole files
    shared = 0
    own_renderer = Renderer(
        renderer.tokenizer, config.eval_prompts.template, template_args=config.eval_prompts.template_args
    )
    for source in config.eval_prompts.sources:
        data = config.eval_prompts.model_copy(
            update={"sources": (source.model_copy(update={"probability": 1.0}),)}
        )
        found, report, _ = load_prompts(data, own_renderer, config.prompt_max_len, seed)
        for why, count in report.survey.dropped.items():
            print(f"{count} eval_prompts of {source.path} are left out: {why}", flush=True)
        own = [prompt for prompt in found if prompt.key not in known]
        shared += len(found) - len(own)
        places = range(len(prompts), len(prompts) + len(own))
        column = "task" if source.reasoning_gym is not None else ENVIRONMENT
        if source.reasoning_gym is not None or config.environments:
            for place, prompt in zip(places, own, strict=True):
                name = str(prompt.row.get(column))
                group = f"{name}-{column}" if name in of_files else name
                groups.setdefault(group, []).append(place)
        else:
            named = source.path if source.verifiers is None else source.verifiers.environment
            stem = Path(named.partition("@")[0]).stem
            group = stem if stem not in groups else f"{stem}-{len(groups) + 1}"
            groups[group] = list(places)
            of_files.add(group)
        prompts += own
    if shared:
        print(
            f"{shared} of {shared + len(prompts)} eval_prompts are prompts of the training, too: they are"
            " left out",
            flush=True,
        )
    if not prompts:
        raise ValueError("every one of eval_prompts is a prompt of the training, too: name others")
    n = config.eval_samples
    seeds, fresh = (
        [random.Random(f"{seed}-{what}-{i}").getrandbits(48) for i in range(len(prompts))]
        for what in ("validation", "answered-again")
    )
    sampling = sampling_of(config, n, stop_token_ids)
    allowed = int(config.max_failed_rewards * len(prompts) * n)
    return Validation(
        prompts, groups if len(groups) > 1 else {}, seeds, sampling, terms, config.eval_right, allowed, fresh
    )


def sampling_of(config: PPO, n: int, stop_token_ids: Sequence[int]) -> Sampling:
    """Returns the sampling options for `eval_prompts`: as in training, unless the recipe overrides them."""
    sampling = Sampling.of(config, n, stop_token_ids, logprobs=False)
    if config.eval_temperature is not None:
        sampling = sampling._replace(temperature=config.eval_temperature)
    if config.eval_top_p is not None:
        sampling = sampling._replace(top_p=config.eval_top_p)
    return sampling


def validate(
    engines: RolloutGroup, models: ScoringModels, validation: Validation, run: RunDir, iteration: int
) -> dict[str, float]:
    """Answers the prompts with the engines' current weights and scores the answers. Writes them to
    `validation/iterationN.jsonl`."""
    file = run / VALIDATION / f"iteration{iteration}.jsonl"
    return _validate(engines, models, validation, validation.seeds, file)


def answer_again(
    engines: RolloutGroup, models: ScoringModels, validation: Validation, run: RunDir
) -> dict[str, float]:
    """Works like `validate`, but with fresh seeds that were not used to select the best iteration. Writes the
    answers to `validation/checkpoint.jsonl`."""
    file = run / VALIDATION / "checkpoint.jsonl"
    return _validate(engines, models, validation, validation.fresh_seeds, file)


def answer_as(
    engines: RolloutGroup, models: ScoringModels, validation: Validation, run: RunDir, checkpoint: Path
) -> dict[str, float]:
    """Returns the metrics of `answer_again` for a checkpoint, which the engines load instead of the actor's
    weights."""
    while True:
        revivals = engines.revivals
        engines.load(checkpoint)
        metrics = answer_again(engines, models, validation, run)
        if engines.revivals == revivals:
            return metrics
        # An engine died in the meantime, and its restart sent the actor's weights to all engines.


def _validate(
    engines: RolloutGroup,
    models: ScoringModels,
    validation: Validation,
    seeds: Sequence[int],
    file: Path,
) -> dict[str, float]:
    seeded = list(zip(validation.prompts, seeds, strict=True))
    rollouts = engines.start_rollouts(seeded, validation.sampling)()
    rewards = models.reward_while_asleep(rollouts, validation.allowed_failures)
    write_rollouts(file, shown(rollouts, rewards, models.decode))
    return measured(rewards, rollouts, validation)


def measured(rewards: Rewards, rollouts: Sequence[Rollout], validation: Validation) -> dict[str, float]:
    """Returns metrics of all answers, and of the answers to the prompts of each data source. Answers without
    a reward do not count."""
    n = validation.sampling.n
    table = plain_sum(rewards.by_source, validation.terms).reshape(-1, n)
    if np.isnan(table).all():
        raise ValueError(
            f"none of the {table.size} answers to eval_prompts has a reward of every source: lower"
            " max_failed_rewards"
        )
    metrics = _of("eval", table, validation.right)
    for name, members in validation.groups.items():
        metrics |= (
            _of(f"eval/{name}", table[list(members)], validation.right)
            if not np.isnan(table[list(members)]).all()
            else {}
        )
    if len(rewards.by_source) > 1:
        metrics |= {
            f"eval/reward/{title}/mean": float(np.nanmean(values))
            for title, values in rewards.by_source.items()
        }
    metrics["eval/response/length"] = sum(np.count_nonzero(found.document.mask) for found in rollouts) / len(
        rollouts
    )
    metrics["eval/response/truncated"] = sum(not found.finished for found in rollouts) / len(rollouts)
    return metrics


def _of(name: str, table: np.ndarray, right: float | None) -> dict[str, float]:
    """Returns metrics of rewards (prompts, n), nan where missing. Intervals are over prompts."""
    given = ~np.isnan(table)
    metrics = _interval(f"{name}/reward", np.nanmean(table[given.any(1)], axis=1))
    if right is None:
        return metrics
    enough = right - ROUNDING * max(1.0, abs(right))
    counts = [
        (int(row.sum()), int((values[row] >= enough).sum()))
        for row, values in zip(given, table, strict=True)
        if row.any()
    ]
    metrics |= _rate(f"{name}/right", np.array([c / n for n, c in counts]))
    for k in pass_sizes(table.shape[1]):
        chances = [pass_at(n, c, k) for n, c in counts if n >= k]  # fewer answers cannot estimate pass@k
        metrics |= {f"{name}/pass@{k}": float(np.mean(chances))} if chances else {}
    return metrics


def pass_at(n: int, right: int, k: int) -> float:
    """Returns an unbiased estimate of the probability that at least one of k answers is right, given `right`
    of n >= k answers (Chen et al. 2021, arXiv:2107.03374, eq. 1)."""
    return 1.0 - comb(n - right, k) / comb(n, k)


def _interval(name: str, values: np.ndarray) -> dict[str, float]:
    """Returns the mean over prompts and its 95 % interval. For rewards from 0 to 1 this is the interval of a
    rate; otherwise it is Student's, which needs at least two prompts with different rewards."""
    if ((values >= -ROUNDING) & (values <= 1 + ROUNDING)).all():
        return _rate(name, values.clip(0, 1))
    mean = float(values.mean())
    if np.ptp(values) <= ROUNDING * max(1.0, abs(mean)):
        return {f"{name}/mean": mean}
    error = float(values.std(ddof=1)) / len(values) ** 0.5
    half = float(student.ppf(0.975, len(values) - 1)) * error
    return {f"{name}/mean": mean, f"{name}/ci_low": mean - half, f"{name}/ci_high": mean + half}


def _rate(name: str, shares: np.ndarray) -> dict[str, float]:
    """Returns the mean over prompts of fractions from 0 to 1, and its 95 % interval."""
    low, high = mean_interval(shares, np.ones(len(shares)))
    return {f"{name}/mean": float(shares.mean()), f"{name}/ci_low": low, f"{name}/ci_high": high}


def write_rollouts(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes the rows returned by `shown`."""
    file.parent.mkdir(exist_ok=True)
    write_text(file, "".join(json.dumps(row) + "\n" for row in rows))


def keep_best(run: RunDir, iterations: Collection[int]) -> None:
    """Removes the exports of all iterations except these."""
    for folder in (run / BEST).glob("iteration*"):
        if folder.name not in {f"iteration{iteration}" for iteration in iterations}:
            shutil.rmtree(folder)
