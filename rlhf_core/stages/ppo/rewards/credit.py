"""Turns scores into experience: sums and shapes rewards, and computes advantages. Runs on the driver, without
a model.

Masks out answers that have no reward, or that cannot be compared with another answer. Statistics and training
do not use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_core.config import PPO
from rlhf_core.config.rewards import EnvironmentReward, normalized_in_groups
from rlhf_core.objectives.advantages import (
    GROUPED,
    KL_ESTIMATORS,
    Credit,
    KLEstimator,
    dr_grpo,
    explained_variance,
    gae,
    gdpo,
    in_groups,
    kl_estimate,
    reinforce_pp,
    token_rewards,
)
from rlhf_core.objectives.losses import value_clip_range
from rlhf_core.objectives.masked import whiten
from rlhf_core.objectives.sampler_weights import percentile, sampler_metrics
from rlhf_core.rewards.clients import Rewards
from rlhf_core.rewards.combine import Running, Term, combine
from rlhf_core.rewards.reward_contract import Steps, on_tokens
from rlhf_core.stages.ppo.measured.answer_spread import (
    advantage_spread,
    group_signal,
    length_correlation,
    length_spread,
)
from rlhf_core.stages.ppo.rewards.kl_by_teacher import kl_by_teacher
from rlhf_core.stages.ppo.rewards.shaped_rewards import Shaped, shaped_rewards, truncated
from rlhf_core.stages.ppo.rewards.texts import Lengths
from rlhf_core.stages.ppo.roles.role_passes import Scored
from rlhf_core.stages.ppo.rollout_records import Experience, Rollout, Scores


class RewardParts(NamedTuple):
    """Holds the numbers from which the advantages of B answers were computed: the weighted sums of their
    sources (B,), and which answers have a sum (B,). Also holds the rewards after clipping and penalties, and
    the coefficient of the KL in them (0: none)."""

    summed: Tensor
    scored: Tensor
    shaped: Shaped
    kl_coef: float


class Credited(NamedTuple):
    """Holds the experience of all rollouts, the indices of the rollouts to train on, metrics, the limit on
    changes of the critic's values in the loss (None: no limit), and the parts of the rewards."""

    experience: list[Experience]
    usable: list[int]
    metrics: dict[str, float]
    value_clip: float | None
    parts: RewardParts


class Divergence(NamedTuple):
    """Holds the actor's distance from reference and sampler: the mean KL per token (nats), which the KL
    controller uses, and metrics."""

    kl: float
    metrics: dict[str, float]


