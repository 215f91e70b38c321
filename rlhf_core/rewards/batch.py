"""Scores one batch of answers. Reward models run one after another, while functions, servers and judges
behind endpoints run in parallel. Then judges on the stage's engines run one after another, so that each has
the GPUs to itself.

Used by stages that score once; PPO's reward models run on the Ray cluster. `Client._batch` in clients.py
splits a batch to find an answer that hangs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from rlhf_core.config.rewarding.judge_models import EngineJudge
from rlhf_core.config.rewarding.judge_reward import JudgeReward
from rlhf_core.config.rewards import ModelReward, RewardSource
from rlhf_core.data.documents import Document
from rlhf_core.models.reward_scoring import RewardScorer
from rlhf_core.rewards.clients import Clients, client_of, collect, with_source
from rlhf_core.rewards.combine import Combined, Term, combine, term_of, with_answers
from rlhf_core.rewards.judge.label_agreement import OpenJudge, opened
from rlhf_core.rewards.named_rows import task_metrics
from rlhf_core.rewards.own_tokens import OwnTokens
from rlhf_core.rewards.reward_contract import Sample


def reward_batch(
    sources: Sequence[RewardSource],
    paths: Mapping[str, str],
    documents: Sequence[Document],
    samples: Sequence[Sample],
    max_failed: float,
    micro_batch_size: int,
    trust_remote_code: bool = False,
    dtype: str = "float32",
    scores: Callable[[str, Sequence[Document]], list[float]] | None = None,
    own_tokens: Mapping[str, OwnTokens] = MappingProxyType({}),
    cache: Path | None = None,
    samples_per_prompt: int = 1,
    open_judge: OpenJudge | None = None,
    micro_tokens: int | None = None,
) -> Combined:
    """Returns the weighted sum over all sources, (N,) for N answers.

    The answers are given both as documents (for models) and as samples (for functions, servers and judges).
    `micro_batch_size`, `micro_tokens`: as in `score_documents`. `dtype`: dtype of the reward models; auto:
    the dtype of each checkpoint. `scores`: scores documents with a model outside this process. `own_tokens`:
    an `OwnTokens` by title, for reward models whose tokenizer differs from the documents' tokenizer. `cache`:
    folder for judges' verdicts. `samples_per_prompt`: number of consecutive answers per prompt, which judges
    may compare. `open_judge`: for judges on engines of the stage. The normalisation `running` uses the mean
    and standard deviation of this batch; `group` uses the mean and standard deviation of the answers to each
    prompt. Raises RewardsFailed when a source leaves more than the fraction `max_failed` of the answers
    without a reward, and ValueError when no answer has a reward from every source.
    """
    allowed = int(max_failed * len(documents))
    models = [source for source in sources if isinstance(source, ModelReward)]

    def score(source: ModelReward) -> tuple[str, list[float]]:
        given = own_tokens[source.title].documents(samples) if source.title in own_tokens else documents
        if scores is not None:
            return source.title, scores(paths[source.model], given)
        return source.title, RewardScorer(
            paths[source.model], dtype, micro_batch_size, trust_remote_code, micro_tokens
        ).score(given)

    judges = [
        source
        for source in sources
        if isinstance(source, JudgeReward) and isinstance(source.judge, EngineJudge)
    ]
    requested = [source for source in sources if source not in (*models, *judges)]
    clients = Clients([client_of(source, cache=cache, group=samples_per_prompt) for source in requested])
    try:
        pending = clients.start(samples, allowed)
        rewards = collect(map(score, models), pending, allowed)
    finally:
        clients.close()
    spent = clients.spent()
    for judge in judges:
        with opened(judge, open_judge) as chat:
            client = client_of(judge, cache=cache, group=samples_per_prompt, chat=chat)
            rewards = with_source(rewards, judge.title, client.score(samples, allowed))
        spent |= client.spent()
    terms = terms_of(sources, paths)
    statistics = with_answers({}, rewards.by_source, terms)
    combined = combine(rewards.by_source, terms, statistics, samples_per_prompt)
    lengths = [int(np.count_nonzero(document.mask_array)) for document in documents]
    by_task = task_metrics(sources, rewards.by_source, [sample.row for sample in samples], lengths)
    return combined._replace(metrics=combined.metrics | spent | by_task)


def terms_of(sources: Sequence[RewardSource], paths: Mapping[str, str]) -> list[Term]:
    """Returns the terms of the sum. Raises ValueError when a model lacks the stored statistics that its
    source requests."""
    return [
        term_of(source, paths[source.model] if isinstance(source, ModelReward) else None)
        for source in sources
    ]
