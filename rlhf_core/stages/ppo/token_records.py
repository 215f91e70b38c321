"""Records the numbers that an iteration computed for some of its answers, for human readers. For each token,
these are its advantage and the log-probs of engine, trainer and reference. For each answer, these are the
parts of its reward, the age of the weights that sampled it, and whether it was trained on.

Training used the same numbers; nothing is recomputed. Training does not read these records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_core.config import PPO
from rlhf_core.objectives.advantages import kl_estimate
from rlhf_core.objectives.sampler_weights import kept_tokens
from rlhf_core.rewards.clients import Rewards
from rlhf_core.stages.ppo.rewards.credit import Credited, RewardParts
from rlhf_core.stages.ppo.rewards.texts import TokenTexts
from rlhf_core.stages.ppo.roles.role_passes import Scored, on_tokens
from rlhf_core.stages.ppo.rollout_records import Rollout, Scores, shown_one
from rlhf_core.stages.ppo.sampling.stored import digest_of_row

ANSWERS = 8  # approximate number of answers recorded per logged iteration
OF_A_PROMPT = 4  # most answers recorded per prompt, if there are other prompts
MAX_TOKENS = 16_384  # most tokens recorded per answer or episode, from its start


class TokenRecord(NamedTuple):
    """Holds the numbers that an iteration computed for one answer. Arrays (N,) are over the tokens in the
    document's mask, and None if they were not computed.

    `trainer` holds the actor's log-probs before the iteration's first optimiser step, or from the passes of
    that step. `left_out` marks tokens that `sampler_is: mask` leaves out of the loss. `trained` says whether
    the answer is in the loss. `reward` holds its parts by name. `ages` holds the smallest and the largest
    age, in updates, of the weights that sampled the tokens.
    """

    advantages: np.ndarray
    trainer: np.ndarray | None
    reference: np.ndarray | None
    left_out: np.ndarray | None
    trained: bool
    reward: Mapping[str, float]
    ages: tuple[int, int] | None


def chosen_answers(rollouts: Sequence[Rollout], config: PPO) -> list[int]:
    """Returns the indices of the answers to record, about `ANSWERS`.

    Chooses the prompts whose rows have the lowest digests. A prompt recorded in one iteration is then likely
    to be recorded in other passes over the prompts too, so that its answers can be compared.
    """
    if len(rollouts) <= ANSWERS:
        return list(range(len(rollouts)))
    n = config.n_samples_per_prompt
    prompts = min(len(rollouts) // n, -(-ANSWERS // min(n, OF_A_PROMPT)))
    each = min(n, -(-ANSWERS // prompts))
    digests = [digest_of_row(rollout.prompt) for rollout in rollouts[::n]]
    first = sorted(range(len(digests)), key=lambda group: (digests[group], group))[:prompts]
    return [group * n + j for group in sorted(first) for j in range(each)]


def token_records(
    rollouts: Sequence[Rollout],
    scores: Scores,
    credited: Credited,
    of_training: Scored,
    config: PPO,
    age: int | None,
    version: int | None,
) -> dict[int, TokenRecord]:
    """Returns the records of `chosen_answers` by index. `of_training` holds log-probs of the first training
    pass by index. `age` applies to all answers. `version` is the version of the actor's weights if the
    engines sample without pause. `age` and `version` are None if unknown."""
    read = dict(of_training)
    scored_before = scores.logprobs is not None and config.sampler_is != "in_ratio"
    used = set(credited.usable)
    records = {}
    for i in chosen_answers(rollouts, config):
        rollout = rollouts[i]
        mask = rollout.document.mask_array
        trainer = scores.logprobs[i] if scored_before and scores.logprobs is not None else read.get(i)
        old = scores.logprobs[i] if scores.logprobs is not None else trainer
        reference = None if scores.ref_logprobs is None else scores.ref_logprobs[i]
        left_out = None
        if config.sampler_is == "mask" and old is not None:
            left_out = ~kept_tokens(old, rollout.sampler_logprobs, mask, config)[mask]
        reward = reward_parts(credited.parts, i)
        if old is not None and reference is not None:
            reward["kl"] = summed_kl(old[mask], reference[mask], config)
            reward["kl_coef"] = credited.parts.kl_coef
        records[i] = TokenRecord(
            np.array(on_tokens(credited.experience[i].advantages, rollout.document)[mask]),
            None if trainer is None else np.array(trainer[mask]),
            None if reference is None else np.array(reference[mask]),
            left_out,
            i in used,
            reward,
            ages_of(rollout, age, version),
        )
    return records


def reward_parts(parts: RewardParts, i: int) -> dict[str, float]:
    """Returns the steps from an answer's rewards to its advantage, in order: the weighted `sum`, `clipped`,
    each penalty, and `shaped`, which estimators read. Empty for an answer without a reward."""
    if not parts.scored[i]:
        return {}
    shaped = parts.shaped
    penalties = {name: float(values[i]) for name, values in shaped.penalties.items()}
    found = {"sum": float(parts.summed[i]), "clipped": float(shaped.clipped[i])}
    return found | penalties | {"shaped": float(shaped.rewards[i])}


def summed_kl(old: np.ndarray, reference: np.ndarray, config: PPO) -> float:
    """Returns an answer's estimated KL to the reference, in nats, summed over its tokens (N,)."""
    estimates = kl_estimate(torch.tensor(old), torch.tensor(reference), config.kl_estimator)
    return float(estimates.sum(dtype=torch.float64))