def credit(
    rollouts: Sequence[Rollout],
    scores: Scores,
    kl_coef: float,
    statistics: Mapping[str, Running],
    config: PPO,
    terms: Sequence[Term],
    lengths_of: Lengths | None = None,
) -> Credited:
    """Returns the advantages and returns of a whole rollout, with statistics over all its usable response
    tokens. `terms` are the reward sources. `statistics` are the running statistics, including these answers,
    of the sources that are standardised with them. `lengths_of` finds the tokens of steps that have
    rewards."""
    masks = [rollout.document.mask_array for rollout in rollouts]
    # one number per answer, so T is 1 and nothing is expanded to tokens
    of_answers = config.advantage_estimator in GROUPED
    # (B, T)
    response = torch.ones(len(masks), 1, dtype=torch.bool) if of_answers else _pad(masks, torch.bool)
    counts = torch.tensor([np.count_nonzero(mask) for mask in masks])  # (B,)
    nothing = torch.zeros(()).expand(response.shape)
    values = _pad(scores.values) if scores.values else nothing

    combined = combine(scores.rewards.by_source, terms, statistics, config.n_samples_per_prompt)
    early = early_rewards(rollouts, scores.rewards, config, lengths_of)
    if early is not None:  # scale by the factor by which clipping changed the sum
        early *= (
            combined.rewards.clamp(-config.reward_clip, config.reward_clip) / combined.rewards
        ).nan_to_num(1.0)[:, None]
    # A cut text has no reward yet, except for its steps.
    shaped = shaped_rewards(rollouts, combined, config, 0.0 if early is None else early.sum(-1))
    rewards = shaped.rewards
    metrics = combined.metrics | shaped.metrics
    cut = truncated(rollouts)

    mask = response & combined.scored[:, None]
    penalised = config.kl_in == "reward" and bool(scores.logprobs and scores.ref_logprobs)
    kl = kl_of(scores, masks, mask, config) if penalised else nothing
    coef = kl_coef if penalised else 0.0
    after = None if scores.end_values is None else torch.from_numpy(scores.end_values)
    (advantages, returns), usable = estimate(
        rewards, kl, coef, values, mask, combined.scored, config, early, after
    )
    if config.mask_truncated:  # after the estimate, which uses their rewards
        usable = usable & ~cut
        returns = torch.where(usable[:, None], returns, 0)
    tokens = int(counts[usable].sum())
    if not tokens:
        raise ValueError(nothing_to_learn(len(rollouts), int(cut.sum()), config))
    metrics |= {
        # returns are 0 on tokens that are not trained on
        "return/mean": float((returns[:, 0].double() * counts if of_answers else returns).sum() / tokens),
        "response/length": float(counts.float().mean()),
        "response/truncated": float(cut.float().mean()),
        "rollout/usable": float(usable.float().mean()),
    }
    metrics |= spread_of(shaped, combined.scored, counts, config)
    metrics |= advantage_spread(advantages[mask & usable[:, None]])
    value_clip = None
    if config.has_critic and config.value_clip is not None:
        value_clip = value_clip_range(returns, values, mask & usable[:, None], config.value_clip)
    if config.has_critic:
        metrics["value/explained_variance"] = float(
            explained_variance(values, returns, mask & usable[:, None]).nan_to_num(0.0, neginf=0.0)
        )
    advantage = advantages[:, 0].tolist() if of_answers else _cut(advantages, masks)
    known_returns = _cut(returns, masks) if config.has_critic else None
    experience = experience_of(rollouts, scores, advantage, known_returns, config)
    parts = RewardParts(combined.rewards, combined.scored, shaped, coef)
    return Credited(experience, usable.nonzero().flatten().tolist(), metrics, value_clip, parts)


def spread_of(shaped: Shaped, scored: Tensor, lengths: Tensor, config: PPO) -> dict[str, float]:
    """Measures how the rewards and lengths of the answers, (B,) each, vary and correlate. Penalties count in
    the signal of a group, but not in the correlation with length, because they depend on length
    themselves."""
    samples = config.n_samples_per_prompt
    metrics = length_spread(lengths)
    metrics["reward/length_correlation"] = length_correlation(shaped.clipped, lengths, scored, samples)
    if samples > 1 and config.has_reward:
        metrics |= group_signal(shaped.rewards, scored, samples)
    return metrics


def kl_of(scores: Scores, masks: Sequence[np.ndarray], mask: Tensor, config: PPO) -> Tensor:
    """Returns estimates of the KL to the reference, (B, T), 0 outside of `mask`. For estimators of whole
    answers, returns one number per answer."""
    assert scores.logprobs is not None and scores.ref_logprobs is not None
    if config.advantage_estimator in GROUPED:
        return _kl_of_answers(scores.logprobs, scores.ref_logprobs, masks, config.kl_estimator)[:, None]
    estimates = kl_estimate(_pad(scores.logprobs), _pad(scores.ref_logprobs), config.kl_estimator)
    return torch.where(mask, estimates, 0)


def experience_of(
    rollouts: Sequence[Rollout],
    scores: Scores,
    advantages: Sequence[np.ndarray | float],
    returns: Sequence[np.ndarray] | None,
    config: PPO,
) -> list[Experience]:
    """Returns the experience of each rollout, which training reads. Fields that no loss reads are None and
    are not sent."""
    none = (None,) * len(rollouts)
    sampler = none if not config.weighs_tokens else [rollout.sampler_logprobs for rollout in rollouts]
    in_loss = config.kl_in == "loss" and not config.teacher_top_k
    references = scores.ref_logprobs if in_loss else None
    return [
        Experience(rollout.document, old, of_sampler, ref, v, a, value, teacher)
        for rollout, old, ref, v, of_sampler, a, value, teacher in zip(
            rollouts,
            scores.logprobs or none,
            references or none,
            scores.values or none,
            sampler,
            advantages,
            returns or none,
            scores.teacher or none,
            strict=True,
        )
    ]


def divergence(
    rollouts: Sequence[Rollout],
    logprobs: Sequence[np.ndarray],
    ref_logprobs: Sequence[np.ndarray] | None,
    usable: Sequence[int],
    kl_coef: float,
    config: PPO,
) -> Divergence:
    """Measures the old policy's KL to the reference (0 without a reference) on the `usable` rollouts. If the
    old policy is the actor, also measures its distance to the sampler."""
    chosen = [rollouts[i] for i in usable]
    own = _of_responses(chosen, [logprobs[i] for i in usable])
    kl = 0.0
    metrics = dict[str, float]()
    if ref_logprobs:
        reference = _of_responses(chosen, [ref_logprobs[i] for i in usable])
        estimates = kl_estimate(own, reference, config.kl_estimator)
        kl = float(estimates.mean(dtype=torch.float64))
        metrics = {
            "kl/mean": kl,
            "kl/per_answer": float(estimates.sum(dtype=torch.float64)) / len(usable),
            **{f"kl/p{at}": percentile(estimates, at) for at in (10, 50, 90, 99)},
            "kl/coef": kl_coef,
            **kl_by_teacher(chosen, estimates, config),
        }
    if config.sampler_is != "in_ratio":
        metrics |= distance_to_sampler(rollouts, [(i, logprobs[i]) for i in usable], config)
    return Divergence(kl, metrics)


def distance_to_sampler(rollouts: Sequence[Rollout], logprobs: Scored, config: PPO) -> dict[str, float]:
    """Measures the distance between trainer and sampler (`sampler_metrics`). `logprobs` holds pairs of a
    rollout's index and the trainer's log-probs (T,); it is empty if the actor was not trained."""
    if not logprobs:
        return {}
    chosen = [rollouts[i] for i, _ in logprobs]
    own = _of_responses(chosen, [values for _, values in logprobs])
    gaps = own - _of_responses(chosen, [rollout.sampler_logprobs for rollout in chosen])
    lengths = torch.tensor([np.count_nonzero(rollout.document.mask_array) for rollout in chosen])
    return sampler_metrics(gaps, lengths, config)


def _of_responses(rollouts: Sequence[Rollout], rows: Sequence[np.ndarray]) -> Tensor:
    """Returns the values of all response tokens, concatenated."""
    own = [row[_response(rollout.document.mask_array)] for rollout, row in zip(rollouts, rows, strict=True)]
    return torch.from_numpy(np.concatenate(own))


def nothing_to_learn(answers: int, cut: int, config: PPO) -> str:
    """Returns a message that explains why no answer of a rollout can be trained on. `cut` is the number of
    truncated answers."""
    if config.mask_truncated and cut:
        why = f"a limit cut {cut}: raise generate_max_len, or leave out mask_truncated"
    else:
        why = "each prompt needs two answers with a reward"
    return f"none of the {answers} answers can be learned from: {why}"


class Estimated(NamedTuple):
    """Holds advantages and returns, and which answers have them (B,). Advantages and returns are (B, T), or
    (B, 1) for estimators of whole answers."""

    credit: Credit
    usable: Tensor


def early_rewards(
    rollouts: Sequence[Rollout], rewards: Rewards, config: PPO, lengths_of: Lengths | None
) -> Tensor | None:
    """Returns the parts of the reward with known tokens, weighted as in the sum (B, T). These are rewards at
    tokens that end the answers of an episode, and rewards of an answer's steps. Returns None if there are
    none, or if the estimator compares the rewards of whole answers. The rewards of a standardised source go
    to the last token, because its mean is over whole answers."""
    compared = (*GROUPED, "reinforce_pp_baseline")
    if config.reward_at == "every_token" or config.advantage_estimator in compared:
        return None
    early: dict[int, np.ndarray] = {}
    for source in config.reward:
        steps = rewards.steps.get(source.title, {})
        if source.normalize not in (None, "none") or (
            not isinstance(source, EnvironmentReward) and not steps
        ):
            continue
        for i, rollout in enumerate(rollouts):
            if isinstance(source, EnvironmentReward):
                own = None if rollout.own is None else rollout.own.early
            else:
                own = _on_steps(rollout, steps.get(i), lengths_of)
            if own is not None:
                early[i] = early.get(i, 0) + source.weight * own
    if not any(row.any() for row in early.values()):
        return None
    return _pad(
        [early.get(i, np.zeros(len(rollout.document), np.float32)) for i, rollout in enumerate(rollouts)]
    )