def ages_of(rollout: Rollout, age: int | None, version: int | None) -> tuple[int, int] | None:
    """Returns `TokenRecord.ages`; None if unknown or if no token was sampled."""
    if version is None or not rollout.versions:
        return None if age is None else (age, age)
    ages = rollout.ages(version)
    return (int(ages.min()), int(ages.max())) if len(ages) else None


def readable(
    rollouts: Sequence[Rollout],
    rewards: Rewards,
    records: Mapping[int, TokenRecord],
    decode: Callable[[Sequence[int], bool], str],
    texts_of: Callable[[Sequence[int]], TokenTexts] | None,
) -> Iterator[dict[str, Any]]:
    """Yields the recorded rollouts as JSON: the rows of `shown_one` with the numbers of their tokens.
    `answer` counts the answers to a prompt; `row` is a digest of the prompt's row."""
    same: dict[int, int] = {}  # number of answers so far, keyed by the identity of the prompt's row
    for i, rollout in enumerate(rollouts):
        number = same[id(rollout.prompt.row)] = same.get(id(rollout.prompt.row), 0) + 1
        if i not in records:
            continue
        given = {title: float(values[i]) for title, values in rewards.by_source.items()}
        place = {"row": digest_of_row(rollout.prompt), "answer": number}
        row = place | shown_one(rollout, given, decode)
        record = records[i]
        row |= {"trained": record.trained, "reward": finite(record.reward)}
        row |= {"ages": record.ages, "ended_by": ended_by(rollout)}
        row["prompt_messages"] = len(rollout.prompt.messages)
        row["prompt_cut"] = rollout.prompt.truncated
        if texts_of is not None:
            row["tokens"] = tokens_of(rollout, record, texts_of)
        yield row


def ended_by(rollout: Rollout) -> str | None:
    """Returns the limit (turns, tokens or time) that ended an answer or episode, or None if it is
    complete."""
    if rollout.own is not None and rollout.own.ended_by is not None:
        return rollout.own.ended_by
    return None if rollout.finished else "tokens"


def tokens_of(
    rollout: Rollout, record: TokenRecord, texts_of: Callable[[Sequence[int]], TokenTexts]
) -> dict[str, Any]:
    """Returns the first `MAX_TOKENS` tokens of a rollout as JSON: their ids and texts, which tokens are
    special, the borders of sampled tokens, where further conversations start, and the record's numbers for
    the sampled tokens in order. `total` and `sampled` count the tokens of the whole rollout."""
    document = rollout.document
    mask = document.mask_array[:MAX_TOKENS]
    ids = [int(token) for token in document.tokens[:MAX_TOKENS]]
    texts = texts_of(ids)
    sampled = int(mask.sum())
    found: dict[str, Any] = {
        "total": len(document),
        "sampled": int(document.mask_array.sum()),
        "ids": ids,
        "texts": texts.texts,
        "special": texts.special,
        "answers": np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist(),
        "starts": [start for start in document.starts if start < MAX_TOKENS],
        "advantages": shortest(record.advantages[:sampled]),
        "engine": shortest(rollout.sampler_logprobs[: len(mask)][mask]),
    }
    for name in ("trainer", "reference"):
        values = getattr(record, name)
        if values is not None:
            found[name] = shortest(values[:sampled])
    if record.left_out is not None:
        found["left_out"] = np.flatnonzero(record.left_out[:sampled]).tolist()
    return found


def shortest(values: np.ndarray) -> list[float | None]:
    """Returns float32 numbers as the shortest decimals that read back as the same float32, with None for
    numbers that are not finite."""
    known = np.isfinite(values).tolist()
    narrow = values.astype(np.float32)
    return [float(str(value)) if finite else None for value, finite in zip(narrow, known, strict=True)]


def finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """Returns the numbers for JSON, with None for numbers that are not finite."""
    return {name: value if np.isfinite(value) else None for name, value in values.items()}