def _on_steps(rollout: Rollout, steps: Steps | None, lengths_of: Lengths | None) -> np.ndarray | None:
    """Returns the rewards of an answer's steps at their tokens (T,). Returns None for an episode, because it
    has several answers."""
    if steps is None or lengths_of is None or rollout.own is not None:
        return None
    mask = rollout.document.mask_array
    found = np.zeros(len(rollout.document), np.float32)
    found[mask] = on_tokens(steps, lengths_of(rollout.answer))
    return found


def estimate(
    rewards: Tensor,
    kl: Tensor,
    coef: float,
    values: Tensor,
    mask: Tensor,
    scored: Tensor,
    config: PPO,
    early: Tensor | None = None,
    after: Tensor | None = None,
) -> Estimated:
    """Returns advantages from the configured estimator. `rewards` and `scored` are (B,); `kl`, `values` and
    `mask` are (B, T); `coef` is the coefficient of the KL. `early` (B, T) is as in `token_rewards`;
    estimators of whole answers do not use it. `after` (B,) is as in `gae`, the only estimator that uses it.

    For estimators of whole answers, the KL of an answer is the sum over its tokens (Ahmadian et al. 2024, eq.
    1). It is compared within the group like the reward, but not divided by a standard deviation.
    """
    gamma = config.gamma
    n = config.n_samples_per_prompt

    def per_token(scores: Tensor, coef: float = 0.0) -> Tensor:
        return token_rewards(
            kl, coef, scores, mask, config.reward_at, None if early is None else torch.where(mask, early, 0)
        )

    match config.advantage_estimator:
        case "gae":
            advantages, returns = gae(per_token(rewards, coef), values, mask, gamma, config.lambd, after)
            return Estimated(
                Credit(whiten(advantages, mask) if config.whiten_advantages else advantages, returns), scored
            )
        case "reinforce_pp":
            advantages = reinforce_pp(per_token(rewards), coef * kl, mask, gamma, config.whiten_advantages)
            return Estimated(Credit(advantages, advantages), scored)
        case "reinforce_pp_baseline":
            centred, compared = in_groups(dr_grpo, rewards, scored, n)
            advantages = reinforce_pp(per_token(centred), coef * kl, mask & compared[:, None], gamma)
            return Estimated(Credit(advantages, advantages), compared)
        case grouped:  # the other estimators compare the answers to one prompt
            if grouped == "grpo" and normalized_in_groups(config.reward):
                of_answers, compared = gdpo(rewards, scored, n)
            else:
                of_answers, compared = in_groups(GROUPED[grouped], rewards, scored, n)
            if coef:
                of_answers = (
                    of_answers - coef * in_groups(KL_ESTIMATORS[grouped], kl.sum(-1), scored, n).advantages
                )
            return Estimated(Credit(of_answers[:, None], of_answers[:, None]), compared)


def _kl_of_answers(
    logprobs: Sequence[np.ndarray],
    ref_logprobs: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    estimator: KLEstimator,
) -> Tensor:
    """Returns the sum of each answer's KL (B,). Works row by row, because arrays of all answers would not fit
    into the processor's caches."""
    rows = [(_response(mask), own, ref) for mask, own, ref in zip(masks, logprobs, ref_logprobs, strict=True)]
    # Copies: arrays from other processes are read-only, and PyTorch warns about that.
    return torch.stack(
        [kl_estimate(torch.tensor(own[at]), torch.tensor(ref[at]), estimator).sum() for at, own, ref in rows]
    )


def _pad(rows: Sequence[np.ndarray], dtype: torch.dtype = torch.float32) -> Tensor:
    """Pads ragged (T_i,) rows to (B, T) with zeros."""
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=dtype)
    for target, row in zip(padded.numpy(), rows, strict=True):
        target[: len(row)] = row
    return padded


def _response(mask: np.ndarray) -> slice | np.ndarray:
    """Returns the positions where a mask is true. This is a slice, which copies nothing, if the mask is true
    from one token to the end."""
    first = int(mask.argmax())
    return slice(first, None) if mask[first:].all() else mask


def _cut(padded: Tensor, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Removes the padding of padded rows. `rows` has the original lengths."""
    return [found[: len(row)] for found, row in zip(padded.numpy(), rows, strict=True)]
